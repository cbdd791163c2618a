"""Rotary positions (Su et al., RoFormer, arXiv:2104.09864, eq. 34).

    A[i,j] = (R_i Q_i)·(R_j K_j) / √d
    R_p rotates the pair (x_t, x_{t + d/2}) by the angle p · θ^(−2t/d),  t = 0, …, d/2 − 1

i = query, j = key. The product of two rotated vectors depends on i − j alone. Values are not rotated. θ is
`--rope-theta`, 10000 in the paper; layers with `--local-attention` use `--local-rope-theta`. Nothing is learned:
`--relative-distance` is refused, and `--relative-table` changes nothing.

Departure: the paper pairs neighbours, (x_{2t}, x_{2t+1}). We pair the two halves of a head, as ModernBERT and Llama do
in transformers. Reordering the rows of W^Q and W^K to 0, 2, 4, …, 1, 3, 5, … per head turns one model into the other.
"""

import torch
from torch import Tensor, nn

from megatron_ddrp.model.positions.contract import LayerPositions, PositionEncoding, Sizes


class Rotation(LayerPositions):
    """Rotation of queries and keys in one layer.

    Attributes:
        theta: θ of layers that attend to whole documents. Training may change it; each call reads it.
        local_theta: θ of local layers; None means `theta`.
    """

    def __init__(self, config: Sizes) -> None:
        super().__init__(config)
        self.theta, self.local_theta = config.rope_theta, config.local_rope_theta

    @property
    def base(self) -> float:
        """θ of this layer."""
        return self.local_theta if self.is_local and self.local_theta is not None else self.theta

    @property
    def constants(self) -> tuple[float, ...]:
        return (self.base,)

    def rotate(self, states: Tensor, position_ids: Tensor) -> Tensor:
        wide = torch.promote_types(states.dtype, torch.float32)
        size = states.shape[-1]
        frequency = self.base ** (-torch.arange(0, size, 2, device=states.device, dtype=wide) / size)  # [d/2]
        angle = (position_ids.unsqueeze(-1) * frequency).unsqueeze(1)  # [batch, 1, seq, d/2]
        cos, sin = angle.cos(), angle.sin()
        first, second = states.to(wide).chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(states.dtype)


def set_theta(model: nn.Module, theta: float) -> None:
    """Set θ of every rotation in a model, from the next pass on. Local layers with a θ of their own keep it."""
    for module in model.modules():
        if isinstance(module, Rotation):
            module.theta = theta


class Rope(PositionEncoding):
    """Encoding by a rotation of queries and keys in every layer."""

    any_length = True
    is_relative = True
    in_logits = False
    relative_distance = None
    layer_part = Rotation

    @staticmethod
    def refusal(config: Sizes) -> str | None:
        if config.head_dim % 2 == 0:
            return None
        return f"turns pairs of numbers, got heads {config.head_dim} wide: choose an even hidden size per head"
