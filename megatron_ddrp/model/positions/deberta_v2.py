"""DeBERTa's attention from version 2 on (He et al., arXiv:2111.09543, and the released code of v2 and v3).

    A[i,j] = ( Q_i·K_j + Q_i·(R̃ W^K + b^K)[δ(i,j)] + K_j·(R̃ W^Q + b^Q)[δ(i,j)] ) / √(3d)
    R̃ = LayerNorm(R),    δ(i,j) = clip(bucket(i − j) + b, 0, 2b − 1)
    bucket(x) = x for |x| ≤ b/2, else sign(x)·( ⌈ ln(|x| / (b/2)) / ln((M − 1) / (b/2)) · (b/2 − 1) ⌉ + b/2 )

i = query, j = key; R is `[2b, D]`. b is `--relative-distance`, 256 by default, and M is `--seq-length`; the buckets
depend on both. W^K, b^K, W^Q and b^Q are the layer's own content projections (`share_att_key`), so only the table and
the LayerNorm are learned here. All layers share both unless `--relative-table per-layer` is given. Dropout acts on R̃
in every layer, before the projection. Distances above M − 1 have the bucket of M − 1, as in the released code; Hugging
Face's port reads other rows there.

Departures: the enhanced mask decoder is off unless `--deberta-emd` is given, since ELECTRA's objective needs none and
Hugging Face's port has none. The convolution of the two largest v2 models is left out.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_ddrp.model.positions.contract import LayerPositions, Map, PositionEncoding, PositionTerms, Sizes


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
    """DeBERTa's encoding from version 2 on; `relative` is R."""

    is_relative = True
    relative_distance = 256
    layer_part = SharedProjections

    def __init__(self, config: Sizes) -> None:
        super().__init__(config)
        self.buckets, self.longest = config.relative_distance, config.seq_length
        rows = torch.empty(2 * self.buckets, config.hidden_size)
        self.relative = nn.Parameter(rows.normal_(std=config.init_method_std))
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
    far = (ratio * (half - 1)).ceil().long() + half
    return offset.sign() * torch.where(distance <= half, distance, far)
