"""Attention for GPUs without stored logits: flash attention with learned position terms, in Triton.

Computes the formula of `megatron_ddrp.model.attention.logits`. Torch computes P^q = Q·T^qᵀ and P^k = K·T^kᵀ outside the
kernels (`[h, b·s, rows]`, a fraction of a dense bias `[b, h, s, s]`), and their gradients T^q′ = P^q′ᵀQ, Q′ +=
P^q′·T^q; P is recomputed in the backward pass. The kernels read v `[h, rows]` in fp32. If v is learned, they also write
P^q′ when there is no table, since v′ = Σ P^q′/scale. Results repeat to the last bit.

Triton is imported at the first call, so the package works without it. Queries that may attend to nothing (padding)
output 0 and get no gradient.

Names: b = batch, h = heads, s = sequence, d = head size.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_ddrp.model.attention.attending import Attending, Demand
from megatron_ddrp.model.attention.gpu.launching import Tile, launch, tiles
from megatron_ddrp.model.attention.gpu.offsets import Offsets
from megatron_ddrp.model.attention.logits import tapped_cosine
from megatron_ddrp.model.positions.contract import HEAD_DIMENSIONS
from megatron_ddrp.model.triton_needs import missing_for_triton

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LARGEST_HEAD = 128
LOWEST_CAPABILITY = (8, 0)
DROPOUT_STEPS = 65536
"""Steps of the dropout rate, decided by 16 bits per pair: 0.1 acts as 6554/65536, and kept values are scaled to
match."""


def why_not_triton(demand: Demand) -> str | None:
    """Return the reason why this backend cannot run, in one line, or None if it can."""
    device, dtype, dropout, head_dim, _ = demand
    if missing := missing_for_triton():
        return f"triton attention needs {missing}: use another backend"
    if os.environ.get("TRITON_INTERPRET") != "1":
        if device.type != "cuda" or torch.version.hip:
            return f"triton attention needs an NVIDIA GPU, got {device.type}: use another backend"
        capability = torch.cuda.get_device_capability(device)
        if capability < LOWEST_CAPABILITY:
            got = ".".join(map(str, capability))
            return f"triton attention needs compute capability 8.0 (A100) or newer, this GPU has {got}: use sdpa"
    if dtype not in DTYPES:
        return f"triton attention takes bfloat16, float16 or float32, got {dtype}: use another backend".replace(
            "torch.", ""
        )
    if head_dim > LARGEST_HEAD:
        return f"triton attention takes heads up to {LARGEST_HEAD} wide, got {head_dim}: use sdpa"
    if dropout >= 1:
        return f"triton attention takes a dropout below 1, got {dropout}"
    return None


def _by_token(x: Tensor) -> Tensor:
    """Return `[b, h, s, d]` as contiguous `[b, s, h, d]`, the layout of the projections, so that nothing is copied."""
    return x.transpose(1, 2).contiguous()


def _next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


class _Problem:
    """Arguments that all kernels share, and the launches of the kernels."""

    def __init__(self, attending: Attending, seed: Tensor | None) -> None:
        """Prepare the arguments. Unlike elsewhere, queries, keys and values are contiguous `[b, s, h, d]`."""
        query, key, value, terms, document_ids, heads, dropout, *_ = attending
        batch, seq, num_heads, head_dim = query.shape
        window = None if attending.window is None or attending.window >= seq - 1 else attending.window
        self.offsets = offsets = Offsets(terms, query)
        self.tiles = tiles(query, terms, offsets.cover_all)
        reach = seq if window is None else self.tiles.largest + 2 * window
        self.query, self.key, self.value, self.terms = query, key, value, terms
        self.heads = heads if len(heads) else None
        self.query_table, self.key_table = offsets.fill(terms.query_table), offsets.fill(terms.key_table)
        self.by_query, self.by_key = offsets.products(query, self.query_table), offsets.products(key, self.key_table)
        self.bias = None if terms.bias is None else terms.bias.contiguous()
        by_offset = (self.by_query, self.by_key, offsets.offset_bias())
        leaves_band = window is None or window - min(-terms.lowest, terms.highest) >= self.tiles.smallest
        has_bins = any(x is not None for x in by_offset) and not offsets.cover_all
        drop_below = min(max(round(dropout * DROPOUT_STEPS), 1), DROPOUT_STEPS - 1)
        self.inputs = (query, key, value, *by_offset, self.bias, document_ids.contiguous(), seed)
        self.numbers = (terms.scale, drop_below)
        self.sizes = (batch, num_heads, seq)
        self.constants: dict[str, Any] = {
            "D": head_dim,
            "D_PAD": max(16, _next_power_of_2(head_dim)),
            "S_PAD": max(512, _next_power_of_2(min(seq, reach))),
            "TABLE_ROWS": offsets.rows,
            "LOWEST": offsets.lowest,
            "HIGHEST": offsets.highest,
            "WINDOW": window,
            "RUNS": 3 if has_bins and leaves_band else 1,
            "BIAS_BATCHED": self.bias is not None and self.bias.shape[0] > 1,
            "COUNT": len(heads),
            "COUNT_PAD": max(2, _next_power_of_2(len(heads))),
            # fp32 as three products on tensor cores is as exact as fp32; a single product keeps 10 bits.
            "PRECISION": "tf32x3" if query.dtype == torch.float32 else "tf32",
        }

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
        inputs, tile = (query, key, *of_terms, ids, self.terms.scale, self.heads), self.tiles.heads
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
        offsets, terms = self.offsets, self.terms
        d_by_query = offsets.empty() if self.by_query is not None or wants["offset_bias"] else None
        d_by_key = None if self.by_key is None else offsets.empty()
        outputs: tuple[Tensor | None, ...] = (context, d_context, lse, delta, d_query, d_by_query, self.heads, *pulls)
        tile = self.tiles.query_gradient
        self.launch(triton_kernels.query_gradient_kernel, self._blocks(tile.queries), outputs, tile)
        outputs, tile = (d_context, lse, delta, d_key, d_value, d_by_key, self.heads, *pulls), self.tiles.key_gradient
        self.launch(triton_kernels.key_gradient_kernel, self._blocks(tile.keys), outputs, tile)
        d_query_table = offsets.through_table(d_query, self.query, d_by_query, self.query_table, terms.query_table)
        d_key_table = offsets.through_table(d_key, self.key, d_by_key, self.key_table, terms.key_table)
        d_bias = None
        if self.bias is not None and wants["bias"]:
            d_bias = torch.empty_like(self.bias)
            seq, tile = self.sizes[2], self.tiles.query_gradient
            programs = self.bias.shape[:2].numel() * -(-seq // tile.queries) * -(-seq // tile.keys)
            outputs = (d_context, lse, delta, d_bias, self.heads, *pulls)
            self.launch(triton_kernels.bias_gradient_kernel, programs, outputs, tile)
        d_offset_bias = offsets.through_offset_bias(d_by_query) if wants["offset_bias"] else None
        return d_query, d_key, d_value, d_query_table, d_key_table, d_bias, d_offset_bias

    def _blocks(self, block: int) -> int:
        batch, num_heads, seq = self.sizes
        return -(-seq // block) * batch * num_heads


class _TritonAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, attending: Attending, seed: Tensor | None, query, key, value, *tensors):  # type: ignore[override]
        terms, document_ids, heads = attending.terms.with_tensors(tensors), attending.document_ids, attending.heads
        query, key, value = _by_token(query), _by_token(key), _by_token(value)
        problem = _Problem(attending._replace(query=query, key=key, value=value, terms=terms), seed)
        context, lse, squares = problem.forward()
        cosine = None
        of_heads: tuple[Tensor, ...] = ()
        if squares is not None:
            counted = squares.new_ones(len(query), 1) if attending.counted is None else attending.counted
            cosine, *rest = problem.compare(squares, counted)
            of_heads = (counted, *rest)
        ctx.save_for_backward(document_ids, seed, heads, context, lse, query, key, value, *tensors, *of_heads)
        ctx.terms, ctx.dropout = terms.with_tensors([None] * len(tensors)), attending.dropout
        ctx.window = attending.window
        return context.transpose(1, 2), cosine

    @staticmethod
    @once_differentiable
    def backward(ctx, d_context, d_cosine):  # type: ignore[override]
        document_ids, seed, heads, context, lse, query, key, value, *rest = ctx.saved_tensors
        tensors, of_heads = rest[: len(HEAD_DIMENSIONS)], rest[len(HEAD_DIMENSIONS) :]
        terms = ctx.terms.with_tensors(tensors)
        attending = Attending(query, key, value, terms, document_ids, heads, ctx.dropout, window=ctx.window)
        problem = _Problem(attending, seed)
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
