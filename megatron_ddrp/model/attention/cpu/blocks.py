"""Units of work of blocked attention: rows of a batch cut to their longest sequence, and tiles of query rows.

Names as in `megatron_ddrp.model.attention.cpu.blocked`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK_ELEMENTS = TILE_ELEMENTS = 3 * 2**18
"""Largest number of logits in a block of short sequences, which share the start-up cost of each operation, and in a
tile of a long sequence: 3 MiB in fp32, about the second-level caches of a few cores."""

SMALLEST_TILE = 32
"""Smallest number of query rows in a tile."""

KEPT_LENGTH = 512
"""Length of the longest block whose probabilities are kept for the backward pass; for longer ones they are recomputed.
Keeping them saves a fifth of attention's time and takes 4 bytes per pair and head (`docs/lab/benchmarks.md`)."""


class Tile(NamedTuple):
    """Some queries of a block, and the range of keys that contains all keys they may attend to."""

    rows: slice
    columns: slice


@dataclass(frozen=True)
class Block:
    """Some rows of the batch, cut to their longest sequence."""

    rows: slice
    length: int
    document_ids: Tensor
    """`[b, n]`."""
    unmasked: bool
    """True if every pair of the block within the window is allowed."""
    window: int | None
    """Same as `Attending.window`; None if the window covers the whole block."""

    @property
    def is_kept(self) -> bool:
        """True if the probabilities are kept for the backward pass."""
        return self.length <= KEPT_LENGTH

    def take(self, tensor: Tensor) -> Tensor:
        """Return the block's part of `[batch, h, s, d]`, `[g, n, d]`."""
        return tensor[self.rows, :, : self.length].flatten(0, 1)

    def tiles(self, num_heads: int) -> Iterator[Tile]:
        """Cut the query rows into tiles of about `TILE_ELEMENTS` logits.

        Under a window w a tile of t rows has t + 2w columns. At t = w it computes three logits per two allowed ones.
        """
        width = self.length if self.window is None else min(self.length, 3 * self.window + 1)
        rows = TILE_ELEMENTS // (len(self.document_ids) * num_heads * width)
        if self.window is not None:
            rows = min(rows, self.window)
        count = -(-self.length // max(SMALLEST_TILE, rows))
        rows = -(-self.length // count)
        for start in range(0, self.length, rows):
            end = min(start + rows, self.length)
            yield Tile(slice(start, end), self._columns(start, end))

    def _columns(self, start: int, end: int) -> slice:
        if self.window is None:
            return slice(0, self.length)
        return slice(max(start - self.window, 0), min(end + self.window, self.length))

    def offsets(self, tile: Tile) -> Tensor:
        """Return i − j of each pair of a tile, int64 `[t, c]`."""
        place = torch.arange(self.length)
        return place[tile.rows, None] - place[tile.columns]

    def forbidden_pairs(self, tile: Tile) -> Tensor | None:
        """Mark pairs of two documents, with padding or outside the window; return None if there are none.

        The result is bool `[b, 1, t, c]`, or `[1, 1, t, c]` if it is the same for all rows of the batch.
        """
        far = None if self.window is None else (self.offsets(tile).abs() > self.window)[None, None]
        if self.unmasked:
            return far
        own = self.document_ids[:, tile.rows].unsqueeze(-1)
        apart = ((own != self.document_ids[:, tile.columns].unsqueeze(-2)) | (own == 0)).unsqueeze(1)
        return apart if far is None else apart | far


def cut(document_ids: Tensor, num_heads: int, window: int | None = None) -> Iterator[Block]:
    """Cut the batch into blocks of at most `BLOCK_ELEMENTS` logits or of one row."""
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
        reach = None if window is None or window >= longest - 1 else window
        yield Block(slice(start, end), longest, ids, bool((ids == 1).all()), reach)
        start = end
