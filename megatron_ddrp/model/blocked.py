"""Attention for CPUs: some query rows at a time, so that their logits stay in cache, recomputed in the backward pass.

The same formula as `megatron_ddrp.model.attention`, forward and gradient written out. Short sequences are taken several
at once, long ones in tiles of query rows; padding at the end is cut off before anything is computed. The inner products
of HCD's heads come from the logits while they are at hand and their gradient joins that of the softmax, so HCD costs a
few dot products and one addition instead of a second QKᵀ.

Names: b = batch, h = heads, g = b·h, s = sequence, d = head size, n = longest sequence of a block, t = rows of a tile,
R = rows of a relative table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_ddrp.model.positions.contract import PositionTerms
from megatron_ddrp.model.relative import BandTile
from megatron_ddrp.objectives import mth

BLOCK_ELEMENTS = 2**18
"""Logits up to which several short sequences are taken at once (1 MiB in fp32), to share the cost of starting each
operation; above it the copies that this takes cost more."""

TILE_ELEMENTS = 3 * 2**18
"""Logits of a tile of query rows of a long sequence: 3 MiB in fp32, about the second-level caches of a few cores."""

SMALLEST_TILE = 32
"""Fewer query rows than this are not worth a tile of their own."""


@dataclass(frozen=True)
class _Block:
    """Some rows of the batch, cut to their longest sequence."""

    rows: slice
    length: int
    document_ids: Tensor
    """`[b, n]`."""
    unmasked: bool
    """Whether every pair of the block is allowed."""

    def take(self, tensor: Tensor) -> Tensor:
        """`[batch, h, s, d]` → this block's `[g, n, d]`."""
        return tensor[self.rows, :, : self.length].flatten(0, 1)

    def tiles(self, num_heads: int) -> Iterator[slice]:
        """Cut the query rows into tiles of about `TILE_ELEMENTS` logits."""
        per_row = len(self.document_ids) * num_heads * self.length
        rows = max(SMALLEST_TILE, TILE_ELEMENTS // per_row)
        count = -(-self.length // rows)
        rows = -(-self.length // count)
        for start in range(0, self.length, rows):
            yield slice(start, min(start + rows, self.length))

    def forbidden(self, tile: slice) -> Tensor | None:
        """bool `[b, 1, t, n]` pairs of two documents or with padding; None where there are none."""
        if self.unmasked:
            return None
        own = self.document_ids[:, tile].unsqueeze(-1)
        return ((own != self.document_ids.unsqueeze(-2)) | (own == 0)).unsqueeze(1)


def _blocks(document_ids: Tensor, num_heads: int) -> Iterator[_Block]:
    """Cut the batch into blocks of at most `BLOCK_ELEMENTS` logits (at least one row)."""
    batch, seq = document_ids.shape
    place = torch.arange(1, seq + 1, device=document_ids.device)
    lengths = ((document_ids > 0) * place).amax(-1).clamp_min(1).tolist()
    start = 0
    while start < batch:
        end, longest = start + 1, lengths[start]
        while end < batch:
            longer = max(longest, lengths[end])
            if (end + 1 - start) * num_heads * longer**2 > BLOCK_ELEMENTS:
                break
            end, longest = end + 1, longer
        ids = document_ids[start:end, :longest]
        yield _Block(slice(start, end), longest, ids, bool((ids == 1).all()))
        start = end


class _Positions:
    """The position terms of one block: added to a tile's logits, and their gradients collected."""

    def __init__(self, terms: PositionTerms, block: _Block, query: Tensor, key: Tensor) -> None:
        """`query`, `key` `[g, n, d]`, both times `scale`."""
        self.terms, self.block, self.query, self.key = terms, block, query, key
        self.num_heads = len(query) // len(block.document_ids)
        self.query_table, self.key_table = (self._largest_first(t) for t in (terms.query_table, terms.key_table))
        self.by_key = None
        if self.key_table is not None:
            by_key = key @ self.key_table.transpose(-1, -2)  # [g, n, R]
            self.by_key = torch.nn.functional.pad(by_key, (0, 0, terms.highest, -terms.lowest))

    def _largest_first(self, table: Tensor | None) -> Tensor | None:
        """`[1 or h, R, d]` → `[1 or g, R, d]`, row 0 for the largest offset."""
        if table is None:
            return None
        flipped = table.flip(1)
        return flipped if len(table) == 1 else flipped.repeat(len(self.block.document_ids), 1, 1)

    def _tile(self, tile: slice) -> BandTile:
        terms, rows = self.terms, tile.stop - tile.start
        return BandTile(tile.start, rows, self.block.length, terms.lowest, terms.highest, self.query.device)

    def add(self, logits: Tensor, tile: slice) -> None:
        """Add everything but Q·K to `[g, t, n]`."""
        if self.query_table is not None or self.by_key is not None:
            by_query = None
            if self.query_table is not None:
                by_query = (self.query[:, tile] @ self.query_table.transpose(-1, -2)).to(logits.dtype)
            by_key = None if self.by_key is None else self.by_key.to(logits.dtype)
            self._tile(tile).add(logits, by_query, by_key)
        if self.terms.bias is not None:
            self._per_row(logits).add_(self._bias(self.terms.bias)[:, :, tile, : self.block.length])

    def _per_row(self, logits: Tensor) -> Tensor:
        return logits.unflatten(0, (-1, self.num_heads))  # [b, h, t, n]

    def _bias(self, bias: Tensor) -> Tensor:
        return bias if len(bias) == 1 else bias[self.block.rows]


class _PositionGradients:
    """Sums of the gradients of the tables and the bias over all blocks."""

    def __init__(self, terms: PositionTerms) -> None:
        self.query_table, self.key_table, self.bias = (
            None if x is None else torch.zeros_like(x) for x in (terms.query_table, terms.key_table, terms.bias)
        )

    def collect_tile(
        self, positions: _Positions, tile: slice, d_logits: Tensor, d_query: Tensor, d_by_key: Tensor | None
    ) -> None:
        """Take what a tile's gradient `[g, t, n]` says; adds the tables' part to `d_query` `[g, t, d]`."""
        if positions.query_table is not None or d_by_key is not None:
            wants_query = positions.query_table is not None
            d_by_query = positions._tile(tile).collect(d_logits, d_by_key, wants_query)
            if d_by_query is not None and positions.query_table is not None:
                d_query += d_by_query @ positions.query_table
                self._add_table(self.query_table, d_by_query, positions.query[:, tile], positions.num_heads)
        if self.bias is not None:
            part = positions._per_row(d_logits)
            into = positions._bias(self.bias)[:, :, tile, : positions.block.length]
            into += part.sum(0, keepdim=True) if len(self.bias) == 1 else part

    def collect_keys(self, positions: _Positions, d_by_key: Tensor, d_key: Tensor) -> None:
        """The key table's part, once all tiles of a block are in; adds to `d_key` `[g, n, d]`."""
        d_keys = d_by_key[:, positions.terms.highest : positions.terms.highest + positions.block.length]
        assert positions.key_table is not None
        d_key += d_keys @ positions.key_table
        self._add_table(self.key_table, d_keys, positions.key, positions.num_heads)

    @staticmethod
    def _add_table(into: Tensor | None, d_offsets: Tensor, vectors: Tensor, num_heads: int) -> None:
        """Add Σ d_offsetsᵀ · vectors over what shares the table, turned back to smallest offset first."""
        assert into is not None
        if len(into) == 1:
            into += (d_offsets.flatten(0, 1).t() @ vectors.flatten(0, 1)).flip(0)
        else:
            per_head = (d_offsets.transpose(-1, -2) @ vectors).unflatten(0, (-1, num_heads)).sum(0)
            into += per_head.flip(1)


class _HeadGram:
    """Inner products of HCD's heads from the logits of a block's tiles, and their gradient."""

    def __init__(self, heads: Tensor, block: _Block, num_heads: int, num_documents: int) -> None:
        self.heads, self.block, self.num_heads = heads, block, num_heads
        self.documents = mth.document_mask(block.document_ids, num_documents)  # [b, documents, n]

    def chosen(self, logits: Tensor, tile: slice) -> Tensor:
        """Logits `[g, t, n]` of the heads, forbidden pairs zeroed: `[b, t, m′, n]`."""
        chosen = logits.unflatten(0, (-1, self.num_heads)).index_select(1, self.heads)
        forbidden = self.block.forbidden(tile)
        if forbidden is not None:
            chosen.masked_fill_(forbidden, 0.0)
        return chosen.transpose(1, 2)

    def products(self, logits: Tensor, tile: slice) -> Tensor:
        """This tile's share of the inner products, `[b, documents, m′, m′]`."""
        chosen = self.chosen(logits, tile)
        per_query = chosen @ chosen.transpose(-1, -2)  # [b, t, m′, m′]
        return torch.einsum("bkt,btxy->bkxy", self.documents[..., tile].to(per_query.dtype), per_query)

    def add_gradient(self, d_logits: Tensor, chosen: Tensor, gradient: Tensor, tile: slice) -> None:
        """Add what the inner products' gradient `[b, documents, m′, m′]` says to that of the logits `[g, t, n]`."""
        both_ways = gradient + gradient.transpose(-1, -2)
        per_query = torch.einsum("bkt,bkxy->btxy", self.documents[..., tile].to(gradient.dtype), both_ways)
        d_chosen = (per_query @ chosen).transpose(1, 2)  # [b, m′, t, n]
        d_logits.unflatten(0, (-1, self.num_heads)).index_add_(1, self.heads, d_chosen.to(d_logits.dtype))


def _tile_logits(query: Tensor, key: Tensor, positions: _Positions, tile: slice) -> Tensor:
    """A of some query rows, `[g, t, n]`, in fp32 at least; `query` times scale."""
    logits = query[:, tile] @ key.transpose(-1, -2)
    if logits.dtype.itemsize < 4:
        logits = logits.float()
    positions.add(logits, tile)
    return logits


def _softmax_(logits: Tensor, block: _Block, tile: slice, num_heads: int) -> Tensor:
    forbidden = block.forbidden(tile)
    if forbidden is not None:
        logits.unflatten(0, (-1, num_heads)).masked_fill_(forbidden, torch.finfo(logits.dtype).min)
    return torch.softmax(logits, -1, out=logits)


class _BlockedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, query_table, key_table, bias, terms, document_ids, heads, dropout, documents):  # type: ignore[override]
        terms = replace(terms, query_table=query_table, key_table=key_table, bias=bias)
        batch, num_heads = query.shape[:2]
        context = torch.empty_like(value)
        wide = torch.promote_types(query.dtype, torch.float32)
        gram = query.new_zeros(batch, documents, len(heads), len(heads), dtype=wide)
        kept = []
        for block in _blocks(document_ids, num_heads):
            q, k, v = block.take(query) * terms.scale, block.take(key), block.take(value)
            positions = _Positions(terms, block, q, k * terms.scale if key_table is not None else k)
            head_gram = _HeadGram(heads, block, num_heads, documents) if len(heads) else None
            for tile in block.tiles(num_heads):
                logits = _tile_logits(q, k, positions, tile)
                if head_gram is not None:
                    gram[block.rows] += head_gram.products(logits, tile)
                probabilities = _softmax_(logits, block, tile, num_heads)
                if dropout:
                    kept.append(torch.empty_like(probabilities, dtype=torch.bool).bernoulli_(1 - dropout))
                    probabilities.mul_(kept[-1]).mul_(1 / (1 - dropout))
                part = probabilities.to(v.dtype) @ v  # [g, t, d]
                context[block.rows, :, tile] = part.unflatten(0, (-1, num_heads))
            context[block.rows, :, block.length :] = 0
        ctx.save_for_backward(query, key, value, query_table, key_table, bias, document_ids, heads, context, *kept)
        ctx.terms, ctx.dropout = replace(terms, query_table=None, key_table=None, bias=None), dropout
        return context, gram

    @staticmethod
    def backward(ctx, context_gradient, gram_gradient):  # type: ignore[override]
        query, key, value, query_table, key_table, bias, document_ids, heads, context, *kept = ctx.saved_tensors
        terms = replace(ctx.terms, query_table=query_table, key_table=key_table, bias=bias)
        num_heads, keep = query.shape[1], iter(kept)
        whole = [torch.empty_like(x) for x in (query, key, value)]
        sums = _PositionGradients(terms)
        for block in _blocks(document_ids, num_heads):
            q, k, v = block.take(query) * terms.scale, block.take(key), block.take(value)
            d_out, out = block.take(context_gradient), block.take(context)
            delta = (d_out * out).sum(-1, keepdim=True)  # [g, n, 1]
            positions = _Positions(terms, block, q, k * terms.scale if key_table is not None else k)
            head_gram = _HeadGram(heads, block, num_heads, gram_gradient.shape[1]) if len(heads) else None
            d_query, d_key, d_value = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
            d_by_key = None if positions.by_key is None else torch.zeros_like(positions.by_key)
            for tile in block.tiles(num_heads):
                logits = _tile_logits(q, k, positions, tile)
                chosen = None if head_gram is None else head_gram.chosen(logits, tile).clone()
                probabilities = _softmax_(logits, block, tile, num_heads)
                d_logits = (d_out[:, tile] @ v.transpose(-1, -2)).to(probabilities.dtype)  # of the probabilities, yet
                dropped = probabilities
                if ctx.dropout:
                    scaled = next(keep) * (1 / (1 - ctx.dropout))
                    dropped = probabilities * scaled
                    d_logits.mul_(scaled)
                so_far = 0 if tile.start == 0 else 1
                d_value.baddbmm_(dropped.to(v.dtype).transpose(-1, -2), d_out[:, tile], beta=so_far)
                d_logits.sub_(delta[:, tile]).mul_(probabilities)
                if head_gram is not None and chosen is not None:
                    head_gram.add_gradient(d_logits, chosen, gram_gradient[block.rows], tile)
                d_logits = d_logits.to(q.dtype)
                d_tile = d_logits @ k
                sums.collect_tile(positions, tile, d_logits, d_tile, d_by_key)
                d_query[:, tile] = d_tile
                d_key.baddbmm_(d_logits.transpose(-1, -2), q[:, tile], beta=so_far)
            if d_by_key is not None:
                d_key_table = torch.zeros_like(d_key)
                sums.collect_keys(positions, d_by_key, d_key_table)
                d_key += d_key_table.mul_(terms.scale)
            for into, part in zip(whole, (d_query.mul_(terms.scale), d_key, d_value), strict=True):
                into[block.rows, :, : block.length] = part.unflatten(0, (-1, num_heads))
                into[block.rows, :, block.length :] = 0
        return (*whole, sums.query_table, sums.key_table, sums.bias, None, None, None, None, None)


def blocked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    terms: PositionTerms,
    document_ids: Tensor,
    heads: Tensor,
    dropout: float,
    num_documents: int = 1,
) -> tuple[Tensor, Tensor | None]:
    """Context `[b, h, s, d]`, and HCD's mean pairwise cosine `[b, documents]` of `heads` `[m′]` (None for no heads)."""
    context, gram = _BlockedAttention.apply(
        query,
        key,
        value,
        terms.query_table,
        terms.key_table,
        terms.bias,
        terms,
        document_ids,
        heads,
        dropout,
        num_documents,
    )
    return context, mth.cosine_of_gram(gram) if len(heads) else None
