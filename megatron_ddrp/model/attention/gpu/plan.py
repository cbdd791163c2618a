"""Plan of a call of the Triton kernels: offsets, tiles and constants, equal for all layers of a micro-batch.

`Offsets` describes the tensors that the kernels index by offset i − j: P^q = Q·T^qᵀ, P^k = K·T^kᵀ and v, and their
gradients. The offsets are compile-time constants of the kernels. Encodings with an offset for every pair of the row
(ALiBi, DeBERTa's buckets) would need a new compilation for each length. So rows of zeros, which no pair reads, give all
lengths up to the next multiple of 128 the same offsets.

Tiles, warps and pipeline stages are chosen by the registers, spilled bytes and shared memory that the compiler reports
(`benchmarks/kernels.py`). They are fixed, not tuned at start-up, so every rank and every run sums in the same order.

Names: b = batch, h = heads, s = sequence, d = head size, n = offsets of the encoding, rows = n plus the rows of zeros.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ddrp.model.attention.attending import Attending


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


LENGTHS = 128
"""Number of consecutive lengths that share their offsets, for encodings whose offsets grow with the length."""


def _by_head(x: Tensor) -> Tensor:
    """Return a view of `[b, s, h, d]` as `[h, b·s, d]`."""
    return x.flatten(0, 1).transpose(0, 1)


class Offsets:
    """Offsets of an encoding as the kernels see them, and the tensors with one row per offset."""

    def __init__(self, lowest: int, highest: int, seq: int) -> None:
        """Choose the offsets for rows of `seq` tokens; `lowest` and `highest` are those of `PositionTerms`."""
        self.cover_all = 0 < seq - 1 == highest == -lowest
        """True if every pair of the row has an offset of its own, so that no two share the first or the last."""
        before = -seq % LENGTHS if self.cover_all else 0
        self.lowest, self.highest = lowest - before, highest + before
        own = highest - lowest + 1
        self.rows = -(-(own + 2 * before) // 8) * 8  # rows of P begin at multiples of 16 bytes
        self.filling = (before, self.rows - own - before)
        self.own = slice(before, before + own)

    def fill(self, table: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """Pad T `[1 | h, n, d]` with zeros: `[1 | h, rows, d]` in the dtype of the queries."""
        return None if table is None else F.pad(table.to(dtype), (0, 0, *self.filling))

    @staticmethod
    def products(vectors: Tensor, filled: Tensor | None) -> Tensor | None:
        """Return P: `[b, s, h, d]`, `[1 | h, rows, d]` → `[h, b·s, rows]`."""
        if filled is None:
            return None
        return torch.bmm(_by_head(vectors), filled.expand(vectors.shape[2], -1, -1).transpose(1, 2))

    def offset_bias(self, bias: Tensor | None, scale: float, num_heads: int) -> Tensor | None:
        """Return v/scale `[h, rows]` in fp32 for v `[1 | h, n]`: the kernels multiply by the scale."""
        if bias is None:
            return None
        return F.pad(bias.float() / scale, self.filling).expand(num_heads, -1).contiguous()

    def empty(self, vectors: Tensor) -> Tensor:
        """Allocate the gradient of P, `[h, b·s, rows]`, for queries or keys `[b, s, h, d]`."""
        batch, seq, num_heads, _ = vectors.shape
        return vectors.new_empty(num_heads, batch * seq, self.rows)

    def through_table(
        self, d_vectors: Tensor, vectors: Tensor, d_products: Tensor | None, filled: Tensor | None
    ) -> Tensor | None:
        """Add P's gradient times the table to `d_vectors`; return the table's gradient, summed over heads in fp32.

        `filled` is the table padded by `fill`.
        """
        if d_products is None or filled is None:
            return None
        _by_head(d_vectors).baddbmm_(d_products, filled.expand(len(d_products), -1, -1))
        per_head = torch.bmm(d_products.transpose(1, 2), _by_head(vectors))[:, self.own]
        return per_head.sum(0, keepdim=True, dtype=torch.float32) if filled.shape[0] == 1 else per_head

    def through_offset_bias(self, d_products: Tensor | None, bias: Tensor | None, scale: float) -> Tensor | None:
        """Return the gradient of v: the gradient of P^q, summed over the queries in fp32."""
        if d_products is None or bias is None:
            return None
        per_head = d_products[..., self.own].sum(1, dtype=torch.float32) / scale
        return per_head.sum_to_size(bias.shape).to(bias.dtype)


DROPOUT_STEPS = 65536
"""Steps of the dropout rate, decided by 16 bits per pair: 0.1 acts as 6554/65536, and kept values are scaled to
match."""


class KernelPlan(NamedTuple):
    """Arguments of the kernels that contain no tensor."""

    offsets: Offsets
    tiles: Tiles
    numbers: tuple[float, int]
    sizes: tuple[int, int, int]
    constants: dict[str, Any]


class Facts(NamedTuple):
    """Shapes and settings that decide a `KernelPlan`."""

    shape: tuple[int, ...]
    """`[b, s, h, d]` of the queries."""
    dtype: torch.dtype
    capability: tuple[int, int]
    scale: float
    lowest: int
    highest: int
    of_terms: tuple[tuple[int, ...] | None, ...]
    """Shapes of the terms' tensors, in the order of `HEAD_DIMENSIONS`."""
    window: int | None
    dropout: float
    compared: int
    """Number of heads that HCD compares."""

    @classmethod
    def of(cls, attending: Attending) -> Facts:
        """Return the facts of a call."""
        query, terms = attending.query, attending.terms
        batch, num_heads, seq, head_dim = query.shape
        of_query = ((batch, seq, num_heads, head_dim), query.dtype, capability_of(query.device))
        of_terms = tuple(None if x is None else x.shape for x in terms.tensors)
        bounds = (terms.scale, terms.lowest, terms.highest)
        return cls(*of_query, *bounds, of_terms, attending.window, attending.dropout, len(attending.heads))


@lru_cache(maxsize=1024)
def plan_of(facts: Facts) -> KernelPlan:
    """Return the plan of a call. Its parts cost more time than a launch, so calls of one shape share it."""
    batch, seq, num_heads, head_dim = facts.shape
    has_query_table, has_key_table, has_bias, has_offset_bias = (shape is not None for shape in facts.of_terms)
    bias_shape = facts.of_terms[2]
    window = None if facts.window is None or facts.window >= seq - 1 else facts.window
    offsets = Offsets(facts.lowest, facts.highest, seq)
    chosen = tiles(head_dim, facts.dtype, facts.capability, has_key_table, offsets.cover_all)
    reach = seq if window is None else chosen.largest + 2 * window
    leaves_band = window is None or window - min(-facts.lowest, facts.highest) >= chosen.smallest
    has_bins = (has_query_table or has_key_table or has_offset_bias) and not offsets.cover_all
    constants = {
        "D": head_dim,
        "D_PAD": max(16, _next_power_of_2(head_dim)),
        "S_PAD": max(512, _next_power_of_2(reach)),
        "TABLE_ROWS": offsets.rows,
        "LOWEST": offsets.lowest,
        "HIGHEST": offsets.highest,
        "WINDOW": window,
        "RUNS": 3 if has_bins and leaves_band else 1,
        "BIAS_BATCHED": bias_shape is not None and bias_shape[0] > 1,
        "COUNT": facts.compared,
        "COUNT_PAD": max(2, _next_power_of_2(facts.compared)),
        # fp32 as three products on tensor cores is as exact as fp32; a single product keeps 10 bits.
        "PRECISION": "tf32x3" if facts.dtype == torch.float32 else "tf32",
    }
    drop_below = min(max(round(facts.dropout * DROPOUT_STEPS), 1), DROPOUT_STEPS - 1)
    return KernelPlan(offsets, chosen, (facts.scale, drop_below), (batch, num_heads, seq), constants)


def _next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()
