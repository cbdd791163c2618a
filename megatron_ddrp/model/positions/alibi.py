"""ALiBi for encoders (Press et al., arXiv:2108.12409; symmetric, as in the notes of their released code).

    A[i,j] = Q_i·K_j / √d − m_h·|i − j|
    m_h = 2^(−8(h+1)/H),  h = 0, …, H − 1, for H heads, a power of two

i = query, j = key. For other H, let P be the largest power of two below H: take the slopes of P heads, then every other
slope of 2P heads, starting with the first, until there are H. Nothing is learned: `--relative-distance` is refused, and
`--relative-table` changes nothing. HCD compares the logits without this bias: the heads' biases are multiples of one
another, so their cosine would be near 1 for every model.
"""

import torch
from torch import Tensor

from megatron_ddrp.model.positions.contract import PositionEncoding, PositionTerms, Sizes


class Alibi(PositionEncoding):
    """ALiBi's encoding; `heads` holds the numbers of this module's heads."""

    any_length = True
    is_relative = True
    relative_distance = None
    by_head = {"heads": 0}

    heads: Tensor

    def __init__(self, config: Sizes) -> None:
        super().__init__(config)
        self.num_heads = config.num_attention_heads
        self.register_buffer("heads", torch.arange(self.num_heads), persistent=False)

    def forward(self, position_ids: Tensor) -> tuple[Tensor, ...]:
        """Return (v `[heads, 2·seq − 1]`,) in fp32, for the offsets i − j = −(seq − 1), …, seq − 1."""
        length = position_ids.shape[1]
        offset = torch.arange(1 - length, length, device=self.heads.device)
        return (-slopes(self.heads, self.num_heads).float().unsqueeze(1) * offset.abs(),)

    @staticmethod
    def terms(config: Sizes, tensors: tuple[Tensor, ...]) -> PositionTerms:
        reach = tensors[0].shape[1] // 2
        scale = config.head_dim**-0.5
        return PositionTerms(scale, lowest=-reach, highest=reach, offset_bias=tensors[0], biases_compared=False)


def slopes(heads: Tensor, num_heads: int) -> Tensor:
    """Return m of the heads numbered `heads` int64 `[n]`, of `num_heads` in total: float64 `[n]`."""
    power = 1 << (num_heads.bit_length() - 1)
    number = torch.where(heads < power, 2 * (heads + 1), 2 * (heads - power) + 1)  # m = 2^(−8 · number / 2P)
    return (-4 * number.double() / power).exp2()
