"""A GPU without memory: shapes, strides and types alone, so that whole training steps run on a CPU in moments.

It is a device of torch's `privateuseone` backend (`FakeTensorMode` refuses "cuda" in a backward pass where torch was
built without it). Kernels that cannot run there, torch's attention and our Triton kernels, have stubs that count.

Call `fake_device` before a process's first backward pass: autograd makes its threads for the devices it knows then. So
a test uses a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, wraps
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from counting import DEVICE_NAME, Counting, extent
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from megatron_ddrp.model.attention.gpu import triton_attention

TRITON_PRODUCTS = {
    "forward_kernel": 2,  # Q·Kᵀ, P·V
    "query_gradient_kernel": 3,  # Q·Kᵀ again, dO·Vᵀ, dA·K
    "key_gradient_kernel": 4,  # both again, dAᵀ·Q, Pᵀ·dO
    "bias_gradient_kernel": 2,  # both again
    "compare_kernel": 1,  # Q·Kᵀ for the sum of heads (three and more heads are multiplied once more)
    "pull_kernel": 1,  # Q·Kᵀ
}
"""Triton kernel → its products of `[seq, head_dim]` and `[head_dim, seq]` per head."""

OF_SOME_HEADS = {"compare_kernel", "pull_kernel"}
"""HCD's kernels: of the first `INPUTS_OF_HEADS` tensors they touch the compared heads alone."""
INPUTS_OF_HEADS = 5


@cache
def fake_device() -> torch.device:
    """Register the device, once per process, and return it."""
    _setup_privateuseone_for_python_backend(DEVICE_NAME)
    return torch.device(DEVICE_NAME, 0)


def on_device(module: nn.Module, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Give a module of the meta device fake parameters and buffers in `dtype`; call it in `FakeTensorMode`.

    `Module.to` cannot: it swaps tensors, which fakes refuse. Parameters that were one stay one.
    """
    made: dict[Tensor, Any] = {}

    def fake(x: Tensor) -> Tensor:
        return torch.empty(x.shape, dtype=dtype if x.is_floating_point() else x.dtype, device=device)

    for part in module.modules():
        for name, parameter in list(part._parameters.items()):
            if parameter is not None:
                part._parameters[name] = made.setdefault(parameter, nn.Parameter(fake(parameter)))
        for name, buffer in list(part._buffers.items()):
            if buffer is not None:
                part._buffers[name] = made.setdefault(buffer, fake(buffer))
    return module


@cache
def fake_tensors() -> FakeTensorMode:
    """Return the process's one mode of fake tensors: tensors that the package caches have to be of the same."""
    return FakeTensorMode(allow_non_fake_inputs=False)


@contextmanager
def gpu_kernels() -> Iterator[None]:
    """Let the package take its GPU paths, with stubs that count in the place of kernels.

    torch's attention is the flash kernel without a mask in half precision, else the efficient kernel, as on an A100.
    Our Triton kernels are patched where they are launched; what `torch.compile` is given counts as one launch, since
    its compiler makes no code for this device.
    """
    is_cuda = property(lambda tensor: tensor.device.type == DEVICE_NAME)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(FakeTensor, "is_cuda", is_cuda))
        stack.enter_context(mock.patch.object(F, "scaled_dot_product_attention", _sdpa))
        stack.enter_context(mock.patch.object(triton_attention, "why_not_triton", lambda *_: None))
        stack.enter_context(mock.patch.object(triton_attention, "launch", _launch_triton))
        stack.enter_context(mock.patch.object(torch, "compile", lambda function, **_: counted_as_one(function)))
        yield


def _active() -> Counting:
    assert Counting.active is not None, "a kernel's stub outside of `Counting`"
    return Counting.active


def _launch_triton(kernel: Any, programs: int, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    """Stand in for `plan.launch`: one launch that touches each of its tensors once."""
    name = kernel.fn.__name__
    (batch, seq, heads, head_dim), share = arguments[0].shape, 1.0
    if name in OF_SOME_HEADS:
        share = constants["COUNT"] / heads
    touched = {
        id(x): extent(x) * (share if place < INPUTS_OF_HEADS else 1)
        for place, x in enumerate(arguments)
        if isinstance(x, Tensor)
    }
    flop = TRITON_PRODUCTS[name] * share * heads * 2 * batch * seq * seq * head_dim
    _active().add(name, round(sum(touched.values())), round(flop), "attention")


def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Call the kernels that `scaled_dot_product_attention` chooses on a GPU, with what it does to a mask before."""
    if attn_mask is None and query.dtype != torch.float32:
        return torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask.logical_not(), float("-inf"))
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
    )[0]


def counted_as_one(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` as a compiler would leave it: one launch forward, one backward.

    Their bytes are those of the tensors among its arguments and results; the backward pass reads the arguments and
    the results' gradients and writes the arguments' gradients. Parameters have to be arguments.
    """
    name = getattr(function, "__name__", type(function).__name__)

    @wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = tree_flatten((args, kwargs))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

        def call(*tensors: Tensor) -> Any:
            filled = list(leaves)
            for place, tensor in zip(places, tensors, strict=True):
                filled[place] = tensor
            again, more = tree_unflatten(filled, structure)
            return function(*again, **more)

        return _AsOne.apply(call, name, *(leaves[place] for place in places))

    return counted


class _AsOne(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, name, *tensors):  # type: ignore[override]
        counting = _active()
        with counting.paused(), torch.enable_grad():
            own = [x.detach().requires_grad_(x.requires_grad) for x in tensors]
            result = call(*own)
        outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        ctx.name, ctx.own, ctx.outputs = name, own, outputs
        counting.add(name, sum(map(extent, (*own, *outputs))))
        with counting.paused():
            leaves, structure = tree_flatten(result)
            return tree_unflatten([x.detach() if isinstance(x, Tensor) else x for x in leaves], structure)

    @staticmethod
    def backward(ctx, *gradients):  # type: ignore[override]
        counting, wanted = _active(), [x for x in ctx.own if x.requires_grad]
        pairs = zip(ctx.outputs, gradients, strict=True)
        given = {x: gradient for x, gradient in pairs if gradient is not None and x.requires_grad}
        with counting.paused():
            found = iter(torch.autograd.grad(list(given), wanted, list(given.values()), allow_unused=True))
            per_input = [next(found) if x.requires_grad else None for x in ctx.own]
        touched = (*ctx.own, *given.values(), *(g for g in per_input if g is not None))
        counting.add(f"{ctx.name} backward", sum(map(extent, touched)))
        return (None, None, *per_input)
