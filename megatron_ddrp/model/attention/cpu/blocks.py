"""The pieces that blocked attention works on: rows of a batch cut to their longest sequence, and tiles of query rows.

Names as in `megatron_ddrp.model.attention.cpu.blocked`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_ELEMENTS = TILE_ELEMENTS = 3 * 2**18
"""Most logits of a block of short sequences, which share the cost of starting each operation, and of a tile of a long
sequence: 3 MiB in fp32, about the second-level caches of a few cores."""

SMALLEST_TILE = 32
"""Fewest query rows of a tile."""

KEPT_LENGTH = 512
"""Longest block whose probabilities are kept for the backward pass, which computes those of longer ones again. Keeping
them saves a fifth of attention's time and takes 4 bytes per pair and head (`docs/benchmarks.md`)."""


@dataclass(frozen=True)
class Block:
    """Some rows of the batch, cut to their longest sequence."""

    rows: slice
    length: int
    document_ids: Tensor
    """`[b, n]`."""
    unmasked: bool
    """Whether every pair of the block is allowed."""

    @property
    def is_kept(self) -> bool:
        """True if the probabilities are kept for the backward pass."""
        return self.length <= KEPT_LENGTH

    def take(self, tensor: Tensor) -> Tensor:
        """Return the block's part of `[batch, h, s, d]`, `[g, n, d]`."""
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
        """Mark the pairs of two documents or with padding, bool `[b, 1, t, n]`; None where there are none."""
        if self.unmasked:
            return None
        own = self.document_ids[:, tile].unsqueeze(-1)
        return ((own != self.document_ids.unsqueeze(-2)) | (own == 0)).unsqueeze(1)


def cut(document_ids: Tensor, num_heads: int) -> Iterator[Block]:
    """Cut the batch into blocks of at most `BLOCK_ELEMENTS` logits, or of one row."""
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
        yield Block(slice(start, end), longest, ids, bool((ids == 1).all()))
        start = end
