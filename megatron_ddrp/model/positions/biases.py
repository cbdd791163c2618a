"""Encodings that add a number to each logit: T5's, and ALiBi with fixed and with learned slopes.

In the formulas i is the query and j the key.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_ddrp.model.positions.absolute import NUM_BUCKETS, relative_bucket
from megatron_ddrp.model.positions.contract import PositionEncoding, PositionTerms, Sizes, initialise_table


class T5(PositionEncoding):
    """T5's relative bias (Raffel et al., arXiv:1910.10683, section 2.1); `relative` is β.

        A[i,j] = Q_i·K_j / √d + β[bucket(j − i), h]

    β is `[32, heads]`, 16 buckets per direction (`relative_bucket`); all layers share it unless
    `--relative-table per-layer` is given. Row 16 is never used. All distances from `--relative-distance` on (128, as in
    the released code) share the last bucket.

    Departures: T5 omits the 1/√d and starts its weights smaller instead. T5 draws its table with a deviation of
    hidden_size^(−1/2), ours uses `--init-method-std`, like every embedding.
    """

    any_length = True
    is_relative = True
    relative_distance = 128
    by_head = {"relative": 1}

    def __init__(self, config: Sizes) -> None:
        super().__init__(config)
        self.relative = initialise_table(NUM_BUCKETS, config.num_attention_heads, config)
        self.largest_distance = config.relative_distance

    def forward(self, position_ids: Tensor) -> tuple[Tensor, ...]:
        """Return (v `[heads, 2·reach + 1]`,): column c + reach serves the clipped offset c = i − j."""
        offset = torch.arange(-self.largest_distance, self.largest_distance + 1, device=self.relative.device)
        return (self.relative[relative_bucket(-offset, self.largest_distance)].T,)

    @staticmethod
    def terms(config: Sizes, tensors: tuple[Tensor, ...]) -> PositionTerms:
        reach = config.relative_distance
        return PositionTerms(config.head_dim**-0.5, lowest=-reach, highest=reach, offset_bias=tensors[0])


class Alibi(PositionEncoding):
    """ALiBi for encoders (Press et al., arXiv:2108.12409; symmetric, as in the notes of their released code).

        A[i,j] = Q_i·K_j / √d − m_h·|i − j|
        m_h = 2^(−8(h+1)/H),  h = 0, …, H − 1, for H heads, a power of two

    For other H, let P be the largest power of two below H: take the slopes of P heads, then every other slope of 2P
    heads, starting with the first, until there are H. Nothing is learned: `--relative-distance` is refused, and
    `--relative-table` changes nothing. HCD compares the logits without this bias: the heads' biases are multiples of
    one another, so their cosine would be near 1 for every model. `heads` holds the numbers of this module's heads.
    """

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


class AlibiAsym(PositionEncoding):
    """ALiBi with separate learned slopes for each direction (variant 3 in the notes of ALiBi's released code).

        A[i,j] = Q_i·K_j / √d − m^L_h·(i − j)₊ − m^R_h·(j − i)₊,    m = softplus(a)

    x₊ = max(x, 0), so m^L_h acts on keys to the left. `left` is a^L, `right` is a^R, `[heads]` each; all layers share
    them unless `--relative-table per-layer` is given. `--relative-distance` is refused.

    Departures: the notes give no initialisation that keeps slopes positive. Ours start at the symmetric slopes of
    `Alibi` in both directions, and softplus keeps them above 0. Weight decay does not act on a, because a = 0 means a
    slope of ln 2, steeper than every slope that a head starts with. HCD compares logits with this bias, since it is
    learned.
    """

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
