"""Tensors that the Triton kernels index by offset i − j: P^q = Q·T^qᵀ, P^k = K·T^kᵀ and v, and their gradients.

The offsets are compile-time constants of the kernels. Encodings with an offset for every pair of the row (ALiBi,
DeBERTa's buckets) would need a new compilation for each length. So rows of zeros, which no pair reads, give all lengths
up to the next multiple of 128 the same offsets.

Names: b = batch, h = heads, s = sequence, d = head size, n = offsets of the encoding, rows = n plus the rows of zeros.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

LENGTHS = 128
"""Number of consecutive lengths that share their offsets, for encodings whose offsets grow with the length."""


def _by_head(x: Tensor) -> Tensor:
    """Return a view of `[b, s, h, d]` as `[h, b·s, d]`."""
    return x.flatten(0, 1).transpose(0, 1)


class Offsets:
    """Offsets of an encoding as the kernels see them, and the tensors with one row per offset."""

    def __init__(self, lowest: int, highest: int, seq: int) -> None:
        """Choose the offsets for rows of `seq` tokens; `lowest` and `highest` are those of `PositionTerms`."""
        self.cover_all = 0 < seq - 1 == highest == -lowest
        """True if every pair of the row has an offset of its own, so that no two share the first or the last."""
        before = -seq % LENGTHS if self.cover_all else 0
        self.lowest, self.highest = lowest - before, highest + before
        own = highest - lowest + 1
        self.rows = -(-(own + 2 * before) // 8) * 8  # rows of P begin at multiples of 16 bytes
        self.filling = (before, self.rows - own - before)
        self.own = slice(before, before + own)

    def fill(self, table: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """Pad T `[1 | h, n, d]` with zeros: `[1 | h, rows, d]` in the dtype of the queries."""
        return None if table is None else F.pad(table.to(dtype), (0, 0, *self.filling))

    @staticmethod
    def products(vectors: Tensor, filled: Tensor | None) -> Tensor | None:
        """Return P: `[b, s, h, d]`, `[1 | h, rows, d]` → `[h, b·s, rows]`."""
        if filled is None:
            return None
        return torch.bmm(_by_head(vectors), filled.expand(vectors.shape[2], -1, -1).transpose(1, 2))

    def offset_bias(self, bias: Tensor | None, scale: float, num_heads: int) -> Tensor | None:
        """Return v/scale `[h, rows]` in fp32 for v `[1 | h, n]`: the kernels multiply by the scale."""
        if bias is None:
            return None
        return F.pad(bias.float() / scale, self.filling).expand(num_heads, -1).contiguous()

    def empty(self, vectors: Tensor) -> Tensor:
        """Allocate the gradient of P, `[h, b·s, rows]`, for queries or keys `[b, s, h, d]`."""
        batch, seq, num_heads, _ = vectors.shape
        return vectors.new_empty(num_heads, batch * seq, self.rows)

    def through_table(
        self, d_vectors: Tensor, vectors: Tensor, d_products: Tensor | None, filled: Tensor | None
    ) -> Tensor | None:
        """Add P's gradient times the table to `d_vectors`; return the table's gradient, summed over heads in fp32.

        `filled` is the table padded by `fill`.
        """
        if d_products is None or filled is None:
            return None
        _by_head(d_vectors).baddbmm_(d_products, filled.expand(len(d_products), -1, -1))
        per_head = torch.bmm(d_products.transpose(1, 2), _by_head(vectors))[:, self.own]
        return per_head.sum(0, keepdim=True, dtype=torch.float32) if filled.shape[0] == 1 else per_head

    def through_offset_bias(self, d_products: Tensor | None, bias: Tensor | None, scale: float) -> Tensor | None:
        """Return the gradient of v: the gradient of P^q, summed over the queries in fp32."""
        if d_products is None or bias is None:
            return None
        per_head = d_products[..., self.own].sum(1, dtype=torch.float32) / scale
        return per_head.sum_to_size(bias.shape).to(bias.dtype)
