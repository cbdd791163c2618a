"""The arguments of attention, its logits A for every encoding, and HCD's cosine of them (eq. 18).

    A[b,h,i,j] = ( Q_i·K_j + Q_i·T^q[h, r(i,j)] + K_j·T^k[h, r(i,j)] ) · scale + B[b,h,i,j] + v[h, r(i,j)]

Every backend takes the arguments as one tuple, `Attending`. `attention_logits` stores A and is the reference. HCD
compares the logits of some heads through their inner products, which have a closed form for content-only logits.

Names: b = batch, h = heads, s = sequence, d = head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_ddrp.model.embeddings import (
    content_cosine_of_all,
    content_gram,
    cosine_of_gram,
    document_mask,
    logits_cosine,
)
from megatron_ddrp.model.positions.contract import PositionTerms, reached_offsets
from megatron_ddrp.model.stages import Layout, wide


class Demand(NamedTuple):
    """Properties of a call of attention that decide which backends can compute it."""

    device: torch.device
    dtype: torch.dtype
    dropout: float
    """Dropout rate of the probabilities in training."""
    head_dim: int
    window: int | None = None
    """Same as `Attending.window`."""
    causal: bool = False
    """Same as `Attending.causal`."""

    @property
    def whole(self) -> bool:
        """True if every token attends to its whole document."""
        return self.window is None and not self.causal


class Attending(NamedTuple):
    """Arguments of one call of attention. Names: b = batch, h = heads, s = sequence, d = head size."""

    query: Tensor
    """`[b, h, s, d]`."""
    key: Tensor
    """`[b, h, s, d]`."""
    value: Tensor
    """`[b, h, s, d]`."""
    terms: PositionTerms
    document_ids: Tensor
    """int64 `[b, s]`: document number of each token, 0 for padding. A token attends to its own document only."""
    heads: Tensor
    """int64 `[m′]`: heads whose logits HCD compares; empty without HCD."""
    dropout: float = 0.0
    counted: Tensor | None = None
    """`[b, documents]`: weight of each document's cosine in HCD's sum, 1 or 0 in training. None: every row is one
    document of weight 1."""
    layout: Layout | None = None
    """Layout of the rows, if the CPU knows it."""
    window: int | None = None
    """Tokens on each side of a query that it attends to, besides itself; None: its whole document."""
    causal: bool = False
    """True if no query attends to the tokens that follow it."""

    @property
    def num_documents(self) -> int:
        """Largest number of documents in a row."""
        return 1 if self.counted is None else self.counted.shape[1]

    @property
    def full(self) -> bool:
        """True if every token is known to attend to all of its row."""
        return self.layout is not None and self.layout.full and self.demand.whole

    @property
    def compares_content(self) -> bool:
        """True if HCD compares content-only logits over whole documents, for which there are closed forms."""
        return self.terms.compared.content_only and self.demand.whole

    @property
    def demand(self) -> Demand:
        """`Demand` of this call."""
        query = self.query
        return Demand(query.device, query.dtype, self.dropout, query.shape[-1], self.window, self.causal)

    @property
    def allowed(self) -> Tensor:
        """Pairs that may attend to each other, bool `[b, 1, s, s]`."""
        return allowed_pairs(self.document_ids, self.window, self.causal)


class Attended(NamedTuple):
    """Attention of one layer, for objectives that look inside."""

    attending: Attending
    """Arguments of attention. Under tensor parallelism they hold this rank's heads only."""
    context: Tensor
    """`[b, h, s, d]`: output of each head before the output projection."""
    mean_of_heads: Callable[[Tensor], Tensor]
    """Mean over all heads of the layer, including those of other ranks: `[b, h, ..]` → `[b, ..]`."""


Backend = Callable[[Attending], tuple[Tensor, Tensor | None]]
"""Function that returns the context `[b, h, s, d]`, and HCD's mean pairwise cosine summed over the counted documents
(None if no heads are compared)."""


def _band(padded: Tensor, num_relative: int) -> Tensor:
    """Return a view `[.., t, num_relative]` of a contiguous `[.., t, t + num_relative − 1]`, largest offset first."""
    *leading, rows, width = padded.shape
    strides = (*padded.stride()[:-2], width + 1, 1)
    return padded.as_strided((*leading, rows, num_relative), strides)


def _left_of_band(rows: int, num_relative: int, device: torch.device) -> Tensor:
    """Mark the columns before each row's band, bool `[t, t + num_relative − 1]`.

    It is made anew each time: a CUDA graph would go on reading a mask that a cache has dropped.
    """
    column = torch.arange(rows + num_relative - 1, device=device)
    return column < torch.arange(rows, device=device)[:, None]


def spread_values(per_offset: Tensor, highest: int) -> Tensor:
    """Spread `[.., n, num_relative]` to `[.., n, n]` (a view with longer rows), without autograd."""
    n, num_relative = per_offset.shape[-2:]
    left = _left_of_band(n, num_relative, per_offset.device)
    # `where` keeps the strides of a transposed input, but the band's strides need a contiguous buffer.
    padded = torch.where(left, per_offset[..., -1:], per_offset[..., :1]).contiguous()  # [.., n, n + num_relative − 1]
    _band(padded, num_relative).copy_(per_offset.flip(-1))
    return padded[..., highest : highest + n]


def collect_values(per_pair: Tensor, num_relative: int, highest: int) -> Tensor:
    """Sum the pairs of each offset, `[.., n, n]` → `[.., n, num_relative]`: the adjoint of `spread_values`."""
    n = per_pair.shape[-1]
    padded = per_pair.new_zeros(*per_pair.shape[:-1], n + num_relative - 1)
    padded[..., highest : highest + n] = per_pair
    per_offset = _band(padded, num_relative).flip(-1)
    left = _left_of_band(n, num_relative, per_pair.device)
    dtype = torch.promote_types(per_pair.dtype, torch.float32)  # `after` is a difference, so it needs precision
    before = padded.masked_fill(~left, 0).sum(-1, dtype=dtype)  # [.., n]
    after = per_pair.sum(-1, dtype=dtype) - per_offset.sum(-1, dtype=dtype) - before
    per_offset[..., -1] += before
    per_offset[..., 0] += after
    return per_offset


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx, per_offset: Tensor, highest: int) -> Tensor:  # type: ignore[override]
        ctx.num_relative, ctx.highest = per_offset.shape[-1], highest
        return spread_values(per_offset, highest)

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[override]
        return collect_values(gradient, ctx.num_relative, ctx.highest), None


def spread(per_offset: Tensor, lowest: int, highest: int) -> Tensor:
    """Spread `[.., n, num_relative]` to `[.., n, n]`: entry (i, j) is column clip(i − j, lowest, highest) − lowest.

    It needs no gather. The rows of a relative table serve the offsets i − j = highest, …, lowest. Take a buffer of n
    rows, each n + num_relative − 1 long. The offsets of a row are adjacent, and each row's band begins one place to the
    right of the band above, so the band is a strided view, with one clipped bin on its left and one on its right.
    Spreading offsets over pairs takes two writes, and its adjoint one read and two sums, without the atomic additions
    of a scatter on GPUs. Offsets are differences of *rows*. Within a document positions are 0, 1, …, so i − j of the
    rows equals i − j of the positions; pairs of two documents get a value that the attention mask removes.
    """
    assert lowest <= 0 <= highest, f"offset 0 needs a row of its own, got {lowest} … {highest}"
    assert per_offset.shape[-1] == highest - lowest + 1, (per_offset.shape, lowest, highest)
    return _Spread.apply(per_offset, highest)


def allowed_pairs(document_ids: Tensor, window: int | None = None, causal: bool = False) -> Tensor:
    """Mark the pairs with the same non-zero document id; with a window, only those at most `window` tokens apart.

    With `causal` the key must not follow the query. `document_ids` `[b, s]` → bool `[b, 1, s, s]`.
    """
    same = document_ids.unsqueeze(-1) == document_ids.unsqueeze(-2)
    allowed = (same & (document_ids > 0).unsqueeze(-1)).unsqueeze(1)
    if window is None and not causal:
        return allowed
    place = torch.arange(document_ids.shape[1], device=document_ids.device)
    return allowed & in_reach(place[:, None] - place, reached_offsets(window, causal))


def in_reach(offset: Tensor, reached: tuple[int, int]) -> Tensor:
    """Return whether `reached_offsets` holds each offset i − j, bool of the same shape."""
    return (offset >= reached[0]) & (offset <= reached[1])


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


def _cosine(attending: Attending, query: Tensor, key: Tensor, terms: PositionTerms) -> Tensor:
    """Return the mean pairwise cosine of the compared heads by the cheapest closed form.

    `query`, `key` `[b, m′, s, d]` and `terms` hold the compared heads only. → `[b, documents]`.
    """
    query, key = wide(query), wide(key)
    documents = document_mask(attending.document_ids, attending.num_documents)
    if attending.compares_content:
        if len(attending.heads) == attending.query.shape[1]:
            return content_cosine_of_all(query, key, documents)
        return cosine_of_gram(content_gram(query, key, documents, terms.scale))
    logits = attention_logits(query, key, terms.map(lambda x, _: x.to(query.dtype)))
    return logits_cosine(logits, attending.allowed, documents)


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
    terms = terms.map(lambda x, dimension: x if x.shape[dimension] == 1 else x.index_select(dimension, heads))
    cosine = _cosine(attending, some_queries, some_keys, terms)
    return alone._replace(query=query, key=key), sum_of_counted(cosine, attending)


def sum_of_counted(cosine: Tensor, attending: Attending) -> Tensor:
    """Return the sum of `cosine` `[b, documents]` over the documents that HCD counts."""
    return (cosine if attending.counted is None else cosine * attending.counted).sum()
