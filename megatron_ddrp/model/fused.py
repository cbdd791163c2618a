"""The point-wise parts of a layer as regions: functions of tensors and numbers, each compiled into one kernel each way.

Written as torch's operations, dropout, residual sum and LayerNorm are three kernels forward and three backward, each of
which reads and writes whole hidden states. `torch.compile` makes one of them, and `--compile` decides whether it is
asked. The modules keep their parameters: whatever gathers or cuts these sees the same modules called.

Dropout draws from torch's generator of the device, compiled or not, so recomputed layers and resumed runs repeat it;
the numbers that it draws differ between the two.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_ddrp.config import ModelConfig

LOWEST_CAPABILITY = (8, 0)
"""Compute capability from which `auto` compiles: Triton 3.9 makes no code for V100."""


def add(hidden: Tensor, added: Tensor, dropout: float) -> Tensor:
    """Return hidden + dropout(added); both `[tokens, hidden]`, as in every region."""
    return hidden + F.dropout(added, dropout)


def add_norm(hidden: Tensor, added: Tensor, weight: Tensor, bias: Tensor, eps: float, dropout: float) -> Tensor:
    """Return LayerNorm(hidden + dropout(added))."""
    return F.layer_norm(add(hidden, added, dropout), weight.shape, weight, bias, eps)


def add_and_norm(
    hidden: Tensor, added: Tensor, weight: Tensor, bias: Tensor, eps: float, dropout: float
) -> tuple[Tensor, Tensor]:
    """Return hidden + dropout(added) and its LayerNorm."""
    total = add(hidden, added, dropout)
    return total, F.layer_norm(total, weight.shape, weight, bias, eps)


def sum_of_three(first: Tensor, second: Tensor, third: Tensor) -> Tensor:
    """Return the sum of three tensors."""
    return first + second + third


@cache
def compiled(region: Callable[..., Any]) -> Callable[..., Any]:
    """Return the compiled form of a region, one per process; a break in its graph is an error."""
    return torch.compile(region, fullgraph=True)


def run_compiled(region: Callable[..., Any], states: tuple[Tensor, ...], *others: Any) -> Any:
    """Run a region compiled: `states` `[.., hidden]` go in as `[tokens, hidden]`; its results have their shape.

    The number of tokens is a variable of the compiled code, so rows of every length share it.
    """
    flat = [x.flatten(0, -2) for x in states]
    for x in flat:
        torch._dynamo.maybe_mark_dynamic(x, 0)
    results = compiled(region)(*flat, *others)
    if isinstance(results, tuple):
        return tuple(x.view(states[0].shape) for x in results)
    return results.view(states[0].shape)


class ResidualNorm(nn.LayerNorm):
    """A LayerNorm that also takes what a block adds to the residual stream, and then runs as one compiled region."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.hidden_size, eps=config.layernorm_epsilon)
        self.region: Callable[..., Any] = add_norm if config.layernorm_position == "post" else add_and_norm

    def forward(self, hidden: Tensor, added: Tensor | None = None, dropout: float = 0.0) -> Any:
        """Return LayerNorm(hidden); with `added` what `add_norm` returns, in a pre-LN model `add_and_norm`."""
        if added is None:
            return super().forward(hidden)
        return run_compiled(self.region, (hidden, added), self.weight, self.bias, self.eps, dropout)


class _ForThree(torch.autograd.Function):
    """Hands a tensor to three readers, whose gradients are summed in one pass instead of two."""

    @staticmethod
    def forward(ctx, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        return x.view_as(x), x.view_as(x), x.view_as(x)

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> Tensor:  # type: ignore[override]
        return run_compiled(sum_of_three, gradients)


def for_three(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return a tensor three times, for three readers whose gradients add up in one compiled pass."""
    return _ForThree.apply(x)


def why_not_compile(device: torch.device) -> str | None:
    """Say in one line why layers cannot be compiled for a device; None where they can."""
    if device.type == "cuda":
        if importlib.util.find_spec("triton") is None:
            return "compiling for a GPU needs the package triton, which torch brings along for CUDA: use --compile off"
        return None
    compiler = os.environ.get("CXX") or "g++"
    if shutil.which(compiler) is None:
        return f"compiling for {device.type} needs a C++ compiler, {compiler} is not found: use --compile off"
    return None


@cache
def compiles(setting: str, device: torch.device) -> bool:
    """Return whether `--compile` means to compile for a device: `auto` does on GPUs that Triton makes code for."""
    if setting != "auto":
        return setting == "on"
    if device.type != "cuda" or why_not_compile(device):
        return False
    return torch.cuda.get_device_capability(device) >= LOWEST_CAPABILITY
