"""Attention logits A of every encoding, and HCD's cosine of these logits (eq. 18).

    A[b,h,i,j] = ( Q_i·K_j + Q_i·T^q[h, r(i,j)] + K_j·T^k[h, r(i,j)] ) · scale + B[b,h,i,j] + v[h, r(i,j)]

`attention_logits` stores A and is the reference. HCD compares the logits of some heads through their inner products,
which have a closed form for content-only logits. Names: b = batch, h = heads, s = sequence, d = head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ddrp.model import similarity
from megatron_ddrp.model.attention.attending import Attending
from megatron_ddrp.model.attention.relative import spread
from megatron_ddrp.model.positions.contract import PositionTerms


def allowed_pairs(document_ids: Tensor, window: int | None = None) -> Tensor:
    """Mark the pairs with the same non-zero document id; with a window, only those at most `window` tokens apart.

    `document_ids` `[b, s]` → bool `[b, 1, s, s]`.
    """
    same = document_ids.unsqueeze(-1) == document_ids.unsqueeze(-2)
    allowed = (same & (document_ids > 0).unsqueeze(-1)).unsqueeze(1)
    if window is None:
        return allowed
    place = torch.arange(document_ids.shape[1], device=document_ids.device)
    return allowed & ((place[:, None] - place).abs() <= window)


def position_logits(query: Tensor, key: Tensor, terms: PositionTerms) -> Tensor | None:
    """Return A without Q·K·scale, `[1 or b, h, s, s]`, or None if the encoding adds nothing to the logits.

    Never builds a tensor `[s, s, d]`.
    """
    parts, terms = [], terms.by_offset
    if terms.query_table is not None:
        per_offset = query @ terms.query_table.transpose(-1, -2)  # [b, h, s, num_relative]
        parts.append(spread(per_offset, terms.lowest, terms.highest) * terms.scale)
    if terms.key_table is not None:
        # Row j of this matrix holds K_j·T^k by i − j. Its "row − column" is j − i, so the bounds swap and change sign.
        per_offset = (key @ terms.key_table.transpose(-1, -2)).flip(-1)
        parts.append(spread(per_offset, -terms.highest, -terms.lowest).transpose(-1, -2) * terms.scale)
    if terms.bias is not None:
        parts.append(terms.bias)
    if terms.offset_bias is not None:
        per_query = terms.offset_bias.unsqueeze(1).expand(-1, query.shape[2], -1)  # [1 or h, s, num_relative]
        parts.append(spread(per_query, terms.lowest, terms.highest).unsqueeze(0))
    return sum(parts[1:], parts[0]) if parts else None


def attention_logits(query: Tensor, key: Tensor, terms: PositionTerms) -> Tensor:
    """Return A before the padding mask: `query`, `key` `[b, h, s, d]` → `[b, h, s, s]`."""
    content = (query * terms.scale) @ key.transpose(-1, -2)
    position = position_logits(query, key, terms)
    return content if position is None else content + position


def choose_heads(terms: PositionTerms, heads: Tensor) -> PositionTerms:
    """Return the terms of some heads; tensors that all heads share stay unchanged."""
    return terms.map(lambda x, dimension: x if x.shape[dimension] == 1 else x.index_select(dimension, heads))


def _cosine(attending: Attending, query: Tensor, key: Tensor, terms: PositionTerms) -> Tensor:
    """Return the mean pairwise cosine of the compared heads by the cheapest closed form.

    `query`, `key` `[b, m′, s, d]` and `terms` hold the compared heads only. → `[b, documents]`.
    """
    if query.dtype.itemsize < 4:
        query, key = query.float(), key.float()
    documents = similarity.document_mask(attending.document_ids, attending.num_documents)
    if attending.compares_content:
        if len(attending.heads) == attending.query.shape[1]:
            return similarity.content_cosine_of_all(query, key, documents)
        return similarity.cosine_of_gram(similarity.content_gram(query, key, documents, terms.scale))
    logits = attention_logits(query, key, terms.map(lambda x, _: x.to(query.dtype)))
    allowed = allowed_pairs(attending.document_ids, attending.window)
    return similarity.logits_cosine(logits, allowed, documents)


class _TapHeads(torch.autograd.Function):
    """x and some of its heads.

    The backward pass adds the heads' gradient into the gradient of x in place. `index_select` would fill a tensor as
    large as x with zeros and add all of it, which costs several times as much as HCD itself. Every other reader of x
    must therefore return a gradient tensor of its own, as matrix products and torch's fused attention do.
    """

    @staticmethod
    def forward(ctx, x: Tensor, heads: Tensor):  # type: ignore[override]
        ctx.save_for_backward(heads)
        return x.view_as(x), x.index_select(1, heads)

    @staticmethod
    def backward(ctx, gradient: Tensor, chosen_gradient: Tensor):  # type: ignore[override]
        (heads,) = ctx.saved_tensors
        return gradient.index_add_(1, heads, chosen_gradient), None


def tapped_cosine(attending: Attending) -> tuple[Attending, Tensor | None]:
    """Return the call of attention without HCD, and HCD's mean pairwise cosine summed over the counted documents."""
    query, key, terms, heads = attending.query, attending.key, attending.terms.compared, attending.heads
    if not len(heads):
        return attending, None
    alone = attending._replace(heads=heads[:0])
    if len(heads) == query.shape[1]:
        return alone, sum_of_counted(_cosine(attending, query, key, terms), attending)
    (query, some_queries), (key, some_keys) = _TapHeads.apply(query, heads), _TapHeads.apply(key, heads)
    cosine = _cosine(attending, some_queries, some_keys, choose_heads(terms, heads))
    return alone._replace(query=query, key=key), sum_of_counted(cosine, attending)


def sum_of_counted(cosine: Tensor, attending: Attending) -> Tensor:
    """Return the sum of `cosine` `[b, documents]` over the documents that HCD counts."""
    return (cosine if attending.counted is None else cosine * attending.counted).sum()
