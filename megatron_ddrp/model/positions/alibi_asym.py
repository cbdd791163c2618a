"""ALiBi with separate learned slopes for each direction (variant 3 in the notes of ALiBi's released code).

    A[i,j] = Q_i·K_j / √d − m^L_h·(i − j)₊ − m^R_h·(j − i)₊,    m = softplus(a)

i = query, j = key; x₊ = max(x, 0), so m^L_h acts on keys to the left. a^L and a^R are `[heads]` each; all layers share
them unless `--relative-table per-layer` is given. `--relative-distance` is refused.

Departures: the notes give no initialisation that keeps slopes positive. Ours start at the symmetric slopes of
`alibi.py` in both directions, and softplus keeps them above 0. Weight decay does not act on a, because a = 0 means a
slope of ln 2, steeper than every slope that a head starts with. HCD compares logits with this bias, since it is
learned.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_ddrp.model.positions.alibi import slopes
from megatron_ddrp.model.positions.contract import PositionEncoding, PositionTerms, Sizes


class AlibiAsym(PositionEncoding):
    """ALiBi's encoding with learned slopes; `left` is a^L, `right` is a^R."""

    any_length = True
    is_relative = True
    relative_distance = None
    by_head = {"left": 0, "right": 0}
    gains = frozenset({"left", "right"})

    def __init__(self, config: Sizes) -> None:
        super().__init__(config)
        heads = config.num_attention_heads
        start = slopes(torch.arange(heads), heads).expm1().log().float()  # softplus(start) = slopes
        self.left, self.right = nn.Parameter(start), nn.Parameter(start.clone())

    def forward(self, position_ids: Tensor) -> tuple[Tensor, ...]:
        """Return (v `[heads, 2·seq − 1]`,) in fp32 or wider, for the offsets i − j = −(seq − 1), …, seq − 1."""
        length = position_ids.shape[1]
        wide = torch.promote_types(self.left.dtype, torch.float32)
        to_left, to_right = (F.softplus(a.to(wide)).unsqueeze(1) for a in (self.left, self.right))  # [heads, 1]
        offset = torch.arange(1 - length, length, device=self.left.device)
        return (-to_left * offset.clamp_min(0) + to_right * offset.clamp_max(0),)

    @staticmethod
    def terms(config: Sizes, tensors: tuple[Tensor, ...]) -> PositionTerms:
        reach = tensors[0].shape[1] // 2
        return PositionTerms(config.head_dim**-0.5, lowest=-reach, highest=reach, offset_bias=tensors[0])
