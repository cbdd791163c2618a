"""Attention for GPUs without stored logits: flash attention with learned position terms, in Triton.

It computes the formula of `megatron_ddrp.model.attention.logits`. Torch computes P^q = Q·T^qᵀ and P^k = K·T^kᵀ outside
the kernels (`[h, b·s, rows]`, a fraction of a dense bias `[b, h, s, s]`), and their gradients T^q′ = P^q′ᵀQ, Q′ +=
P^q′·T^q; P is recomputed in the backward pass. The kernels read v `[h, rows]` in fp32. If v is learned, they also write
P^q′ when there is no table, since v′ = Σ P^q′/scale. Results repeat to the last bit.

Triton is imported at the first call, so the package works without it. Queries that may attend to nothing (padding)
output 0 and get no gradient.

Names: b = batch, h = heads, s = sequence, d = head size, n = offsets of the encoding, rows = n plus the rows of zeros.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_ddrp.model.attention.logits import Attending, Demand, tapped_cosine
from megatron_ddrp.model.fused import is_nvidia, missing_for_triton
from megatron_ddrp.model.positions.contract import HEAD_DIMENSIONS


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
    """Tiles of each kind of kernel.

    They are chosen by the registers, spilled bytes and shared memory that the compiler reports
    (`benchmarks/kernels.py`). They are fixed, not tuned at start-up, so every rank and every run sums in the same
    order.
    """

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
    """Offsets of an encoding as the kernels see them, and the tensors with one row per offset.

    The tensors are P^q = Q·T^qᵀ, P^k = K·T^kᵀ and v, and their gradients. The offsets are compile-time constants of the
    kernels. Encodings with an offset for every pair of the row (ALiBi, DeBERTa's buckets) would need a new compilation
    for each length. So rows of zeros, which no pair reads, give all lengths up to the next multiple of 128 the same
    offsets.
    """

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
    """Arguments of the kernels that contain no tensor, equal for all layers of a micro-batch."""

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


DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LARGEST_HEAD = 128
LOWEST_CAPABILITY = (8, 0)


def why_not_triton(demand: Demand) -> str | None:
    """Return the reason why this backend cannot run, in one line, or None if it can."""
    device, dtype, dropout, head_dim, _ = demand
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
    """T^q padded by `Offsets.fill`, `[1 | h, rows, d]`."""
    key_table: Tensor | None
    bias: Tensor | None
    """B `[1 | b, h, s, s]`."""
    offset_bias: Tensor | None
    document_ids: Tensor
    heads: Tensor
    seed: Tensor | None


class _Problem:
    """Arguments that all kernels share, and the launches of the kernels."""

    def __init__(self, plan: KernelPlan, given: Given) -> None:
        query, key, value, query_table, key_table, bias, offset_bias, document_ids, heads, seed = given
        self.offsets, self.tiles, self.numbers, self.sizes, self.constants = plan
        self.given, self.query = given, query
        self.heads = heads if len(heads) else None
        self.by_query, self.by_key = Offsets.products(query, query_table), Offsets.products(key, key_table)
        self.bias = None if bias is None else bias.contiguous()
        of_offsets = self.offsets.offset_bias(offset_bias, self.numbers[0], self.sizes[1])
        of_terms = (self.by_query, self.by_key, of_offsets, self.bias)
        self.inputs = (query, key, value, *of_terms, document_ids.contiguous(), seed)

    def statistics(self) -> Tensor:
        """Allocate one fp32 number per query: `[h, b, s]`."""
        batch, num_heads, seq = self.sizes
        return self.query.new_empty(num_heads, batch, seq, dtype=torch.float32)

    def launch(self, kernel: Any, programs: int, tensors: tuple[Tensor | None, ...], tile: Tile) -> None:
        """Run an attention kernel; `tensors` follow the arguments that all kernels share."""
        launch(kernel, programs, (*self.inputs, *self.numbers, *tensors, *self.sizes), self.constants | tile.constants)

    def launch_compare(self, kernel: Any, tensors: tuple[Tensor, ...], counted: Tensor) -> None:
        """Run a kernel of HCD, which has no values and no dropout."""
        query, key, _, *of_terms, ids, _ = self.inputs
        inputs, tile = (query, key, *of_terms, ids, self.numbers[0], self.heads), self.tiles.heads
        programs = self.sizes[0] * -(-self.sizes[2] // tile.queries)
        constants = self.constants | tile.constants
        launch(kernel, programs, (*inputs, *tensors, *self.sizes, counted.shape[1]), constants)

    def forward(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the context `[b, s, h, d]`, the base-2 log-sum-exp `[h, b, s]`, and the sums of squares of each
        query's logits, `[h, b, s]` (None without HCD)."""
        from megatron_ddrp.model.attention.gpu import triton_kernels

        tile = self.tiles.forward
        context, lse = torch.empty_like(self.query), self.statistics()
        squares = None if self.heads is None else self.statistics()
        self.launch(
            triton_kernels.forward_kernel, self._blocks(tile.queries), (context, lse, squares, self.heads), tile
        )
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
        from megatron_ddrp.model.attention.gpu import triton_kernels

        delta = self.statistics()
        d_query, d_key, d_value = (torch.empty_like(self.query) for _ in range(3))
        offsets, given = self.offsets, self.given
        d_by_query = offsets.empty(given.query) if self.by_query is not None or wants["offset_bias"] else None
        d_by_key = None if self.by_key is None else offsets.empty(given.key)
        outputs: tuple[Tensor | None, ...] = (context, d_context, lse, delta, d_query, d_by_query, self.heads, *pulls)
        tile = self.tiles.query_gradient
        self.launch(triton_kernels.query_gradient_kernel, self._blocks(tile.queries), outputs, tile)
        outputs, tile = (d_context, lse, delta, d_key, d_value, d_by_key, self.heads, *pulls), self.tiles.key_gradient
        self.launch(triton_kernels.key_gradient_kernel, self._blocks(tile.keys), outputs, tile)
        d_query_table = offsets.through_table(d_query, given.query, d_by_query, given.query_table)
        d_key_table = offsets.through_table(d_key, given.key, d_by_key, given.key_table)
        d_bias = None
        if self.bias is not None and wants["bias"]:
            d_bias = torch.empty_like(self.bias)
            seq, tile = self.sizes[2], self.tiles.query_gradient
            programs = self.bias.shape[:2].numel() * -(-seq // tile.queries) * -(-seq // tile.keys)
            outputs = (d_context, lse, delta, d_bias, self.heads, *pulls)
            self.launch(triton_kernels.bias_gradient_kernel, programs, outputs, tile)
        of_queries = d_by_query if wants["offset_bias"] else None
        d_offset_bias = offsets.through_offset_bias(of_queries, given.offset_bias, self.numbers[0])
        return d_query, d_key, d_value, d_query_table, d_key_table, d_bias, d_offset_bias

    def _blocks(self, block: int) -> int:
        batch, num_heads, seq = self.sizes
        return -(-seq // block) * batch * num_heads


class _TritonAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, attending: Attending, seed: Tensor | None, query, key, value, *tensors):  # type: ignore[override]
        plan, (query_table, key_table, bias, offset_bias) = plan_of(Facts.of(attending)), tensors
        vectors = (_by_token(query), _by_token(key), _by_token(value))
        filled = (plan.offsets.fill(query_table, query.dtype), plan.offsets.fill(key_table, query.dtype))
        given = Given(*vectors, *filled, bias, offset_bias, attending.document_ids, attending.heads, seed)
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
        wants = dict(zip(HEAD_DIMENSIONS, ctx.needs_input_grad[5:], strict=True))
        gradients = problem.backward(context, _by_token(d_context), lse, wants, pulls)
        return (None, None, *(None if x is None else x.transpose(1, 2) for x in gradients[:3]), *gradients[3:])


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
    query, key, value, _, _, _, dropout, *_ = attending
    seed = torch.randint(2**31, (1,), device=query.device) if dropout else None
    context, of_kernels = _TritonAttention.apply(attending, seed, query, key, value, *terms.tensors)
    return context, of_kernels if cosine is None else cosine
