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

from megatron_ddrp.model.positions.contract import PositionTerms

LENGTHS = 128
"""Number of consecutive lengths that share their offsets, for encodings whose offsets grow with the length."""


def _by_head(x: Tensor) -> Tensor:
    """Return a view of `[b, s, h, d]` as `[h, b·s, d]`."""
    return x.flatten(0, 1).transpose(0, 1)


class Offsets:
    """Offsets of an encoding as the kernels see them, and the tensors with one row per offset."""

    def __init__(self, terms: PositionTerms, query: Tensor) -> None:
        """Choose the offsets for `query` `[b, s, h, d]`."""
        self.terms, self.query = terms, query
        batch, seq, num_heads, _ = query.shape
        self.cover_all = 0 < seq - 1 == terms.highest == -terms.lowest
        """True if every pair of the row has an offset of its own, so that no two share the first or the last."""
        before = -seq % LENGTHS if self.cover_all else 0
        self.lowest, self.highest = terms.lowest - before, terms.highest + before
        own = terms.highest - terms.lowest + 1
        self.rows = -(-(own + 2 * before) // 8) * 8  # rows of P begin at multiples of 16 bytes
        self.filling = (before, self.rows - own - before)
        self.own = slice(before, before + own)
        self.shape = (num_heads, batch * seq, self.rows)

    def fill(self, table: Tensor | None) -> Tensor | None:
        """Pad T `[1 | h, n, d]` with zeros: `[h, rows, d]` in the dtype of the queries."""
        if table is None:
            return None
        return F.pad(table.to(self.query.dtype), (0, 0, *self.filling)).expand(self.shape[0], -1, -1)

    @staticmethod
    def products(vectors: Tensor, table: Tensor | None) -> Tensor | None:
        """Return P: `[b, s, h, d]`, `[h, rows, d]` → `[h, b·s, rows]`."""
        return None if table is None else _by_head(vectors) @ table.transpose(-1, -2)

    def offset_bias(self) -> Tensor | None:
        """Return v/scale `[h, rows]` in fp32: the kernels multiply by the scale."""
        bias = self.terms.offset_bias
        if bias is None:
            return None
        return F.pad(bias.float() / self.terms.scale, self.filling).expand(self.shape[0], -1).contiguous()

    def empty(self) -> Tensor:
        """Allocate the gradient of P: `[h, b·s, rows]`."""
        return self.query.new_empty(self.shape)

    def through_table(
        self, d_vectors: Tensor, vectors: Tensor, d_products: Tensor | None, filled: Tensor | None, table: Tensor | None
    ) -> Tensor | None:
        """Add P's gradient times the table to `d_vectors`; return the table's gradient, summed in fp32.

        `filled` is the table padded by `fill`.
        """
        if d_products is None or filled is None or table is None:
            return None
        _by_head(d_vectors).baddbmm_(d_products, filled)
        per_head = (d_products.transpose(-1, -2) @ _by_head(vectors))[:, self.own]
        if table.shape[0] == 1:
            per_head = per_head.sum(0, keepdim=True, dtype=torch.float32)
        return per_head.to(table.dtype)

    def through_offset_bias(self, d_products: Tensor | None) -> Tensor | None:
        """Return the gradient of v: the gradient of P^q, summed over the queries in fp32."""
        bias = self.terms.offset_bias
        if d_products is None or bias is None:
            return None
        per_head = d_products[..., self.own].sum(1, dtype=torch.float32) / self.terms.scale
        return per_head.sum_to_size(bias.shape).to(bias.dtype)
