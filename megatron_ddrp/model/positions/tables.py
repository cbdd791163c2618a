"""Encodings with tables of relative positions: BERT-R, DDRP and DeBERTa, versions 1 and 2.

In the formulas i is the query and j the key.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_ddrp.model.positions.contract import (
    PROJECTIONS_BY_HEAD,
    LayerPositions,
    Map,
    PositionEncoding,
    PositionTerms,
    Sizes,
    initialise_table,
)


class BertR(PositionEncoding):
    """BERT-R: relative positions on the keys (Shaw et al., arXiv:1803.02155), eq. 4–5 of the DDRP paper.

        A[i,j] = Q_i · (K_j + K^r[σ(i,j)]) / √d,    σ(i,j) = clip(i − j, −r_s, r_s − 1) + r_s

    `relative` is K^r, `[2·r_s, d]`; all heads share it, and all layers too unless `--relative-table per-layer` is
    given.

    Departures: Shaw et al. also add a table to the values, which the DDRP paper omits for every model. They index by
    j − i and clip at ±k, which gives 2·k + 1 rows. With the DDRP paper's 2·r_s rows, offsets with the key to the left
    are clipped one step earlier.
    """

    any_length = True
    is_relative = True

    def __init__(self, config: Sizes) -> None:
        super().__init__(config)
        self.relative = initialise_table(2 * config.relative_distance, config.head_dim, config)

    def forward(self, position_ids: Tensor) -> tuple[Tensor, ...]:
        """Return (T^q `[1, 2·r_s, d]`,)."""
        return (self.relative.unsqueeze(0),)

    @staticmethod
    def terms(config: Sizes, tensors: tuple[Tensor, ...]) -> PositionTerms:
        reach = config.relative_distance
        return PositionTerms(config.head_dim**-0.5, query_table=tensors[0], lowest=-reach, highest=reach - 1)


SPREAD = 0.5
"""Standard deviation of D under `spread`."""

DIRECTION_INITS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "spread": lambda noise, std: 1 + SPREAD * noise,
    "ones": lambda noise, std: 1 + std * noise,
    "free": lambda noise, std: noise,
    "embedding": lambda noise, std: std * noise,
}
"""Value of `--direction-init` → initial D from standard normal `noise` `[3, head_dim]` and `init_method_std`."""


class Ddrp(PositionEncoding):
    """DDRP: decoupled directional relative positions ("Better Pre-Training by Reducing Representation Confusion").

        A[i,j]  = Q_i · (K_j + D[ρ(i,j)] ⊙ K^rd[δ(i,j)]) / √d                                 (eq. 9, 10)
        ρ(i,j)  = 0 for i = j, 1 for i < j (the key is to the right), 2 for i > j              (eq. 11)
        δ(i,j)  = |clip(i − j, −(r_s−1), r_s−1)|                                               (eq. 12)

    `direction` is D, `[3, d]`, and `distance` is K^rd, `[r_s, d]`; all heads share both, and all layers too unless
    `--relative-table per-layer` is given. That is 3·d + r_s·d parameters, 4,288 for a base model, as in section 5.4.

    Closed gaps: eq. 12 leaves the clip's bounds open; with r_s − 1, δ uses exactly the r_s rows that the paper counts.
    The paper gives no initialisation. Departures: `D` is drawn around 1 with a deviation of 0.5 (`--direction-init
    spread`), and weight decay, which pulls towards 0, does not act on it; `K^rd` is drawn like every embedding. If both
    start around 0 (`embedding`), their product is too small to learn from, and stays so for thousands of steps. If `D`
    starts close to 1 (`ones`), the rows for +k and −k start equal and stay equal. docs/lab/measurements.md has the
    measurements.

    Open reading: the paper does not say whether BERT's absolute embedding stays in the input. Its parameter count
    "compared with BERT" holds literally only if it stays. Ours omits it; `--absolute-embedding` adds it.
    """

    any_length = True
    is_relative = True
    gains = frozenset({"direction"})

    def __init__(self, config: Sizes) -> None:
        super().__init__(config)
        noise = torch.empty(3, config.head_dim).normal_()
        self.direction = nn.Parameter(DIRECTION_INITS[config.direction_init](noise, config.init_method_std))
        self.distance = initialise_table(config.relative_distance, config.head_dim, config)

    def forward(self, position_ids: Tensor) -> tuple[Tensor, ...]:
        """Return (T^q `[1, 2·reach + 1, d]`,): row c + reach serves the clipped offset c = i − j."""
        reach = _reach(len(self.distance))
        offset = torch.arange(-reach, reach + 1, device=self.distance.device)
        direction = torch.where(offset < 0, 1, torch.where(offset > 0, 2, 0))  # ρ
        table = self.direction[direction] * self.distance[offset.abs().clamp_max(len(self.distance) - 1)]
        return (table.unsqueeze(0),)

    @staticmethod
    def terms(config: Sizes, tensors: tuple[Tensor, ...]) -> PositionTerms:
        reach = _reach(config.relative_distance)
        return PositionTerms(config.head_dim**-0.5, query_table=tensors[0], lowest=-reach, highest=reach)


def _reach(relative_distance: int) -> int:
    """Return the largest |i − j| with a row of its own: r_s − 1, or 1 if r_s = 1, because ρ still has three values."""
    return max(relative_distance - 1, 1)


class RelativeProjections(LayerPositions):
    """Projections of one layer: W^{K,r} (`key`) and W^{Q,r} (`query`)."""

    by_head = PROJECTIONS_BY_HEAD

    def __init__(self, config: Sizes) -> None:
        super().__init__(config)
        self.head_dim, self.dropout = config.head_dim, config.hidden_dropout
        self.key = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.query = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Project (P `[2k, D]`,) to (T^q, T^k), each `[heads, 2k, d]`."""
        table = F.dropout(tensors[0], self.dropout, self.training)

        def split(projected: Tensor) -> Tensor:
            return projected.view(len(table), -1, self.head_dim).transpose(0, 1)

        return split(self.key(table)), split(self.query(table))


class Deberta(PositionEncoding):
    """DeBERTa's disentangled attention (He et al., arXiv:2006.03654), as in the released v1 code.

        A[i,j] = ( Q_i·K_j + Q_i·(P W^{K,r})[δ(i,j)] + K_j·(P W^{Q,r})[δ(i,j)] ) / √(3d)
        δ(i,j) = clip(i − j + k, 0, 2k − 1)

    `relative` is P, `[2k, D]`; all layers share it unless `--relative-table per-layer` is given. Each layer has its own
    projections, `W^{K,r}` without a bias and `W^{Q,r}` with one. The keys K have no bias (`--key-bias`), because it
    would meet the last term. k is `--relative-distance`, 64 in the DDRP paper's comparison.

    Departures: the paper indexes the last term (position to content) by δ(j,i). The released code and Hugging Face's
    port use δ(i,j), and so do we. Absolute positions are added in the enhanced mask decoder (`model/heads.py`), not
    here. As in the released code, dropout acts on P in every layer.
    """

    any_length = True
    is_relative = True
    key_bias = False
    layer_part = RelativeProjections
    decodes_absolute = True

    def __init__(self, config: Sizes) -> None:
        super().__init__(config)
        self.relative = initialise_table(2 * config.relative_distance, config.hidden_size, config)

    def forward(self, position_ids: Tensor) -> tuple[Tensor, ...]:
        """Return (P,)."""
        return (self.relative.view_as(self.relative),)  # ZeRO 3 frees a bare parameter once its module is done

    @staticmethod
    def terms(config: Sizes, tensors: tuple[Tensor, ...]) -> PositionTerms:
        query_table, key_table = tensors
        reach = config.relative_distance
        return PositionTerms(
            (3 * config.head_dim) ** -0.5,
            query_table=query_table,
            key_table=key_table,
            lowest=-reach,
            highest=reach - 1,
        )


class SharedProjections(LayerPositions):
    """Projections of R̃ by the maps of one layer's queries and keys."""

    uses_maps = True

    def __init__(self, config: Sizes) -> None:
        super().__init__(config)
        self.head_dim, self.dropout = config.head_dim, config.hidden_dropout

    def of_layer(self, tensors: tuple[Tensor, ...], query: Map, key: Map) -> tuple[Tensor, ...]:
        """Project (R̃ `[rows, D]`, row of each offset) to (T^q, T^k `[heads, rows, d]` each, row of each offset)."""
        table, row = tensors
        table = F.dropout(table, self.dropout, self.training)

        def split(projected: Tensor) -> Tensor:
            return projected.unflatten(-1, (-1, self.head_dim)).transpose(0, 1)

        return split(key(table)), split(query(table)), row


class DebertaV2(PositionEncoding):
    """DeBERTa's attention from version 2 on (He et al., arXiv:2111.09543, and the released code of v2 and v3).

        A[i,j] = ( Q_i·K_j + Q_i·(R̃ W^K + b^K)[δ(i,j)] + K_j·(R̃ W^Q + b^Q)[δ(i,j)] ) / √(3d)
        R̃ = LayerNorm(R),    δ(i,j) = clip(bucket(i − j) + b, 0, 2b − 1)
        bucket(x) = x for |x| ≤ b/2, else sign(x)·( ⌈ ln(|x| / (b/2)) / ln((M − 1) / (b/2)) · (b/2 − 1) ⌉ + b/2 )

    `relative` is R, `[2b, D]`. b is `--relative-distance`, 256 by default, and M is `--seq-length`; the buckets depend
    on both. W^K, b^K, W^Q and b^Q are the layer's own content projections (`share_att_key`), so only the table and the
    LayerNorm are learned here. All layers share both unless `--relative-table per-layer` is given. Dropout acts on R̃
    in every layer, before the projection. Distances above M − 1 have the bucket of M − 1, as in the released code;
    Hugging Face's port reads other rows there.

    Departures: the enhanced mask decoder is off unless `--deberta-emd` is given, since ELECTRA's objective needs none
    and Hugging Face's port has none. The convolution of the two largest v2 models is left out.
    """

    is_relative = True
    relative_distance = 256
    layer_part = SharedProjections

    def __init__(self, config: Sizes) -> None:
        super().__init__(config)
        self.buckets, self.longest = config.relative_distance, config.seq_length
        self.relative = initialise_table(2 * self.buckets, config.hidden_size, config)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layernorm_epsilon)

    def forward(self, position_ids: Tensor) -> tuple[Tensor, ...]:
        """Return (R̃ `[rows, D]`, row of each offset i − j = −(seq − 1), …, seq − 1, int64 `[2·seq − 1]`).

        R̃ has only the rows that a sequence of this length reads.
        """
        length = position_ids.shape[1]
        reach = self.buckets
        if not torch.compiler.is_compiling():  # a captured graph serves every length
            reach = int(bucket(torch.tensor(length - 1, device="cpu"), self.buckets, self.longest)) + 1
        read = self.relative[self.buckets - reach + 1 : self.buckets + reach]
        offset = torch.arange(1 - length, length, device=self.relative.device)
        return self.norm(read), bucket(offset, self.buckets, self.longest) + reach - 1

    @staticmethod
    def refusal(config: Sizes) -> str | None:
        if config.relative_distance >= 2 and config.relative_distance % 2 == 0:
            return None
        return (
            f"half of the buckets serve one offset each, got --relative-distance {config.relative_distance}: "
            "choose an even number, 256 as released"
        )

    @staticmethod
    def terms(config: Sizes, tensors: tuple[Tensor, ...]) -> PositionTerms:
        query_table, key_table, row = tensors
        reach = row.shape[0] // 2
        scale = (3 * config.head_dim) ** -0.5
        return PositionTerms(scale, query_table, key_table, lowest=-reach, highest=reach, table_row=row)


def bucket(offset: Tensor, buckets: int, longest: int) -> Tensor:
    """Return bucket(i − j) of int64 offsets, from −(b − 1) to b − 1, for b = `buckets` and M = `longest`."""
    half = buckets // 2
    distance = offset.abs().clamp_max(longest - 1)
    if longest - 1 <= half:
        return offset.sign() * distance
    ratio = (distance.clamp_min(half).double() / half).log() / math.log((longest - 1) / half)
    far = (ratio * (half - 1)).ceil().long().clamp_max(half - 1) + half
    return offset.sign() * torch.where(distance <= half, distance, far)
