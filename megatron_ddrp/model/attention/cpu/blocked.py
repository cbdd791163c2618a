"""Attention for CPUs: some query rows at a time, so that their logits stay in cache.

The formula of `model/attention/backends.py`, forward and gradient written out. Short sequences are taken several
at once, long ones in tiles of query rows; padding at the end is cut off before anything is computed. Probabilities wait
for the backward pass, or are computed again there where sequences are long. The inner products of HCD's heads come from
the logits while they are at hand and their gradient joins that of the softmax, so HCD costs a few dot products and one
addition instead of a second QKᵀ. The logits wait in the place of the probabilities that follow from them.

Names: b = batch, h = heads, g = b·h, s = sequence, d = head size, n = longest sequence of a block, t = rows of a tile,
R = rows of a relative table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron_ddrp.model import similarity
from megatron_ddrp.model.attention.attending import Attending
from megatron_ddrp.model.attention.cpu import blocks
from megatron_ddrp.model.attention.cpu.blocks import Block
from megatron_ddrp.model.attention.cpu.heads import ComparedHeads, by_document, by_query
from megatron_ddrp.model.attention.cpu.positions import KeyTable, QueryTable
from megatron_ddrp.model.attention.cpu.scratch import product, scratch
from megatron_ddrp.model.attention.relative import BandTile, add_diagonal_sums, diagonals, toeplitz
from megatron_ddrp.model.positions.contract import HEAD_DIMENSIONS, PositionTerms

Tensors = Sequence[Tensor | None]
"""Tensor fields of `PositionTerms` or their gradients, in the order of `HEAD_DIMENSIONS`."""


class _Positions:
    """The position terms of one block: added to a tile's logits, and their gradients collected."""

    def __init__(
        self, terms: PositionTerms, block: Block, query: Tensor, key: Tensor, num_heads: int, whole: Tensor
    ) -> None:
        """`query`, times scale, and `key` `[g, n, d]`; `whole` `[m′]` are the heads whose logits HCD compares."""
        self.terms, self.block, self.key, self.num_heads = terms, block, key, num_heads
        self.query_table = self.key_table = None
        if terms.query_table is not None:
            self.query_table = QueryTable(terms.query_table, query, key, num_heads, whole)
        if terms.key_table is not None:
            self.key_table = KeyTable(terms.key_table, key * terms.scale, terms.lowest, terms.highest, num_heads)

    def tile(self, rows: slice) -> BandTile:
        return BandTile(rows.start, rows.stop - rows.start, self.block.length, self.terms.lowest, self.terms.highest)

    def keys_of(self, tile: BandTile, d_key: Tensor | None = None) -> Tensor:
        """The keys `[g, n, d]` that a tile's queries meet; tiles come in ascending order.

        In a backward pass, `d_key` `[g, n, d]` is what the tiles before this one gave to the keys.
        """
        return self.key if self.query_table is None else self.query_table.keys_of(tile, d_key)

    def add(self, logits: Tensor, rows: slice, tile: BandTile) -> None:
        """Add everything but Q·`keys_of` to `[g, t, n]`, up to a constant for each query but in the `whole` heads."""
        if self.query_table is not None:
            self.query_table.add(logits, rows, tile)
        if self.key_table is not None:
            self.key_table.add(logits, tile)
        if self.terms.bias is not None:
            self._per_row(logits).add_(self._bias(self.terms.bias)[:, :, rows, : self.block.length])
        if self.terms.offset_bias is not None:
            self._per_row(logits).add_(toeplitz(self._diagonals(self.terms.offset_bias), rows))

    def collect(self, d_logits: Tensor, rows: slice, tile: BandTile, d_query: Tensor, d_tensors: Tensors) -> None:
        """The adjoint of `add`; adds to `d_query` `[g, t, d]` and to the gradients of the biases."""
        _, _, d_bias, d_offset_bias = d_tensors
        if self.query_table is not None:
            self.query_table.collect(d_logits, rows, tile, d_query)
        if self.key_table is not None:
            self.key_table.collect(d_logits, tile)
        if d_bias is not None:
            part, into = self._per_row(d_logits), self._bias(d_bias)[:, :, rows, : self.block.length]
            into += part.sum(0, keepdim=True) if len(d_bias) == 1 else part
        if d_offset_bias is not None:
            part = self._per_row(d_logits).sum(0)  # [h, t, n]
            part = part.sum(0, keepdim=True) if len(d_offset_bias) == 1 else part
            add_diagonal_sums(part, rows, self._diagonals(d_offset_bias))

    def _per_row(self, logits: Tensor) -> Tensor:
        return logits.unflatten(0, (-1, self.num_heads))  # [b, h, t, n]

    def _diagonals(self, by_diagonal: Tensor) -> Tensor:
        """View of `[.., 2·s − 1]` as that of the block's shorter rows, `[.., 2·n − 1]`."""
        beyond = (by_diagonal.shape[-1] + 1) // 2 - self.block.length
        return by_diagonal[..., beyond : by_diagonal.shape[-1] - beyond]

    def _bias(self, bias: Tensor) -> Tensor:
        return bias if len(bias) == 1 else bias[self.block.rows]


def _kept_scale(tensor: Tensor, dropout: float) -> Tensor:
    """What dropout keeps counts for what it drops: taken from values, of which there are fewer than of pairs."""
    return tensor / (1 - dropout) if dropout else tensor


def _add(into: Tensor | None, part: Tensor) -> None:
    assert into is not None
    into += part


def _softmax_backward_(gradient: Tensor, probabilities: Tensor) -> None:
    """Of the probabilities → of the logits, in place; torch's own kernel goes over a row once."""
    torch.ops.aten._softmax_backward_data.out(gradient, probabilities, -1, gradient.dtype, grad_input=gradient)


def _attend(
    query: Tensor,
    keys: Tensor,
    rows: slice,
    tile: BandTile,
    positions: _Positions,
    compared: ComparedHeads | None,
    fresh: bool,
) -> tuple[Tensor, Tensor | None]:
    """Probabilities `[g, t, n]` of a tile, and HCD's heads' logits before the softmax.

    `query` `[g, t, d]`, `keys` `[g, n, d]`; without `fresh` they are valid until the next tile's.
    """
    if fresh:
        wide = torch.promote_types(query.dtype, torch.float32)
        logits = product(query, keys, query.new_empty(*query.shape[:2], keys.shape[1], dtype=wide))
    else:
        logits = scratch.product("logits", query, keys)
    positions.add(logits, rows, tile)
    chosen = None if compared is None else compared.logits(logits, rows)
    forbidden = positions.block.forbidden(rows)
    if forbidden is not None:
        logits.unflatten(0, (-1, positions.num_heads)).masked_fill_(forbidden, torch.finfo(logits.dtype).min)
    return torch.softmax(logits, -1, out=logits), chosen


def _draw_kept(probabilities: Tensor, dropout: float) -> Tensor:
    """bool `[g, t, n]`, True with probability 1 − dropout, to 2⁻¹⁶: four decisions from every number drawn."""
    count = probabilities.numel()
    bits = torch.empty(-(-count // 4), dtype=torch.int64, device=probabilities.device).random_(-(2**63), None)
    return (bits.view(torch.int16)[:count] >= round(dropout * 2**16) - 2**15).view_as(probabilities)


def _drop(probabilities: Tensor, kept: Tensor) -> Tensor:
    """The probabilities that dropout keeps, valid until the next tile's."""
    return torch.mul(probabilities, kept, out=scratch.take("kept", probabilities.shape, probabilities.dtype))


class _BlockedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, attending: Attending, training: bool, query, key, value, *tensors):  # type: ignore[override]
        terms = attending.terms.with_tensors(tensors)
        document_ids, heads, dropout, documents = attending[4:]
        batch, num_heads, seq = query.shape[:3]
        context = torch.empty_like(value)
        wide = torch.promote_types(query.dtype, torch.float32)
        products = query.new_zeros(batch, seq, len(heads), len(heads), dtype=wide)
        kept: list[Tensor] = []  # of every tile: probabilities, of HCD's heads their logits; what dropout keeps
        for block in blocks.cut(document_ids, num_heads):
            q, k, v = block.take(query) * terms.scale, block.take(key), _kept_scale(block.take(value), dropout)
            positions = _Positions(terms, block, q, k, num_heads, heads)
            compared = ComparedHeads(heads, block, num_heads) if len(heads) else None
            for rows in block.tiles(num_heads):
                tile, keep = positions.tile(rows), training and block.is_kept
                keys = positions.keys_of(tile)
                probabilities, chosen = _attend(q[:, rows], keys, rows, tile, positions, compared, fresh=keep)
                if keep:
                    kept.append(probabilities)
                dropped = probabilities
                if dropout:
                    kept.append(_draw_kept(probabilities, dropout))
                    dropped = _drop(probabilities, kept[-1])
                part = torch.bmm(dropped.to(v.dtype), v)  # [g, t, d]
                context[block.rows, :, rows] = part.unflatten(0, (-1, num_heads))
                if compared is not None and chosen is not None:
                    products[block.rows, rows] = compared.products(chosen)
                    if keep:
                        compared.keep(chosen, probabilities)
            context[block.rows, :, block.length :] = 0
        ctx.save_for_backward(query, key, value, document_ids, heads, *tensors, *kept)
        ctx.terms, ctx.dropout = terms.with_tensors([None] * len(tensors)), dropout
        ctx.logits_are_kept = len(heads) > 0
        return context, by_document(products, similarity.document_mask(document_ids, documents))

    @staticmethod
    def backward(ctx, context_gradient, gram_gradient):  # type: ignore[override]
        query, key, value, document_ids, heads, *rest = ctx.saved_tensors
        tensors, kept = rest[: len(HEAD_DIMENSIONS)], rest[len(HEAD_DIMENSIONS) :]
        terms = ctx.terms.with_tensors(tensors)
        num_heads, keep = query.shape[1], iter(kept)
        whole = [torch.empty_like(x) for x in (query, key, value)]
        d_tensors = [None if x is None else torch.zeros_like(x) for x in tensors]
        margin, both_ways = terms.highest - terms.lowest + 1, gram_gradient + gram_gradient.transpose(-1, -2)
        d_products = by_query(both_ways, similarity.document_mask(document_ids, gram_gradient.shape[1]))
        again = len(heads) > 0 and not ctx.logits_are_kept  # a second pass over what the first one restored
        ctx.logits_are_kept = False
        for block in blocks.cut(document_ids, num_heads):
            q, k, v = block.take(query) * terms.scale, block.take(key), block.take(value)
            d_out = _kept_scale(block.take(context_gradient), ctx.dropout)
            positions = _Positions(terms, block, q, k, num_heads, heads)
            compared = ComparedHeads(heads, block, num_heads) if len(heads) else None
            d_key, d_value = (scratch.take(name, k.shape, k.dtype).zero_() for name in ("key", "value"))
            for rows in block.tiles(num_heads):
                tile = positions.tile(rows)
                keys = positions.keys_of(tile, d_key)
                probabilities, d_chosen = next(keep) if block.is_kept else None, None
                if probabilities is None or again:
                    probabilities, chosen = _attend(q[:, rows], keys, rows, tile, positions, compared, fresh=False)
                    if compared is not None and chosen is not None:
                        d_chosen = compared.gradient(chosen, d_products[block.rows, rows])
                elif compared is not None:  # .data: autograd is not to mind that what it keeps is written to
                    d_chosen = compared.restore(probabilities.data, rows, d_products[block.rows, rows])
                d_logits = scratch.product("gradient", d_out[:, rows], v, margin)  # of the probabilities, yet
                dropped = probabilities
                if ctx.dropout:
                    kept_here = next(keep)
                    dropped = _drop(probabilities, kept_here)
                    d_logits.mul_(kept_here)
                d_value.baddbmm_(dropped.to(v.dtype).transpose(1, 2), d_out[:, rows])
                _softmax_backward_(d_logits, probabilities)
                if compared is not None and d_chosen is not None:
                    compared.collect(d_chosen, d_logits)
                narrow = d_logits.to(q.dtype)
                d_tile = torch.bmm(narrow, keys)
                d_key.baddbmm_(narrow.transpose(1, 2), q[:, rows])
                positions.collect(d_logits, rows, tile, d_tile, d_tensors)
                whole[0][block.rows, :, rows] = d_tile.mul_(terms.scale).unflatten(0, (-1, num_heads))
            if positions.query_table is not None:
                _add(d_tensors[0], positions.query_table.gradient(d_key))
            if positions.key_table is not None:
                of_table, of_key = positions.key_table.gradients()
                _add(d_tensors[1], of_table)
                d_key += of_key.mul_(terms.scale)
            whole[1][block.rows, :, : block.length] = d_key.unflatten(0, (-1, num_heads))
            whole[2][block.rows, :, : block.length] = d_value.unflatten(0, (-1, num_heads))
            for into in whole:
                into[block.rows, :, block.length :] = 0
        return (None, None, *whole, *d_tensors)


def blocked_attention(attending: Attending) -> tuple[Tensor, Tensor | None]:
    """Compute attention as the other backends do, tile by tile."""
    query, key, value, terms, _, heads, _, _ = attending
    if terms.offset_bias is not None:  # goes in by diagonals: gathered once, and a tile is a window
        wide = terms.offset_bias.to(torch.promote_types(terms.offset_bias.dtype, torch.float32))
        terms = replace(terms, offset_bias=diagonals(wide, terms.lowest, terms.highest, query.shape[2]))
    context, gram = _BlockedAttention.apply(attending, torch.is_grad_enabled(), query, key, value, *terms.tensors)
    return context, similarity.cosine_of_gram(gram) if len(heads) else None
