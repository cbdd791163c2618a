"""Launches of the Triton attention kernels: tiles, warps and pipeline stages per kernel and device.

The values are chosen by the registers, spilled bytes and shared memory that the compiler reports
(`benchmarks/kernels.py`). They are fixed, not tuned at start-up, so every rank and every run sums in the same order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Tile(NamedTuple):
    """Queries and keys per tile, warps per program, and pipeline stages of its loads."""

    queries: int
    keys: int
    warps: int
    stages: int

    @property
    def constants(self) -> dict[str, int]:
        """Tile as keyword arguments of a launch."""
        return {"BLOCK_M": self.queries, "BLOCK_N": self.keys, "num_warps": self.warps, "num_stages": self.stages}


class Tiles(NamedTuple):
    """Tiles of each kind of kernel."""

    forward: Tile
    query_gradient: Tile
    """Tile of the kernels for the gradients of queries and of the bias."""
    key_gradient: Tile
    heads: Tile
    """Tile of HCD's kernels."""

    @property
    def largest(self) -> int:
        """Largest number of queries or keys per tile."""
        return max(max(tile.queries, tile.keys) for tile in self)

    @property
    def smallest(self) -> int:
        """Smallest number of queries or keys per tile."""
        return min(min(tile.queries, tile.keys) for tile in self)


IN_FP32 = {
    64: Tiles(*(Tile(32, 32, 4, 1),) * 4),
    128: Tiles(Tile(16, 32, 4, 1), Tile(16, 32, 4, 1), Tile(32, 16, 4, 1), Tile(16, 32, 4, 1)),
}
"""Widest head → tiles for fp32, whose numbers take twice the memory."""
AMPERE = {
    64: Tiles(Tile(128, 32, 8, 3), Tile(64, 32, 4, 1), Tile(64, 32, 4, 1), Tile(64, 32, 4, 2)),
    128: Tiles(Tile(128, 32, 8, 2), Tile(32, 32, 4, 2), Tile(32, 32, 4, 1), Tile(64, 32, 8, 2)),
}
"""Widest head → tiles for compute capability 8.0 and newer, except 9.0."""
HOPPER = {
    64: Tiles(Tile(128, 64, 8, 3), Tile(64, 32, 4, 2), Tile(64, 32, 4, 1), Tile(64, 32, 4, 2)),
    128: Tiles(Tile(128, 32, 8, 2), Tile(64, 32, 8, 2), Tile(64, 32, 8, 1), Tile(64, 32, 4, 2)),
}
"""Widest head → tiles for compute capability 9.0, where tiles of 64 queries or keys use Hopper's matrix instruction."""
WITH_KEY_TABLE = {
    "ampere": {128: {"forward": Tile(128, 16, 8, 2)}},
    "hopper": {
        64: {"key_gradient": Tile(32, 32, 4, 2)},
        128: {"forward": Tile(128, 16, 8, 2), "key_gradient": Tile(32, 32, 8, 1)},
    },
}
"""Device → widest head → changes for encodings with a key table, whose kernels need more registers and memory."""
IN_ONE_RUN = {"ampere": {64: {"heads": Tile(64, 32, 8, 2)}}, "hopper": {}}
"""Device → widest head → further changes if that table has an offset for every pair: 4 warps would spill."""


def capability_of(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a CUDA device; for any other device, the lowest one that the kernels support."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 0)


def tiles(
    head_dim: int, dtype: torch.dtype, capability: tuple[int, int], has_key_table: bool, cover_all: bool
) -> Tiles:
    """Return the tiles for queries of a head size and type on a device.

    `cover_all` is true if every pair has an offset of its own.
    """
    width = 64 if head_dim <= 64 else 128
    if dtype == torch.float32:
        return IN_FP32[width]
    device = "hopper" if capability[0] == 9 else "ampere"
    changes: dict[str, Tile] = {}
    if has_key_table:
        changes |= WITH_KEY_TABLE[device].get(width, {})
        if cover_all:
            changes |= IN_ONE_RUN[device].get(width, {})
    return {"ampere": AMPERE, "hopper": HOPPER}[device][width]._replace(**changes)


def launch(kernel: Any, programs: int, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    """Run `programs` programs of a kernel on the device of its first argument. Every kernel is launched here."""
    with torch.cuda.device_of(arguments[0]):
        kernel[(programs,)](*arguments, **constants)
