"""The pieces that blocked attention works on: rows of a batch cut to their longest sequence, and tiles of query rows.

Names as in `megatron_ddrp.model.attention.cpu.blocked`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

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


class Tile(NamedTuple):
    """Some queries of a block, and the keys among which they find all that they may attend to."""

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
    """Whether every pair of the block within the window is allowed."""
    window: int | None
    """As in `Attending`; None where it reaches over the whole block."""

    @property
    def is_kept(self) -> bool:
        """True if the probabilities are kept for the backward pass."""
        return self.length <= KEPT_LENGTH

    def take(self, tensor: Tensor) -> Tensor:
        """Return the block's part of `[batch, h, s, d]`, `[g, n, d]`."""
        return tensor[self.rows, :, : self.length].flatten(0, 1)

    def tiles(self, num_heads: int) -> Iterator[Tile]:
        """Cut the query rows into tiles of about `TILE_ELEMENTS` logits.

        Under a window w a tile of t rows takes t + 2w columns. With t = w it has three logits for two that are
        allowed.
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

    def forbidden(self, tile: Tile) -> Tensor | None:
        """Mark the pairs of two documents, with padding or outside of the window; None where there are none.

        bool `[b, 1, t, c]`, or `[1, 1, t, c]` where all rows of the batch have the same.
        """
        far = None if self.window is None else (self.offsets(tile).abs() > self.window)[None, None]
        if self.unmasked:
            return far
        own = self.document_ids[:, tile.rows].unsqueeze(-1)
        apart = ((own != self.document_ids[:, tile.columns].unsqueeze(-2)) | (own == 0)).unsqueeze(1)
        return apart if far is None else apart | far


def cut(document_ids: Tensor, num_heads: int, window: int | None = None) -> Iterator[Block]:
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
        reach = None if window is None or window >= longest - 1 else window
        yield Block(slice(start, end), longest, ids, bool((ids == 1).all()), reach)
        start = end
