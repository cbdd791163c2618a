"""The one attention: content, position terms, mask, softmax, dropout, value, for every encoding.

    A[b,h,i,j] = ( Q_i·K_j + Q_i·T^q[h, r(i,j)] + K_j·T^k[h, r(i,j)] ) · scale + B[h,i,j]

`attention_logits` materialises A and is the reference. Backends: `eager` uses A as it is; `sdpa` hands everything but
Q·K to torch's fused attention as a dense bias; `blocked` (blocked.py) works in cache-sized tiles and recomputes A in
the backward pass, the fastest on CPUs; `triton` (triton_attention.py) does so in kernels of its own on GPUs; `flex`
(flex_attention.py) leaves that to torch's compiler. HCD (eq. 18) compares the logits of some heads, so each backend
returns their mean pairwise cosine as well, by the cheapest way it has.

Names: b = batch, h = heads, s = sequence, d = head size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ddrp.model.blocked import blocked_attention
from megatron_ddrp.model.flex_attention import flex_attention, why_not_flex
from megatron_ddrp.model.positions.contract import PositionTerms
from megatron_ddrp.model.relative import spread
from megatron_ddrp.model.triton_attention import triton_attention, why_not_triton
from megatron_ddrp.objectives import mth


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
    documents = mth.document_mask(document_ids, num_documents)
    if terms.content_only:
        if all_heads:
            return mth.content_cosine_of_all(query, key, documents)
        return mth.cosine_of_gram(mth.content_gram(query, key, documents, terms.scale))
    logits = attention_logits(query, key, _in_dtype(terms, query.dtype))
    return mth.logits_cosine(logits, allowed_pairs(document_ids), documents)


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


def _in_dtype(terms: PositionTerms, dtype: torch.dtype) -> PositionTerms:
    def cast(tensor: Tensor | None) -> Tensor | None:
        return tensor if tensor is None else tensor.to(dtype)

    return PositionTerms(
        terms.scale, cast(terms.query_table), cast(terms.key_table), cast(terms.bias), terms.lowest, terms.highest
    )


def eager_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    terms: PositionTerms,
    document_ids: Tensor,
    heads: Tensor,
    dropout: float,
    num_documents: int = 1,
) -> tuple[Tensor, Tensor | None]:
    """The reference: A is materialised, masked with a finite value, normalised in fp32 at least."""
    logits = attention_logits(query, key, terms)
    allowed = allowed_pairs(document_ids)
    weights = probabilities(logits, allowed, dropout).to(value.dtype)
    cosine = None
    if heads.shape[0]:
        chosen = logits.index_select(1, heads)
        chosen = chosen.to(torch.promote_types(logits.dtype, torch.float32))
        cosine = mth.logits_cosine(chosen, allowed, mth.document_mask(document_ids, num_documents))
    return weights @ value, cosine


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


def sdpa_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    terms: PositionTerms,
    document_ids: Tensor,
    heads: Tensor,
    dropout: float,
    num_documents: int = 1,
) -> tuple[Tensor, Tensor | None]:
    """torch's fused attention with a dense bias `[b, h, s, s]`, or a mask alone where the encoding adds nothing."""
    query, key, cosine = tapped_cosine(query, key, terms, document_ids, heads, num_documents)
    position, mask = position_logits(query, key, terms), None
    if position is not None:
        mask = position.masked_fill(~allowed_pairs(document_ids), torch.finfo(query.dtype).min)
    elif query.is_cuda or not bool((document_ids == 1).all()):  # asking a GPU means waiting
        # A fully masked row of a boolean mask is NaN: let padding attend to padding, nobody reads it.
        allowed = allowed_pairs(document_ids)
        mask = allowed | ~allowed.any(-1, keepdim=True)
    context = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, scale=terms.scale)
    return context, cosine


def attend_from(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    terms: PositionTerms,
    places: Tensor,
    document_ids: Tensor,
    dropout: float,
) -> Tensor:
    """Attention of some queries only: `query` `[b, h, m, d]`, at `places` `[b, m]` of the sequence → `[b, h, m, d]`.

    `key`, `value` `[b, h, s, d]`. The queries stand at arbitrary places, so that offsets are gathered, m·s of them.
    """
    batch, num_heads, count, _ = query.shape
    seq = key.shape[2]
    logits = (query * terms.scale) @ key.transpose(-1, -2)  # [b, h, m, s]
    offset = places.unsqueeze(-1) - torch.arange(seq, device=places.device)  # i − j, [b, m, s]
    index = (offset.clamp(terms.lowest, terms.highest) - terms.lowest).unsqueeze(1).expand(-1, num_heads, -1, -1)
    if terms.query_table is not None:
        per_offset = query @ terms.query_table.transpose(-1, -2)  # [b, h, m, num_relative]
        logits = logits + per_offset.gather(-1, index) * terms.scale
    if terms.key_table is not None:
        per_offset = terms.key_table @ key.transpose(-1, -2)  # [b, h, num_relative, s]
        logits = logits + per_offset.gather(-2, index) * terms.scale
    if terms.bias is not None:
        rows = places[:, None, :, None].expand(-1, num_heads, -1, seq)
        logits = logits + terms.bias.expand(batch, -1, -1, -1).gather(2, rows)
    own = document_ids.gather(1, places).unsqueeze(-1)  # [b, m, 1]
    allowed = ((own == document_ids.unsqueeze(1)) & (own > 0)).unsqueeze(1)
    return probabilities(logits, allowed, dropout).to(value.dtype) @ value


def probabilities(logits: Tensor, allowed: Tensor, dropout: float) -> Tensor:
    """Softmax over the allowed pairs, masked with a finite value, in fp32 at least; then dropout."""
    masked = logits.masked_fill(~allowed, torch.finfo(logits.dtype).min)
    return F.dropout(masked.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32)), dropout)


def cpu_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    terms: PositionTerms,
    document_ids: Tensor,
    heads: Tensor,
    dropout: float,
    num_documents: int = 1,
) -> tuple[Tensor, Tensor | None]:
    """`blocked_attention`, with HCD in closed form where the logits are content alone: cheaper than holding them."""
    if not terms.content_only:
        return blocked_attention(query, key, value, terms, document_ids, heads, dropout, num_documents)
    query, key, cosine = tapped_cosine(query, key, terms, document_ids, heads, num_documents)
    return blocked_attention(query, key, value, terms, document_ids, heads[:0], dropout)[0], cosine


BACKENDS = {"eager": eager_attention, "sdpa": sdpa_attention, "blocked": cpu_attention}
"""Backends that run everywhere."""

GPU_BACKENDS = {"triton": (triton_attention, why_not_triton), "flex": (flex_attention, why_not_flex)}
"""Backends for some GPUs, each with what says why it cannot serve."""


def backend_function(name: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The attention of a backend's name; all take and give what `eager_attention` does."""
    return BACKENDS[name] if name in BACKENDS else GPU_BACKENDS[name][0]


def refusal(name: str, device: torch.device, dtype: torch.dtype, dropout: float, head_dim: int) -> str | None:
    """Why a backend cannot serve here, in one line; None where it can."""
    if name not in GPU_BACKENDS:
        return None
    return GPU_BACKENDS[name][1](device, dtype, PositionTerms(1.0), dropout, head_dim)


def resolve_backend(name: str, device: torch.device, in_logits: bool, dropout: float) -> tuple[str, str]:
    """What `--attention-backend` means for an encoding, and why, in a few words.

    `in_logits` says whether the encoding adds anything to the logits, `dropout` is that of the attention in training.
    """
    if name != "auto":
        return name, "as asked for"
    if device.type != "cpu":
        return "sdpa", "works on every GPU"
    if in_logits:
        return "blocked", "fastest on CPUs with terms in the logits"
    if dropout:
        return "blocked", "fastest on CPUs with dropout"
    return "sdpa", "fastest on CPUs without terms in the logits and without dropout"
