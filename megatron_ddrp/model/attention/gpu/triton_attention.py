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
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_ddrp.model.attention.attending import Attending, Demand
from megatron_ddrp.model.attention.gpu.plan import Facts, KernelPlan, Offsets, Tile, launch, plan_of
from megatron_ddrp.model.attention.logits import tapped_cosine
from megatron_ddrp.model.fused import is_nvidia, missing_for_triton
from megatron_ddrp.model.positions.contract import HEAD_DIMENSIONS

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
