"""Attention for CPUs, a few query rows at a time, so that their logits stay in the cache.

Computes the formula of `model/attention/logits.py`, with forward and backward pass written out. Short sequences are
joined into blocks, long ones are cut into tiles of query rows, and padding at the end is cut off first. The
probabilities of short sequences are kept for the backward pass; those of long ones are recomputed. HCD's inner products
use a tile's logits before the softmax, and their gradient is added to the softmax's, so HCD needs no second QKᵀ.

Under a window a tile reads only the keys within reach of its queries.

Names: b = batch, h = heads, g = b·h, s = sequence, d = head size, n = longest sequence of a block, t = rows of a tile,
c = columns of a tile (n of them without a window), R = rows of a relative table.

For the backward pass a tile keeps one matrix per head: the logits of the m′ heads that HCD compares, and the
probabilities of all other heads. A softmax turns the kept logits into probabilities again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ddrp.model import similarity
from megatron_ddrp.model.attention.attending import Attending
from megatron_ddrp.model.attention.cpu import blocks
from megatron_ddrp.model.attention.cpu.blocks import Block, Tile
from megatron_ddrp.model.attention.cpu.positions import BlockPositions
from megatron_ddrp.model.attention.logits import sum_of_counted
from megatron_ddrp.model.positions.contract import HEAD_DIMENSIONS


class ComparedHeads:
    """HCD's heads in the tiles of one block: their logits, the inner products, and the gradient."""

    def __init__(self, heads: Tensor, block: Block, num_heads: int) -> None:
        self.heads, self.block, self.num_heads = heads, block, num_heads

    def logits(self, logits: Tensor, tile: Tile) -> Tensor:
        """Return a copy of the compared heads of `[g, t, c]`, with zeros at forbidden pairs: `[b, m′, t, c]`."""
        chosen = self._by_head(logits).index_select(1, self.heads)
        forbidden = self.block.forbidden_pairs(tile)
        return chosen if forbidden is None else chosen.masked_fill_(forbidden, 0.0)

    def products(self, chosen: Tensor) -> Tensor:
        """Return the inner products of each query's logits: `[b, m′, t, c]` → `[b, t, m′, m′]`."""
        by_query = chosen.transpose(1, 2)  # [b, t, m′, c]
        return by_query @ by_query.transpose(-1, -2)

    def gradient(self, chosen: Tensor, d_products: Tensor) -> Tensor:
        """Apply the adjoint of `products` to `d_products` plus its transpose, `[b, t, m′, m′]`."""
        return (d_products @ chosen.transpose(1, 2)).transpose(1, 2)

    def collect(self, d_chosen: Tensor, d_logits: Tensor) -> None:
        """Add the gradient of the compared heads to the gradient of all logits, `[g, t, c]`."""
        self._by_head(d_logits).index_add_(1, self.heads, d_chosen)

    def keep(self, chosen: Tensor, probabilities: Tensor) -> None:
        """Overwrite the compared heads' probabilities in `[g, t, c]` with their logits."""
        self._by_head(probabilities).index_copy_(1, self.heads, chosen)

    def restore(self, kept: Tensor, tile: Tile, d_products: Tensor) -> Tensor:
        """Undo `keep`, in place, and return the `gradient` of the kept logits."""
        chosen, forbidden = self._by_head(kept).index_select(1, self.heads), self.block.forbidden_pairs(tile)
        d_chosen = self.gradient(chosen, d_products)
        if forbidden is not None:
            chosen.masked_fill_(forbidden, torch.finfo(chosen.dtype).min)
        self.keep(torch.softmax(chosen, -1, out=chosen), kept)
        return d_chosen

    def _by_head(self, tensor: Tensor) -> Tensor:
        return tensor.unflatten(0, (-1, self.num_heads))  # [b, h, t, c]


def by_document(products: Tensor, documents: Tensor) -> Tensor:
    """Sum each query's products over its document: `[batch, s, m′, m′]` → `[batch, documents, m′, m′]`.

    `documents` bool `[batch, documents, s]`.
    """
    return (documents.to(products.dtype) @ products.flatten(2)).unflatten(-1, products.shape[2:])


def by_query(gram: Tensor, documents: Tensor) -> Tensor:
    """Give each query its document's matrix: `[batch, documents, m′, m′]` → `[batch, s, m′, m′]`."""
    return (documents.to(gram.dtype).transpose(1, 2) @ gram.flatten(2)).unflatten(-1, gram.shape[2:])


def _kept_scale(tensor: Tensor, dropout: float) -> Tensor:
    """Apply dropout's 1/(1−p) factor to the values instead of the probabilities: there are fewer of them."""
    return tensor / (1 - dropout) if dropout else tensor


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Return `left @ rightᵀ` in fp32 or wider: `[g, t, d]`, `[g, c, d]` → `[g, t, c]`."""
    return torch.bmm(left, right.transpose(1, 2)).to(torch.promote_types(left.dtype, torch.float32))


def _softmax_backward_(gradient: Tensor, probabilities: Tensor) -> None:
    """Turn the gradient of the probabilities into the gradient of the logits, in place, with torch's own kernel."""
    torch.ops.aten._softmax_backward_data.out(gradient, probabilities, -1, gradient.dtype, grad_input=gradient)


def _attend(
    query: Tensor,
    keys: Tensor,
    tile: Tile,
    positions: BlockPositions,
    compared: ComparedHeads | None,
) -> tuple[Tensor, Tensor | None]:
    """Return the probabilities `[g, t, c]` of a tile, and the compared heads' logits before the softmax.

    `query` `[g, t, d]`, `keys` `[g, c, d]`.
    """
    logits = _product(query, keys)
    positions.add(logits, tile)
    chosen = None if compared is None else compared.logits(logits, tile)
    forbidden = positions.block.forbidden_pairs(tile)
    if forbidden is not None:
        logits.unflatten(0, (-1, positions.num_heads)).masked_fill_(forbidden, torch.finfo(logits.dtype).min)
    return torch.softmax(logits, -1, out=logits), chosen


def _draw_kept(probabilities: Tensor, dropout: float) -> Tensor:
    """Draw bool `[g, t, c]`, True with probability 1 − dropout up to 2⁻¹⁶. Each 64-bit number gives four decisions."""
    count, drop_below = probabilities.numel(), min(round(dropout * 2**16), 2**16 - 1)
    bits = torch.empty(-(-count // 4), dtype=torch.int64, device=probabilities.device).random_(-(2**63), None)
    return (bits.view(torch.int16)[:count] >= drop_below - 2**15).view_as(probabilities)


class _BlockedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, attending: Attending, training: bool, query, key, value, *tensors):  # type: ignore[override]
        terms = attending.terms.with_tensors(tensors)
        document_ids, heads, dropout, *_ = attending[4:]
        batch, num_heads, seq = query.shape[:3]
        context = torch.empty_like(value)
        wide = torch.promote_types(query.dtype, torch.float32)
        products = query.new_zeros(batch, seq, len(heads), len(heads), dtype=wide)
        kept: list[Tensor] = []  # per tile: probabilities (for HCD's heads the logits); dropout's decisions
        for block in cut(document_ids, num_heads, attending.window):
            q, k, v = block.take(query) * terms.scale, block.take(key), _kept_scale(block.take(value), dropout)
            positions = BlockPositions(terms, block, q, k, num_heads)
            compared = ComparedHeads(heads, block, num_heads) if len(heads) else None
            for tile in block.tiles(num_heads):
                rows, columns = tile
                keep = training and block.is_kept
                probabilities, chosen = _attend(q[:, rows], k[:, columns], tile, positions, compared)
                if keep:
                    kept.append(probabilities)
                dropped = probabilities
                if dropout:
                    kept.append(_draw_kept(probabilities, dropout))
                    dropped = probabilities * kept[-1]
                part = torch.bmm(dropped.to(v.dtype), v[:, columns])  # [g, t, d]
                context[block.rows, :, rows] = part.unflatten(0, (-1, num_heads))
                if compared is not None and chosen is not None:
                    products[block.rows, rows] = compared.products(chosen)
                    if keep:
                        compared.keep(chosen, probabilities)
            context[block.rows, :, block.length :] = 0
        ctx.save_for_backward(query, key, value, document_ids, heads, *tensors, *kept)
        ctx.terms, ctx.dropout = terms.with_tensors([None] * len(tensors)), dropout
        ctx.window = attending.window
        ctx.logits_are_kept = len(heads) > 0
        return context, by_document(products, similarity.document_mask(document_ids, attending.num_documents))

    @staticmethod
    def backward(ctx, context_gradient, gram_gradient):  # type: ignore[override]
        query, key, value, document_ids, heads, *rest = ctx.saved_tensors
        tensors, kept = rest[: len(HEAD_DIMENSIONS)], rest[len(HEAD_DIMENSIONS) :]
        terms = ctx.terms.with_tensors(tensors)
        num_heads, keep = query.shape[1], iter(kept)
        whole = [torch.empty_like(x) for x in (query, key, value)]
        wide = torch.promote_types(query.dtype, torch.float32)  # for long sums
        needed = ctx.needs_input_grad[-len(tensors) :]
        d_tensors = [torch.zeros_like(x, dtype=wide) if need else None for x, need in zip(tensors, needed, strict=True)]
        both_ways = gram_gradient + gram_gradient.transpose(-1, -2)
        d_products = by_query(both_ways, similarity.document_mask(document_ids, gram_gradient.shape[1]))
        again = len(heads) > 0 and not ctx.logits_are_kept  # the first backward pass restored the probabilities
        ctx.logits_are_kept = False
        for block in cut(document_ids, num_heads, ctx.window):
            q, k, v = block.take(query) * terms.scale, block.take(key), block.take(value)
            d_out = _kept_scale(block.take(context_gradient), ctx.dropout)
            positions = BlockPositions(terms, block, q, k, num_heads)
            compared = ComparedHeads(heads, block, num_heads) if len(heads) else None
            d_key, d_value = torch.zeros_like(k), torch.zeros_like(v)
            for tile in block.tiles(num_heads):
                rows, columns = tile
                probabilities, d_chosen = next(keep) if block.is_kept else None, None
                if probabilities is None or again:
                    probabilities, chosen = _attend(q[:, rows], k[:, columns], tile, positions, compared)
                    if compared is not None and chosen is not None:
                        d_chosen = compared.gradient(chosen, d_products[block.rows, rows])
                elif compared is not None:  # .data: autograd refuses to write to a tensor that it saved
                    d_chosen = compared.restore(probabilities.data, tile, d_products[block.rows, rows])
                # This is the gradient of the probabilities until `_softmax_backward_` below.
                d_logits = _product(d_out[:, rows], v[:, columns])
                dropped = probabilities
                if ctx.dropout:
                    kept_here = next(keep)
                    dropped = probabilities * kept_here
                    d_logits.mul_(kept_here)
                d_value[:, columns].baddbmm_(dropped.to(v.dtype).transpose(1, 2), d_out[:, rows])
                _softmax_backward_(d_logits, probabilities)
                if compared is not None and d_chosen is not None:
                    compared.collect(d_chosen, d_logits)
                narrow = d_logits.to(q.dtype)
                d_tile = torch.bmm(narrow, k[:, columns])
                d_key[:, columns].baddbmm_(narrow.transpose(1, 2), q[:, rows])
                positions.collect(d_logits, tile, d_tile, d_tensors)
                whole[0][block.rows, :, rows] = d_tile.mul_(terms.scale).unflatten(0, (-1, num_heads))
            positions.finish(d_key, d_tensors)
            whole[1][block.rows, :, : block.length] = d_key.unflatten(0, (-1, num_heads))
            whole[2][block.rows, :, : block.length] = d_value.unflatten(0, (-1, num_heads))
            for into in whole:
                into[block.rows, :, block.length :] = 0
        return (None, None, *whole, *d_tensors)


def blocked_attention(attending: Attending) -> tuple[Tensor, Tensor | None]:
    """Compute attention tile by tile; arguments and results are those of every backend."""
    query, key, value, terms = attending[:4]
    context, gram = _BlockedAttention.apply(attending, torch.is_grad_enabled(), query, key, value, *terms.tensors)
    return context, sum_of_counted(similarity.cosine_of_gram(gram), attending) if len(attending.heads) else None
