"""Attention for CPUs: a few sequences at a time, so that their logits stay in cache, recomputed in the backward pass.

The same formula as `megatron_ddrp.model.attention`, forward and gradient written out. Padding at the end of a block is
cut off before anything is computed. The inner products of HCD's heads come from the logits while they are at hand and
their gradient joins that of the softmax, so HCD costs three dot products and one addition instead of a second QKᵀ.

Names: b = batch, h = heads, s = sequence, d = head size, n = longest sequence of the block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_ddrp.model.positions.contract import PositionTerms
from megatron_ddrp.model.relative import collect_values, spread_values
from megatron_ddrp.objectives import mth

BLOCK_ELEMENTS = 4 * 2**20
"""Logits of a block: 16 MiB in fp32, about what the last-level cache of one socket gives a process."""


@dataclass(frozen=True)
class _Block:
    rows: slice
    length: int
    allowed: Tensor | None
    """bool `[b, 1, n, n]`; None where every pair of the block is allowed."""


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
        allowed = None
        if not bool((ids == 1).all()):
            allowed = ((ids.unsqueeze(-1) == ids.unsqueeze(-2)) & (ids > 0).unsqueeze(-1)).unsqueeze(1)
        yield _Block(slice(start, end), longest, allowed)
        start = end


def _logits(query: Tensor, key: Tensor, terms: PositionTerms, block: _Block) -> Tensor:
    """A of the block, `[b, h, n, n]`, in fp32 at least. `query`, `key` `[b, h, n, d]`."""
    logits = (query * terms.scale) @ key.transpose(-1, -2)
    if logits.dtype.itemsize < 4:
        logits = logits.float()
    if terms.query_table is not None:
        per_offset = (query * terms.scale) @ terms.query_table.transpose(-1, -2)  # [b, h, n, num_relative]
        logits += spread_values(per_offset, terms.highest)
    if terms.key_table is not None:
        per_offset = ((key * terms.scale) @ terms.key_table.transpose(-1, -2)).flip(-1)
        logits += spread_values(per_offset, -terms.lowest).transpose(-1, -2)
    if terms.bias is not None:
        bias = terms.bias if terms.bias.shape[0] == 1 else terms.bias[block.rows]
        logits += bias[..., : block.length, : block.length]
    return logits


def _gram_logits(logits: Tensor, heads: Tensor, allowed: Tensor | None) -> Tensor:
    """Logits of HCD's heads with the forbidden pairs zeroed: `[b, m′, n·n]`."""
    chosen = logits.index_select(1, heads)
    if allowed is not None:
        chosen.masked_fill_(~allowed, 0.0)
    return chosen.flatten(2)


def _softmax_(logits: Tensor, allowed: Tensor | None) -> Tensor:
    if allowed is not None:
        logits.masked_fill_(~allowed, torch.finfo(logits.dtype).min)
    return torch.softmax(logits, -1, out=logits)


class _BlockedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, query_table, key_table, bias, terms, document_ids, heads, dropout):  # type: ignore[override]
        terms = replace(terms, query_table=query_table, key_table=key_table, bias=bias)
        context = torch.zeros_like(value)
        gram = query.new_zeros(
            len(query), len(heads), len(heads), dtype=torch.promote_types(query.dtype, torch.float32)
        )
        kept = []
        for block in _blocks(document_ids, query.shape[1]):
            q, k, v = (x[block.rows, :, : block.length] for x in (query, key, value))
            logits = _logits(q, k, terms, block)
            if len(heads):
                chosen = _gram_logits(logits, heads, block.allowed)
                gram[block.rows] = chosen @ chosen.transpose(-1, -2)
            probabilities = _softmax_(logits, block.allowed)
            if dropout:
                kept.append(torch.empty_like(probabilities, dtype=torch.bool).bernoulli_(1 - dropout))
                probabilities.mul_(kept[-1]).mul_(1 / (1 - dropout))
            context[block.rows, :, : block.length] = probabilities.to(v.dtype) @ v
        ctx.save_for_backward(query, key, value, query_table, key_table, bias, document_ids, heads, context, *kept)
        ctx.terms, ctx.dropout = replace(terms, query_table=None, key_table=None, bias=None), dropout
        return context, gram

    @staticmethod
    def backward(ctx, context_gradient, gram_gradient):  # type: ignore[override]
        query, key, value, query_table, key_table, bias, document_ids, heads, context, *kept = ctx.saved_tensors
        terms = replace(ctx.terms, query_table=query_table, key_table=key_table, bias=bias)
        scale = terms.scale
        gradients = [torch.zeros_like(x) for x in (query, key, value)]
        table_gradients = [None if x is None else torch.zeros_like(x) for x in (query_table, key_table, bias)]
        for number, block in enumerate(_blocks(document_ids, query.shape[1])):
            rows, n = block.rows, block.length
            q, k, v = (x[rows, :, :n] for x in (query, key, value))
            d_context = context_gradient[rows, :, :n]
            logits = _logits(q, k, terms, block)
            chosen = _gram_logits(logits, heads, block.allowed) if len(heads) else None
            probabilities = _softmax_(logits, block.allowed)
            d_logits = (d_context @ v.transpose(-1, -2)).to(probabilities.dtype)  # of the probabilities, at first
            dropped = probabilities
            if ctx.dropout:
                keep = kept[number]
                dropped = (probabilities * keep).mul_(1 / (1 - ctx.dropout))
                d_logits.mul_(keep).mul_(1 / (1 - ctx.dropout))
            d_value = dropped.to(v.dtype).transpose(-1, -2) @ d_context
            d_logits.sub_((d_context * context[rows, :, :n]).sum(-1, keepdim=True)).mul_(probabilities)
            if chosen is not None:
                both_ways = gram_gradient[rows] + gram_gradient[rows].transpose(-1, -2)  # [b, m′, m′]
                d_logits.index_add_(1, heads, (both_ways @ chosen).view(len(q), len(heads), n, n))
            d_logits_narrow = d_logits.to(q.dtype)
            d_query, d_key = d_logits_narrow @ k, d_logits_narrow.transpose(-1, -2) @ q
            if query_table is not None and table_gradients[0] is not None:
                d_query += _table_backward(d_logits_narrow, q, query_table, table_gradients[0], terms.highest, scale)
            if key_table is not None and table_gradients[1] is not None:
                d_key += _table_backward(
                    d_logits_narrow.transpose(-1, -2), k, key_table, table_gradients[1], -terms.lowest, scale, flip=True
                )
            if bias is not None and table_gradients[2] is not None:
                into = table_gradients[2] if len(bias) == 1 else table_gradients[2][rows]
                into[..., :n, :n] += d_logits_narrow.sum(0, keepdim=True) if len(bias) == 1 else d_logits_narrow
            for whole, part in zip(gradients, (d_query.mul_(scale), d_key.mul_(scale), d_value), strict=True):
                whole[rows, :, :n] = part
        return (*gradients, *table_gradients, None, None, None, None)


def _table_backward(
    d_logits: Tensor,
    vectors: Tensor,
    table: Tensor,
    table_gradient: Tensor,
    highest: int,
    scale: float,
    flip: bool = False,
) -> Tensor:
    """Add to the table's gradient; return that of the vectors `[b, h, n, d]`, still without `scale`."""
    d_offsets = collect_values(d_logits, table.shape[-2], highest)  # [b, h, n, num_relative]
    if flip:
        d_offsets = d_offsets.flip(-1)
    per_head = (d_offsets.transpose(-1, -2) @ vectors).sum(0).mul_(scale)  # [h, num_relative, d]
    table_gradient += per_head if table.shape[0] > 1 else per_head.sum(0, keepdim=True)
    return d_offsets @ table


def blocked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    terms: PositionTerms,
    document_ids: Tensor,
    heads: Tensor,
    dropout: float,
) -> tuple[Tensor, Tensor | None]:
    """Context `[b, h, s, d]` and the mean pairwise cosine `[b]` of the logits of `heads` `[m′]` (None for no heads)."""
    context, gram = _BlockedAttention.apply(
        query, key, value, terms.query_table, terms.key_table, terms.bias, terms, document_ids, heads, dropout
    )
    return context, mth.cosine_of_gram(gram) if len(heads) else None
