"""HCD in blocked attention: the logits that it compares, their inner products, and what these say of the logits.

Logits and probabilities of a head follow from one another, so a tile keeps one of both for the backward pass: the
probabilities of most heads, the logits of those that HCD compares. A softmax of these few heads gives the rest.

Names as in `megatron_ddrp.model.attention.cpu.blocked`; m′ = heads compared.
"""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from megatron_ddrp.model.attention.cpu.blocks import Block


class ComparedHeads:
    """HCD's heads in the tiles of a block: their logits, the inner products of these, and the gradient."""

    def __init__(self, heads: Tensor, block: Block, num_heads: int) -> None:
        self.heads, self.block, self.num_heads = heads, block, num_heads
        self.numbers: list[int] = heads.tolist()

    def logits(self, logits: Tensor, rows: slice) -> Tensor:
        """Of `[g, t, n]` a copy of the heads' own, forbidden pairs zeroed: `[b, m′, t, n]`."""
        chosen = self._by_head(logits).index_select(1, self.heads)
        forbidden = self.block.forbidden(rows)
        return chosen if forbidden is None else chosen.masked_fill_(forbidden, 0.0)

    def products(self, chosen: Tensor) -> Tensor:
        """Inner products of each query's logits, `[b, m′, t, n]` → `[b, t, m′, m′]`."""
        by_query = chosen.transpose(1, 2)  # [b, t, m′, n]
        return by_query @ by_query.transpose(-1, -2)

    def gradient(self, chosen: Tensor, d_products: Tensor) -> Tensor:
        """The adjoint of `products`, for `d_products` plus their transpose."""
        return (d_products @ chosen.transpose(1, 2)).transpose(1, 2)

    def collect(self, d_chosen: Tensor, d_logits: Tensor) -> None:
        """Add to the gradient of all logits, `[g, t, n]`."""
        self._by_head(d_logits).index_add_(1, self.heads, d_chosen)

    def keep(self, chosen: Tensor, probabilities: Tensor) -> None:
        """Write the heads' logits over their probabilities, of `[g, t, n]`: one of both is enough to keep."""
        self._by_head(probabilities).index_copy_(1, self.heads, chosen)

    def restore(self, kept: Tensor, rows: slice, d_products: Tensor) -> Tensor:
        """Undo `keep`, in place, and give the `gradient` of what had been kept."""
        by_head, forbidden = self._by_head(kept), self.block.forbidden(rows)
        d_chosen = self.gradient(by_head[:, self._places], d_products)
        for head in self.numbers:
            logits = by_head[:, head]  # [b, t, n]
            if forbidden is not None:
                logits.masked_fill_(forbidden.squeeze(1), torch.finfo(logits.dtype).min)
            torch.softmax(logits, -1, out=logits)
        return d_chosen

    def _by_head(self, tensor: Tensor) -> Tensor:
        return tensor.unflatten(0, (-1, self.num_heads))  # [b, h, t, n]

    @cached_property
    def _places(self) -> slice | Tensor:
        """The heads as an index: one that copies nothing where they are evenly spaced, as two heads always are."""
        steps = {following - head for head, following in pairwise(self.numbers)}
        return slice(self.numbers[0], self.numbers[-1] + 1, steps.pop()) if len(steps) == 1 else self.heads


def by_document(products: Tensor, documents: Tensor) -> Tensor:
    """`[batch, s, m′, m′]` of each query → `[batch, documents, m′, m′]`; `documents` bool `[batch, documents, s]`."""
    return (documents.to(products.dtype) @ products.flatten(2)).unflatten(-1, products.shape[2:])


def by_query(gram: Tensor, documents: Tensor) -> Tensor:
    """`[batch, documents, m′, m′]` → `[batch, s, m′, m′]`: each query has its document's."""
    return (documents.to(gram.dtype).transpose(1, 2) @ gram.flatten(2)).unflatten(-1, gram.shape[2:])
