"""Attention for GPUs without stored logits: flash attention with learned position terms, in Triton.

It computes the formula of `megatron_ddrp.model.attention.logits`. Torch computes P^q = Q·T^qᵀ and P^k = K·T^kᵀ outside
the kernels (`[8, h, b·s/8, cells]`, a fraction of a dense bias `[b, h, s, s]`), and their gradients T^q′ = P^q′ᵀQ and
Q′ += P^q′·T^q. P is recomputed in the backward pass. The kernels read v `[8, h, cells]` in fp32. If v is learned, they
also write P^q′ when there is no table, since v′ = Σ P^q′/scale. The backward pass stores the gradient of the logits, in
parts (`PART_BYTES`). Results repeat to the last bit.

Rows are padded to a multiple of 16 tokens; those of training on GPUs already are. Triton is imported at the first call,
so the package works without it. Queries that may attend to nothing (padding) output 0 and get no gradient.

Names: b = batch, h = heads, s = sequence, d = head size, n = offsets of the encoding, cells = n and those beside them
(see `triton_kernels.py`).
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_ddrp.model.attention.logits import Attending, Demand, tapped_cosine
from megatron_ddrp.model.fused import is_nvidia, missing_for_triton
from megatron_ddrp.model.positions.contract import HEAD_DIMENSIONS, reached_offsets


class Tile(NamedTuple):
    """Queries and keys per tile, warps per program, and pipeline stages of its loads."""

    queries: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None
    """Most registers of a thread, so that more programs run at a time; None: as many as the compiler likes."""

    def of(self, kernel: Any) -> dict[str, int]:
        """Return the constants that a kernel takes from its tile, and the options of its launch."""
        constants = {"BLOCK_M": self.queries, "BLOCK_N": self.keys, "STAGES": self.stages}
        limit = {} if self.registers is None else {"maxnreg": self.registers}
        options = {"num_warps": self.warps, "num_stages": self.stages, **limit}
        return {name: value for name, value in constants.items() if name in kernel.arg_names} | options


class Tiles(NamedTuple):
    """Tiles of each kind of kernel.

    They are chosen by the registers, spilled bytes and shared memory that the compiler reports
    (`benchmarks/kernels.py`). They are fixed, not tuned at start-up, so every rank and every run sums in the same
    order.
    """

    forward: Tile
    query_gradient: Tile
    key_gradient: Tile
    heads: Tile
    """Tile of HCD's kernels."""

    @property
    def largest(self) -> int:
        """Largest number of queries or keys per tile."""
        return max(max(tile.queries, tile.keys) for tile in self)

    @property
    def step(self) -> int:
        """Multiple of all numbers of places by which the kernels of attention walk over a row."""
        return max(self.forward.keys, self.query_gradient.keys, self.key_gradient.queries)


IN_FP32 = {
    64: Tiles(*(Tile(32, 32, 4, 1),) * 4),
    128: Tiles(Tile(16, 32, 4, 1), Tile(32, 16, 4, 1), Tile(32, 16, 4, 1), Tile(16, 32, 4, 1)),
}
"""Widest head → tiles for fp32, whose numbers take twice the memory."""
AMPERE = {
    64: Tiles(Tile(128, 32, 8, 2, 128), Tile(128, 32, 8, 2), Tile(32, 64, 4, 2), Tile(64, 32, 4, 2)),
    128: Tiles(Tile(128, 32, 8, 1), Tile(128, 32, 8, 2), Tile(32, 32, 4, 1), Tile(64, 32, 8, 2)),
}
"""Widest head → tiles for compute capability 8.0 and newer, except 9.0."""
HOPPER = {
    64: Tiles(Tile(128, 64, 8, 2, 128), Tile(128, 64, 8, 2, 128), Tile(64, 64, 4, 2), Tile(64, 32, 4, 2)),
    128: Tiles(Tile(128, 64, 8, 2), Tile(128, 64, 8, 2), Tile(32, 64, 4, 2), Tile(64, 32, 4, 2)),
}
"""Widest head → tiles for compute capability 9.0, where 64 queries or keys are multiplied by Hopper's instruction."""
WITH_KEY_TABLE = {
    "ampere": {
        64: {"forward": Tile(64, 32, 4, 2), "key_gradient": Tile(32, 64, 4, 1)},
        128: {"forward": Tile(128, 16, 8, 2)},
    },
    "hopper": {
        64: {"forward": Tile(64, 64, 4, 2), "key_gradient": Tile(32, 64, 4, 2)},
        128: {"forward": Tile(64, 64, 4, 2), "key_gradient": Tile(16, 64, 4, 1)},
    },
}
"""Device → widest head → changes for encodings with a key table, whose kernels need more registers and memory."""


def capability_of(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a CUDA device; for any other device, the lowest one that the kernels support."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 0)


def tiles(head_dim: int, dtype: torch.dtype, capability: tuple[int, int], has_key_table: bool) -> Tiles:
    """Return the tiles for queries of a head size and type on a device."""
    width = 64 if head_dim <= 64 else 128
    if dtype == torch.float32:
        return IN_FP32[width]
    device = "hopper" if capability[0] == 9 else "ampere"
    chosen = {"ampere": AMPERE, "hopper": HOPPER}[device][width]
    return chosen._replace(**WITH_KEY_TABLE[device].get(width, {})) if has_key_table else chosen


def launch(kernel: Any, programs: int, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    """Run `programs` programs of a kernel on the device of its first argument. Every kernel is launched here."""
    with torch.cuda.device_of(arguments[0]):
        kernel[(programs,)](*arguments, **constants)


LENGTHS = 128
"""Number of consecutive lengths that share their offsets, for encodings whose offsets grow with the length."""
MULTIPLE = 16
"""Rows are padded to a multiple of this many tokens, so that neighbours are read in groups of 16 bytes."""
PART_BYTES = 2**28
"""Largest size of the stored gradient of the logits, unless that of one head and sequence is larger; with a gradient of
the bias, that of one head in all sequences."""


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _by_residue(x: Tensor) -> Tensor:
    """Return a view of `[b, s, h, d]` as `[8·h, b·s/8, d]`: all rows whose places are equal modulo 8, per head."""
    batch, seq, num_heads, head_dim = x.shape
    return x.view(batch * seq // 8, 8 * num_heads, head_dim).transpose(0, 1)


@cache
def _places_of_cells(
    center: int, cells: int, own: tuple[int, int], num_heads: int, by_key: bool, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the head `[h, 1]` and the table row `[8, 1, cells]`, int64, of each cell in rows of P by place modulo 8.

    The offset falls from cell to cell and grows with the place; the key's is j − i. Kept, since CUDA graphs read it.
    """
    offset = center + torch.arange(8, device=device)[:, None, None] - torch.arange(cells, device=device)
    return torch.arange(num_heads, device=device)[:, None], (-offset if by_key else offset).clamp(*own) - own[0]


class Offsets:
    """Offsets of an encoding as the kernels see them, and the tensors with one cell per offset.

    The tensors are P^q = Q·T^qᵀ, P^k = K·T^kᵀ and v, and their gradients. Their cells run from the largest offset of
    the own place (the query's in P^q and v, the key's in P^k) to the smallest, and one place later for each place
    modulo 8. The offsets are compile-time constants of the kernels. Encodings with an offset for every pair of the row
    (ALiBi, DeBERTa's buckets) would need a new compilation for each length. So cells that no pair reads give all
    lengths up to the next multiple of 128 the same offsets.
    """

    def __init__(self, lowest: int, highest: int, seq: int) -> None:
        """Choose the offsets for rows of `seq` tokens; `lowest` and `highest` are those of `PositionTerms`."""
        cover_all = 0 < seq - 1 == highest and lowest in (0, -highest)  # 0 in causal attention
        self.own = (lowest, highest)
        before = -seq % LENGTHS if cover_all else 0
        self.lowest, self.highest = lowest - before, highest + before
        reach = max(self.highest, -self.lowest)
        self.center = _round_up(reach + 7, 8)  # the first eight cells serve offsets from `reach` on
        self.cells = _round_up(self.center + 15 + reach, 8)

    def spread(self, table: Tensor, num_heads: int, by_key: bool = False) -> Tensor:
        """Copy the rows of `[1 | h, n, ..]` to their cells in one launch: `[8, h, cells, ..]`."""
        places = _places_of_cells(self.center, self.cells, self.own, num_heads, by_key, table.device)
        return table.expand(num_heads, *table.shape[1:])[places]

    def cells_of(self, table: Tensor | None, like: Tensor, by_key: bool = False) -> Tensor | None:
        """Return a table's cells `[8·h, cells, d]` in the dtype of `like` `[b, s, h, d]`."""
        return None if table is None else self.spread(table.to(like.dtype), like.shape[2], by_key).flatten(0, 1)

    def collect(self, d_cells: Tensor, like: Tensor, by_key: bool = False) -> Tensor:
        """Return the gradient of `spread`'s table `like`, in fp32: `[8, h, cells, ..]` → `[1 | h, n, ..]`.

        Of the cells beyond the offsets the kernels write only the first and the last, the sums of all pairs there.
        """
        lowest, highest = self.own
        largest = -lowest if by_key else highest
        (_, num_heads, _, *rest), (by_residue, by_head, by_cell, *strides) = d_cells.shape, d_cells.stride()
        first = d_cells.storage_offset() + (self.center - largest) * by_cell
        size = (8, num_heads, highest - lowest + 1, *rest)
        own = d_cells.as_strided(size, (by_residue + by_cell, by_head, by_cell, *strides), first)
        over = (0, 1) if len(like) == 1 else (0,)
        both = (own, d_cells[:, :, :: self.cells - 1])
        gradient, ends = (x.sum(over, keepdim=True, dtype=torch.float32)[0] for x in both)
        gradient[:, 0].add_(ends[:, 0])  # `+=` would copy the sum onto itself
        gradient[:, -1].add_(ends[:, 1])
        return gradient if by_key else gradient.flip(1)

    def products(self, vectors: Tensor, cells: Tensor | None) -> Tensor | None:
        """Return P `[8·h, b·s/8, cells]` for vectors `[b, s, h, d]` and the cells of a table."""
        return None if cells is None else torch.bmm(_by_residue(vectors), cells.transpose(1, 2))

    def offset_bias(self, bias: Tensor | None, scale: float, num_heads: int, by_key: bool = False) -> Tensor | None:
        """Return v/scale `[8, h, cells]` in fp32 for v `[1 | h, n]`: the kernels multiply by the scale."""
        if bias is None:
            return None
        return self.spread(bias.float() / scale, num_heads, by_key)

    def empty(self, vectors: Tensor) -> Tensor:
        """Allocate the gradient of P, `[8·h, b·s/8, cells]`, for queries or keys `[b, s, h, d]`."""
        batch, seq, num_heads, _ = vectors.shape
        return vectors.new_empty(8 * num_heads, batch * seq // 8, self.cells)

    def through_table(
        self, d_vectors: Tensor, vectors: Tensor, d_products: Tensor, cells: Tensor, table: Tensor, by_key: bool = False
    ) -> Tensor:
        """Add P's gradient times the table, whose cells are `cells`, to `d_vectors`; return the table's gradient."""
        _by_residue(d_vectors).baddbmm_(d_products, cells)
        d_cells = torch.bmm(d_products.transpose(1, 2), _by_residue(vectors))
        return self.collect(d_cells.unflatten(0, (8, -1)), table, by_key)

    def through_offset_bias(self, d_products: Tensor, bias: Tensor, scale: float) -> Tensor:
        """Return the gradient of v: the gradient of P^q, summed over the queries."""
        return self.collect(d_products.sum(1, dtype=torch.float32).unflatten(0, (8, -1)) / scale, bias)


DROPOUT_STEPS = 65536
"""Steps of the dropout rate, decided by 16 bits per pair: 0.1 acts as 6554/65536, and kept values are scaled to
match."""


class KernelPlan(NamedTuple):
    """Arguments of the kernels that contain no tensor, equal for all layers of a micro-batch."""

    offsets: Offsets
    tiles: Tiles
    numbers: tuple[float, int]
    sizes: tuple[int, int, int]
    """Sequences, heads, and tokens per row after padding."""
    constants: dict[str, Any]
    full: bool
    """True if every token attends to all of its row and the rows consist of whole tiles: the kernels read no ids."""


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
    full: bool
    """Same as `Attending.full`."""
    causal: bool = False
    """Same as `Attending.causal`."""

    @classmethod
    def of(cls, attending: Attending) -> Facts:
        """Return the facts of a call."""
        query, terms = attending.query, attending.terms
        batch, num_heads, seq, head_dim = query.shape
        of_query = ((batch, seq, num_heads, head_dim), query.dtype, capability_of(query.device))
        of_terms = tuple(None if x is None else x.shape for x in terms.tensors)
        bounds = (terms.scale, terms.lowest, terms.highest)
        compared, full = len(attending.heads), attending.full
        window, dropout, causal = attending.window, attending.dropout, attending.causal
        return cls(*of_query, *bounds, of_terms, window, dropout, compared, full, causal)


@lru_cache(maxsize=1024)
def plan_of(facts: Facts) -> KernelPlan:
    """Return the plan of a call. Its parts cost more time than a launch, so calls of one shape share it."""
    batch, seq, num_heads, head_dim = facts.shape
    _, key_table_shape, bias_shape, _ = facts.of_terms
    lowest, highest = reached_offsets(facts.window, facts.causal)
    # No window is a power of 2: most lengths then share their kernels.
    before, after = (min(offset, _next_power_of_2(seq)) for offset in (highest, -lowest))
    window = None if min(before, after) >= seq - 1 else (before, after)
    offsets = Offsets(facts.lowest, facts.highest, seq)
    chosen = tiles(head_dim, facts.dtype, facts.capability, key_table_shape is not None)
    assert chosen.key_gradient.keys % chosen.query_gradient.keys == 0, chosen
    reach = seq if window is None else chosen.largest + before + after
    constants = {
        "D": head_dim,
        "D_PAD": max(16, _next_power_of_2(head_dim)),
        "S_PAD": max(512, _next_power_of_2(reach)),
        "CENTER": offsets.center,
        "CELLS": offsets.cells,
        "LOWEST": offsets.lowest,
        "HIGHEST": offsets.highest,
        "WINDOW": window,
        "BIAS_BATCHED": bias_shape is not None and bias_shape[0] > 1,
        "COUNT": facts.compared,
        "COUNT_PAD": max(2, _next_power_of_2(facts.compared)),
        # fp32 as three products on tensor cores is as exact as fp32; a single product keeps 10 bits.
        "PRECISION": "tf32x3" if facts.dtype == torch.float32 else "tf32",
    }
    drop_below = min(max(round(facts.dropout * DROPOUT_STEPS), 1), DROPOUT_STEPS - 1)
    numbers, sizes = (facts.scale, drop_below), (batch, num_heads, _round_up(seq, MULTIPLE))
    return KernelPlan(offsets, chosen, numbers, sizes, constants, facts.full and seq % chosen.step == 0)


def _next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LARGEST_HEAD = 128
LOWEST_CAPABILITY = (8, 0)


def why_not_triton(demand: Demand) -> str | None:
    """Return the reason why this backend cannot run, in one line, or None if it can."""
    device, dtype, dropout, head_dim = demand[:4]
    if missing := missing_for_triton():
        return f"triton attention needs {missing}: use another backend"
    if os.environ.get("TRITON_INTERPRET") != "1" and (reason := why_not_device(device)):
        return reason
    if dtype not in DTYPES:
        return f"triton attention takes bfloat16, float16 or float32, got {dtype}: use another backend".replace(
            "torch.", ""
        )
    if head_dim > LARGEST_HEAD:
        return f"triton attention takes heads up to {LARGEST_HEAD} wide, got {head_dim}: use sdpa"
    if dropout >= 1:
        return f"triton attention takes a dropout below 1, got {dropout}"
    return None


def why_not_device(device: torch.device) -> str | None:
    """Return the reason why Triton's compiled kernels cannot run on a device, or None if they can."""
    if not is_nvidia(device):
        return f"triton attention needs an NVIDIA GPU, got {device.type}: use another backend"
    capability = torch.cuda.get_device_capability(device)
    if capability < LOWEST_CAPABILITY:
        got = ".".join(map(str, capability))
        return f"triton attention needs compute capability 8.0 (A100) or newer, this GPU has {got}: use sdpa"
    return None


def _by_token(x: Tensor) -> Tensor:
    """Return `[b, h, s, d]` as contiguous `[b, s, h, d]`, the layout of the projections, so that nothing is copied."""
    return x.transpose(1, 2).contiguous()


class Given(NamedTuple):
    """Tensors of a call, which both passes read."""

    query: Tensor
    """`[b, s, h, d]`, contiguous."""
    key: Tensor
    value: Tensor
    query_table: Tensor | None
    """T^q `[1 | h, n, d]`."""
    key_table: Tensor | None
    query_cells: Tensor | None
    """Cells of T^q, `[8·h, cells, d]`, in the dtype of the queries."""
    key_cells: Tensor | None
    bias: Tensor | None
    """B `[1 | b, h, s, s]`."""
    offset_bias: Tensor | None
    document_ids: Tensor
    """int32 `[b, s]`."""
    heads: Tensor
    seed: Tensor | None


class _Problem:
    """Arguments that all kernels share, and the launches of the kernels."""

    def __init__(self, plan: KernelPlan, given: Given) -> None:
        query, key, *_, query_cells, key_cells, bias, _, self.ids, heads, _ = given
        self.offsets, self.tiles, self.numbers, self.sizes, self.constants, full = plan
        self.given, self.query = given, query
        self.heads = heads if len(heads) else None
        self.by_query, self.by_key = self.offsets.products(query, query_cells), self.offsets.products(key, key_cells)
        self.bias = None if bias is None else bias.contiguous()
        self.read_ids = None if full else self.ids

    def inputs(self, by_key: bool = False) -> tuple[Any, ...]:
        """Return the arguments that the kernels of the logits share; v is read by query or by key."""
        query, key, value, *_, offset_bias, _, _, seed = self.given
        of_offsets = self.offsets.offset_bias(offset_bias, self.numbers[0], self.sizes[1], by_key)
        of_terms = (self.by_query, self.by_key, of_offsets, self.bias)
        return (query, key, value, *of_terms, self.read_ids, seed, *self.numbers)

    def statistics(self) -> Tensor:
        """Allocate one fp32 number per query: `[h, b, s]`."""
        batch, num_heads, seq = self.sizes
        return self.query.new_empty(num_heads, batch, seq, dtype=torch.float32)

    def launch(self, kernel: Any, programs: int, tensors: tuple[Any, ...], tile: Tile) -> None:
        """Run an attention kernel; `tensors` are its arguments before the sizes."""
        launch(kernel, programs, (*tensors, *self.sizes), self._constants(kernel, tile))

    def _constants(self, kernel: Any, tile: Tile) -> dict[str, Any]:
        """Return the constants that a kernel takes, and the options of its launch."""
        given = self.constants | {"BLOCK_K": self.tiles.key_gradient.keys}
        return {name: value for name, value in given.items() if name in kernel.arg_names} | tile.of(kernel)

    def launch_compare(self, kernel: Any, tensors: tuple[Tensor, ...], counted: Tensor) -> None:
        """Run a kernel of HCD, which has no values and no dropout."""
        query, key, _, *of_terms, _, _, scale, _ = self.inputs()
        inputs, tile = (query, key, *of_terms, self.ids, scale, self.heads), self.tiles.heads
        programs = self.sizes[0] * -(-self.sizes[2] // tile.queries)
        launch(kernel, programs, (*inputs, *tensors, *self.sizes, counted.shape[1]), self._constants(kernel, tile))

    def forward(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the context `[b, s, h, d]`, the base-2 log-sum-exp `[h, b, s]`, and the sums of squares of each
        query's logits, `[h, b, s]` (None without HCD)."""
        from megatron_ddrp.model.attention.gpu import triton_kernels

        tile = self.tiles.forward
        context, lse = torch.empty_like(self.query), self.statistics()
        squares = None if self.heads is None else self.statistics()
        outputs = (context, lse, squares, self.heads)
        self.launch(triton_kernels.forward_kernel, self._blocks(tile.queries), (*self.inputs(), *outputs), tile)
        return context, lse, squares

    def compare(self, squares: Tensor, counted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return HCD's sum over the counted documents, fp32, and two tensors `[m′, b, s]` for its gradient."""
        from megatron_ddrp.model.attention.gpu import triton_heads

        batch, _, seq = self.sizes
        inverse, inner = (squares.new_empty(self.constants["COUNT"], batch, seq) for _ in range(2))
        shares = squares.new_empty(batch, seq)
        self.launch_compare(triton_heads.compare_kernel, (squares, counted, inverse, inner, shares), counted)
        return shares.sum(), inverse, inner

    def pull(self, of_heads: list[Tensor], d_sum: Tensor) -> tuple[Tensor, Tensor]:
        """Return HCD's part in the gradient kernels: T `[b, s, s]`, and the pulls `[2, m′, b, s]`.

        `of_heads` are the counted documents and the two tensors from `compare`.
        """
        from megatron_ddrp.model.attention.gpu import triton_heads

        (batch, _, seq), (counted, inverse, inner) = self.sizes, of_heads
        total, pulls = self.query.new_empty(batch, seq, seq), inverse.new_empty(2, *inverse.shape)
        self.launch_compare(triton_heads.pull_kernel, (counted, inverse, inner, d_sum, total, pulls), counted)
        return total, pulls

    def backward(
        self, context: Tensor, d_context: Tensor, lse: Tensor, wants: dict[str, bool], pulls: tuple[Tensor | None, ...]
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of query, key, value `[b, s, h, d]`, and of the terms' tensors in their order.

        `wants` maps the name of each of the terms' tensors to true if it needs a gradient.
        """
        offsets, given = self.offsets, self.given
        d_vectors = tuple(torch.empty_like(self.query) for _ in range(3))
        d_query, d_key, _ = d_vectors
        d_by_query = offsets.empty(given.query) if self.by_query is not None or wants["offset_bias"] else None
        d_by_key = None if self.by_key is None else offsets.empty(given.key)
        d_bias = torch.empty_like(self.bias) if self.bias is not None and wants["bias"] else None
        self._through_logits(context, d_context, lse, (*d_vectors, d_by_query, d_by_key, d_bias), pulls)
        d_query_table = d_key_table = d_offset_bias = None
        if d_by_query is not None and given.query_table is not None and given.query_cells is not None:
            of_query = (given.query, d_by_query, given.query_cells, given.query_table)
            d_query_table = offsets.through_table(d_query, *of_query)
        if d_by_key is not None and given.key_table is not None and given.key_cells is not None:
            of_key = (given.key, d_by_key, given.key_cells, given.key_table)
            d_key_table = offsets.through_table(d_key, *of_key, by_key=True)
        if d_by_query is not None and given.offset_bias is not None and wants["offset_bias"]:
            d_offset_bias = offsets.through_offset_bias(d_by_query, given.offset_bias, self.numbers[0])
        return *d_vectors, d_query_table, d_key_table, d_bias, d_offset_bias

    def _through_logits(
        self,
        context: Tensor,
        d_context: Tensor,
        lse: Tensor,
        gradients: tuple[Tensor | None, ...],
        pulls: tuple[Tensor | None, ...],
    ) -> None:
        """Write the gradients of query, key, value, P^q, P^k and B through that of the logits, in parts."""
        from megatron_ddrp.model.attention.gpu import triton_kernels

        (batch, num_heads, seq), (scale, drop_below) = self.sizes, self.numbers
        d_query, d_key, d_value, d_by_query, d_by_key, d_bias = gradients
        tile_q, tile_k = self.tiles.query_gradient, self.tiles.key_gradient
        inputs, ids, seed = self.inputs(by_key=True), self.read_ids, self.given.seed
        shift, delta = self.statistics(), self.statistics()
        keys = None if seed is None else shift.new_empty(2, *shift.shape, dtype=torch.int32)
        tensors: tuple[Any, ...] = (context, d_context, lse, seed, shift, delta, keys, scale, drop_below)
        self.launch(triton_kernels.rows_kernel, self._blocks(tile_q.queries), tensors, tile_q)
        total = batch * num_heads
        unit = 1 if d_bias is None else batch  # pairs of head and sequence in a part: all sequences of a head for B
        most = PART_BYTES // (unit * seq * seq * self.query.element_size()) * unit
        part = self.query.new_empty(min(max(most, unit), total), seq, seq)
        reach = None if ids is None else ids.new_empty(batch, -(-seq // tile_k.keys), 2)
        for first in range(0, total, len(part)):
            d_logits = part[: total - first]
            if d_bias is not None and ids is not None:
                d_logits.zero_()  # tiles of two documents are not written
            tensors = (d_context, shift, delta, keys, d_key, d_value, d_by_key, d_logits, reach, self.heads, *pulls)
            programs = -(-seq // tile_k.keys) * len(d_logits)
            self.launch(triton_kernels.key_gradient_kernel, programs, (*inputs, *tensors, first), tile_k)
            programs = -(-seq // tile_q.queries) * len(d_logits)
            tensors = (self.given.key, ids, d_logits, reach, d_query, d_by_query, first)
            self.launch(triton_kernels.query_gradient_kernel, programs, tensors, tile_q)
            if d_bias is not None:
                by_head = d_logits.unflatten(0, (-1, batch)).transpose(0, 1)  # [b, heads of this part, s, s]
                summed = by_head if len(d_bias) > 1 else by_head.sum(0, keepdim=True, dtype=torch.float32)
                torch.div(summed, scale, out=d_bias[:, first // batch : first // batch + by_head.shape[1]])

    def _blocks(self, block: int) -> int:
        batch, num_heads, seq = self.sizes
        return -(-seq // block) * batch * num_heads


class _TritonAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, plan: KernelPlan, attending: Attending, seed: Tensor | None, *tensors):  # type: ignore[override]
        query, key, value, query_table, key_table, bias, offset_bias = tensors
        vectors = (_by_token(query), _by_token(key), _by_token(value))
        cells = (
            plan.offsets.cells_of(query_table, vectors[0]),
            plan.offsets.cells_of(key_table, vectors[1], by_key=True),
        )
        ids = attending.document_ids.int().contiguous()
        given = Given(*vectors, query_table, key_table, *cells, bias, offset_bias, ids, attending.heads, seed)
        problem = _Problem(plan, given)
        context, lse, squares = problem.forward()
        cosine = None
        of_heads: tuple[Tensor, ...] = ()
        if squares is not None:
            counted = squares.new_ones(len(query), 1) if attending.counted is None else attending.counted
            cosine, *rest = problem.compare(squares, counted)
            of_heads = (counted, *rest)
        ctx.save_for_backward(*given, context, lse, *of_heads)
        ctx.plan = plan
        return context.transpose(1, 2), cosine

    @staticmethod
    @once_differentiable
    def backward(ctx, d_context, d_cosine):  # type: ignore[override]
        saved, count = ctx.saved_tensors, len(Given._fields)
        context, lse, *of_heads = saved[count:]
        problem = _Problem(ctx.plan, Given(*saved[:count]))
        pulls = problem.pull(of_heads, d_cosine) if of_heads else (None, None)
        wants = dict(zip(HEAD_DIMENSIONS, ctx.needs_input_grad[6:], strict=True))
        gradients = problem.backward(context, _by_token(d_context), lse, wants, pulls)
        return (None, None, None, *(None if x is None else x.transpose(1, 2) for x in gradients[:3]), *gradients[3:])


def _padded(attending: Attending, seq: int) -> Attending:
    """Return the call with rows of `seq` tokens, the last of them padding."""
    missing = seq - attending.query.shape[2]
    if not missing:
        return attending
    query, key, value = (F.pad(x, (0, 0, 0, missing)) for x in attending[:3])
    terms, ids = attending.terms, F.pad(attending.document_ids, (0, missing))
    if terms.bias is not None:
        terms = replace(terms, bias=F.pad(terms.bias, (0, missing, 0, missing)))
    return attending._replace(query=query, key=key, value=value, terms=terms, document_ids=ids)


def triton_attention(attending: Attending) -> tuple[Tensor, Tensor | None]:
    """Compute attention on a GPU. Raise ValueError with the reason of `why_not_triton` if it cannot run.

    Dropout's seed is drawn on the device from torch's generator. Activation checkpointing restores that generator, so
    it draws the same mask again.
    """
    reason = why_not_triton(attending.demand)
    if reason:
        raise ValueError(reason)
    cosine = None
    if attending.terms.compared is not attending.terms:
        attending, cosine = tapped_cosine(attending)
    terms, num_heads = attending.terms.by_offset, attending.query.shape[1]
    if terms.bias is not None:  # the kernels read one bias per head
        terms = replace(terms, bias=terms.bias.expand(-1, num_heads, -1, -1))
    attending = attending._replace(terms=terms)
    seq, plan = attending.query.shape[2], plan_of(Facts.of(attending))
    attending = _padded(attending, plan.sizes[2])
    seed = torch.randint(2**31, (1,), device=attending.query.device) if attending.dropout else None
    tensors = (*attending[:3], *attending.terms.tensors)
    context, of_kernels = _TritonAttention.apply(plan, attending, seed, *tensors)
    return context[:, :, :seq], of_kernels if cosine is None else cosine
