"""HCD in blocked attention: the compared heads' logits, their inner products, and the gradient of these products.

For the backward pass a tile keeps one matrix per head: the logits of the heads that HCD compares, and the probabilities
of all other heads. A softmax turns the kept logits into probabilities again.

Names as in `megatron_ddrp.model.attention.cpu.blocked`; m′ = number of compared heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ddrp.model.attention.cpu.blocks import Block, Tile


class ComparedHeads:
    """HCD's heads in the tiles of one block: their logits, the inner products, and the gradient."""

    def __init__(self, heads: Tensor, block: Block, num_heads: int) -> None:
        self.heads, self.block, self.num_heads = heads, block, num_heads

    def logits(self, logits: Tensor, tile: Tile) -> Tensor:
        """Return a copy of the compared heads of `[g, t, c]`, with zeros at forbidden pairs: `[b, m′, t, c]`."""
        chosen = self._by_head(logits).index_select(1, self.heads)
        forbidden = self.block.forbidden(tile)
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
        chosen, forbidden = self._by_head(kept).index_select(1, self.heads), self.block.forbidden(tile)
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
