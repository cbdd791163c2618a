"""The attention logits A of every encoding, and what HCD (eq. 18) needs of them.

    A[b,h,i,j] = ( Q_i·K_j + Q_i·T^q[h, r(i,j)] + K_j·T^k[h, r(i,j)] ) · scale + B[h,i,j]

`attention_logits` materialises A and is the reference. HCD compares the logits of some heads by their inner products,
which for content alone have a closed form. Names: b = batch, h = heads, s = sequence, d = head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ddrp.model import similarity
from megatron_ddrp.model.attention.relative import spread
from megatron_ddrp.model.positions.contract import PositionTerms


def allowed_pairs(document_ids: Tensor) -> Tensor:
    """bool `[b, 1, s, s]`: both ends carry the same non-zero document id. `document_ids` `[b, s]`."""
    same = document_ids.unsqueeze(-1) == document_ids.unsqueeze(-2)
    return (same & (document_ids > 0).unsqueeze(-1)).unsqueeze(1)


def position_logits(query: Tensor, key: Tensor, terms: PositionTerms) -> Tensor | None:
    """Everything in A but Q·K·scale: `[b, h, s, s]`, or None where the encoding adds nothing. No `[s, s, d]` arises."""
    logits = None
    if terms.query_table is not None:
        per_offset = query @ terms.query_table.transpose(-1, -2)  # [b, h, s, num_relative]
        logits = spread(per_offset, terms.lowest, terms.highest) * terms.scale
    if terms.key_table is not None:
        # Row j of this matrix holds K_j·T^k by i − j, so its own "row − column" is j − i: bounds swap sign and place.
        per_offset = (key @ terms.key_table.transpose(-1, -2)).flip(-1)
        by_key = spread(per_offset, -terms.highest, -terms.lowest).transpose(-1, -2) * terms.scale
        logits = by_key if logits is None else logits + by_key
    if terms.bias is not None:
        logits = terms.bias if logits is None else logits + terms.bias
    return logits


def attention_logits(query: Tensor, key: Tensor, terms: PositionTerms) -> Tensor:
    """A, before the padding mask: `query`, `key` `[b, h, s, d]` → `[b, h, s, s]`."""
    content = (query * terms.scale) @ key.transpose(-1, -2)
    position = position_logits(query, key, terms)
    return content if position is None else content + position


def choose_heads(terms: PositionTerms, heads: Tensor) -> PositionTerms:
    """The terms of some heads only; what all heads share stays."""

    def pick(tensor: Tensor | None, dim: int) -> Tensor | None:
        return tensor if tensor is None or tensor.shape[dim] == 1 else tensor.index_select(dim, heads)

    return PositionTerms(
        terms.scale,
        pick(terms.query_table, 0),
        pick(terms.key_table, 0),
        pick(terms.bias, 1),
        terms.lowest,
        terms.highest,
    )


def head_cosine(
    query: Tensor, key: Tensor, terms: PositionTerms, document_ids: Tensor, heads: Tensor, num_documents: int
) -> Tensor:
    """Mean pairwise cosine of the logits of `heads` `[m′]`, for backends that never hold A → `[b, documents]`."""
    all_heads = heads.shape[0] == query.shape[1]
    if not all_heads:
        query, key, terms = query.index_select(1, heads), key.index_select(1, heads), choose_heads(terms, heads)
    return _cosine(query, key, terms, document_ids, num_documents, all_heads)


def _cosine(
    query: Tensor, key: Tensor, terms: PositionTerms, document_ids: Tensor, num_documents: int, all_heads: bool
) -> Tensor:
    """Mean pairwise cosine of the logits of the heads given, `[b, m′, s, d]`, by the cheapest closed form."""
    if query.dtype.itemsize < 4:
        query, key = query.float(), key.float()
    documents = similarity.document_mask(document_ids, num_documents)
    if terms.content_only:
        if all_heads:
            return similarity.content_cosine_of_all(query, key, documents)
        return similarity.cosine_of_gram(similarity.content_gram(query, key, documents, terms.scale))
    logits = attention_logits(query, key, _in_dtype(terms, query.dtype))
    return similarity.logits_cosine(logits, allowed_pairs(document_ids), documents)


class _TapHeads(torch.autograd.Function):
    """x and some of its heads. The heads' gradient is added into that of x in place, where `index_select` would fill a
    tensor as large as x with zeros and add all of it: several times what HCD itself costs. So whatever else reads x
    must give it a gradient tensor of its own, as matrix products and torch's fused attention do.
    """

    @staticmethod
    def forward(ctx, x: Tensor, heads: Tensor):  # type: ignore[override]
        ctx.save_for_backward(heads)
        return x.view_as(x), x.index_select(1, heads)

    @staticmethod
    def backward(ctx, gradient: Tensor, chosen_gradient: Tensor):  # type: ignore[override]
        (heads,) = ctx.saved_tensors
        return gradient.index_add_(1, heads, chosen_gradient), None


def tapped_cosine(
    query: Tensor, key: Tensor, terms: PositionTerms, document_ids: Tensor, heads: Tensor, num_documents: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Queries and keys to go on with, and the mean pairwise cosine `[b, documents]` of `heads` (None for none)."""
    if not heads.shape[0]:
        return query, key, None
    if heads.shape[0] == query.shape[1]:
        return query, key, _cosine(query, key, terms, document_ids, num_documents, all_heads=True)
    (query, some_queries), (key, some_keys) = _TapHeads.apply(query, heads), _TapHeads.apply(key, heads)
    some_terms = choose_heads(terms, heads)
    return query, key, _cosine(some_queries, some_keys, some_terms, document_ids, num_documents, all_heads=False)


def _in_dtype(terms: PositionTerms, dtype: torch.dtype) -> PositionTerms:
    def cast(tensor: Tensor | None) -> Tensor | None:
        return tensor if tensor is None else tensor.to(dtype)

    return PositionTerms(
        terms.scale, cast(terms.query_table), cast(terms.key_table), cast(terms.bias), terms.lowest, terms.highest
    )
