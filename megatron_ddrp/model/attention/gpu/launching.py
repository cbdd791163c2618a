"""How the Triton kernels of attention are started: tiles, warps and pipeline stages by kernel and device.

Chosen by what the compiler reports of registers, spilled bytes and shared memory (`benchmarks/kernels.py`), and fixed
rather than tuned at the start, so that every rank and every run sums in the same order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_ddrp.model.positions.contract import PositionTerms


class Tile(NamedTuple):
    """Queries and keys of a tile, warps of a program, stages of its loads."""

    queries: int
    keys: int
    warps: int
    stages: int

    @property
    def constants(self) -> dict[str, int]:
        """The tile in the words of a launch."""
        return {"BLOCK_M": self.queries, "BLOCK_N": self.keys, "num_warps": self.warps, "num_stages": self.stages}


class Tiles(NamedTuple):
    """The tile of each kind of kernel."""

    forward: Tile
    query_gradient: Tile
    """Of the bias's gradient too."""
    key_gradient: Tile
    heads: Tile
    """Of HCD's kernels."""

    @property
    def largest(self) -> int:
        """Most queries or keys of a tile."""
        return max(max(tile.queries, tile.keys) for tile in self)

    @property
    def smallest(self) -> int:
        """Fewest queries or keys of a tile."""
        return min(min(tile.queries, tile.keys) for tile in self)


IN_FP32 = {
    64: Tiles(*(Tile(32, 32, 4, 1),) * 4),
    128: Tiles(Tile(16, 32, 4, 1), Tile(16, 32, 4, 1), Tile(32, 16, 4, 1), Tile(16, 32, 4, 1)),
}
"""Widest head → tiles for numbers twice as wide."""
AMPERE = {
    64: Tiles(Tile(128, 32, 8, 3), Tile(64, 32, 4, 1), Tile(64, 32, 4, 1), Tile(64, 32, 4, 2)),
    128: Tiles(Tile(128, 32, 8, 2), Tile(32, 32, 4, 2), Tile(32, 32, 4, 1), Tile(64, 32, 8, 2)),
}
"""Widest head → tiles, from compute capability 8.0 on."""
HOPPER = {
    64: Tiles(Tile(128, 64, 8, 3), Tile(64, 32, 4, 2), Tile(64, 32, 4, 1), Tile(64, 32, 4, 2)),
    128: Tiles(Tile(128, 32, 8, 2), Tile(64, 32, 8, 2), Tile(64, 32, 8, 1), Tile(64, 32, 4, 2)),
}
"""The same for 9.0, where tiles of 64 queries or keys take Hopper's matrix instruction."""
WITH_KEY_TABLE = {
    "ampere": {128: {"forward": Tile(128, 16, 8, 2)}},
    "hopper": {
        64: {"key_gradient": Tile(32, 32, 4, 2)},
        128: {"forward": Tile(128, 16, 8, 2), "key_gradient": Tile(32, 32, 8, 1)},
    },
}
"""What changes for encodings with a table for the keys, whose kernels hold more."""
IN_ONE_RUN = {"ampere": {64: {"heads": Tile(64, 32, 8, 2)}}, "hopper": {}}
"""What changes besides where such a table has an offset for every pair: 4 warps would spill."""


def capability_of(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a CUDA device, and the lowest that is served for any other."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 0)


def tiles(query: Tensor, terms: PositionTerms, cover_all: bool) -> Tiles:
    """Return the tiles for queries `[b, s, h, d]` and an encoding's terms, on their device.

    `cover_all`: whether every pair has an offset of its own.
    """
    width = 64 if query.shape[-1] <= 64 else 128
    if query.dtype == torch.float32:
        return IN_FP32[width]
    device = "hopper" if capability_of(query.device)[0] == 9 else "ampere"
    changes: dict[str, Tile] = {}
    if terms.key_table is not None:
        changes |= WITH_KEY_TABLE[device].get(width, {})
        if cover_all:
            changes |= IN_ONE_RUN[device].get(width, {})
    return {"ampere": AMPERE, "hopper": HOPPER}[device][width]._replace(**changes)


def launch(kernel: Any, programs: int, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    """Run so many programs of a kernel on the device of its first argument. Every kernel is started here."""
    with torch.cuda.device_of(arguments[0]):
        kernel[(programs,)](*arguments, **constants)
