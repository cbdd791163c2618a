"""Point-wise parts of a layer, compiled as a whole, and the devices that torch has code for.

The parts are the norms, and regions: functions of tensors and numbers. As separate torch operations, dropout, residual
sum and LayerNorm are three kernels forward and three backward, each of which reads and writes all hidden states; the
gradient of a bias before a GELU reads them once more. With `--compile`, `torch.compile` fuses them. Each parameter is
used in the call of its own module, so ZeRO 3 can gather it and tensor parallelism can cut it.

Compiled dropout also draws from torch's generator, so recomputed layers and resumed runs repeat its draws. Its draws
differ from those of dropout without compilation.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import shutil
import sysconfig
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron_ddrp.config import ModelConfig
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError


def normalise(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, is_rms: bool) -> Tensor:
    """Return LayerNorm(x) over the last dimension, or RMSNorm (Zhang and Sennrich, arXiv:1910.07467, eq. 4).

    RMSNorm divides by √(mean of squares + eps) and subtracts no mean.
    """
    if is_rms:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.layer_norm(x, weight.shape, weight, bias, eps)


class Norm(nn.LayerNorm):
    """LayerNorm with or without a bias (`--bias`, `--norm-bias`), or RMSNorm, which has none (`--norm`)."""

    def __init__(self, width: int, config: ModelConfig) -> None:
        self.is_rms = config.norm == "rmsnorm"
        super().__init__(width, eps=config.layernorm_epsilon, bias=config.biased_norms and not self.is_rms)

    def forward(self, x: Tensor) -> Tensor:
        return normalise(x, self.weight, self.bias, self.eps, self.is_rms)


LOWEST_CAPABILITY = (8, 0)
"""Lowest compute capability for which `auto` compiles: Triton 3.9 generates no code for V100."""


def add(hidden: Tensor, added: Tensor, dropout: float) -> Tensor:
    """Return hidden + dropout(added); both are `[tokens, hidden]`, as in every region."""
    return hidden + F.dropout(added, dropout)


def add_norm(hidden: Tensor, added: Tensor, dropout: float, *norm: Any) -> Tensor:
    """Return the norm of hidden + dropout(added); `norm` holds the arguments of `normalise` after the first."""
    return normalise(add(hidden, added, dropout), *norm)


def add_and_norm(hidden: Tensor, added: Tensor, dropout: float, *norm: Any) -> tuple[Tensor, Tensor]:
    """Return hidden + dropout(added) and its norm."""
    total = add(hidden, added, dropout)
    return total, normalise(total, *norm)


def bias_gelu(states: Tensor, bias: Tensor | None) -> Tensor:
    """Return GELU(states + bias)."""
    return F.gelu(states if bias is None else states + bias)


def gated_gelu(states: Tensor, gates: Tensor) -> Tensor:
    """Return GELU(states) ⊙ gates (GEGLU, Shazeer, arXiv:2002.05202, eq. 5)."""
    return F.gelu(states) * gates


def gated_silu(states: Tensor, gates: Tensor) -> Tensor:
    """Return SiLU(states) ⊙ gates (SwiGLU, Shazeer, arXiv:2002.05202, eq. 5)."""
    return F.silu(states) * gates


_NUMBERS = itertools.count(1)


@cache
def own_copy(region: Any, *fixed: Any) -> Callable[..., Any]:
    """Return a copy of a region for the modules that agree in `fixed`: one per process.

    torch compiles at most 8 variants of one code object. Widths, dtypes and rates of dropout would use them up; the
    token count of 1, autocast and the gradient mode remain.
    """
    name = f"{region.__name__}_{next(_NUMBERS)}"  # torch remembers varying sizes by name
    return FunctionType(region.__code__.replace(co_name=name), region.__globals__, name, closure=region.__closure__)


@cache
def compile_region(region: Callable[..., Any]) -> Callable[..., Any]:
    """Return the compiled form of a region, one per process. Beyond torch's limit, further variants run plainly."""
    return torch.compile(region)


def run_compiled(region: Callable[..., Any], states: tuple[Tensor, ...], *others: Any) -> Any:
    """Run a compiled region: `states` `[.., width]` enter as `[tokens, width]`; the results have the shape of `states`.

    The number of tokens is dynamic in the compiled code, so rows of every length share it.
    """
    flat = [x.flatten(0, -2) for x in states]
    for x in flat:
        torch._dynamo.maybe_mark_dynamic(x, 0)
    arguments = (*flat, *others)
    fixed = ((x.device, x.dtype, x.shape[-1]) if isinstance(x, Tensor) else x for x in arguments)
    results = compile_region(own_copy(region, *fixed))(*arguments)
    if isinstance(results, tuple):
        return tuple(x.view(states[0].shape) for x in results)
    return results.view(states[0].shape)


class ResidualNorm(Norm):
    """A norm that can also add a block's output to the residual stream; both then run as one compiled region."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.hidden_size, config)
        self.region: Callable[..., Any] = add_norm if config.layernorm_position == "post" else add_and_norm

    def forward(self, hidden: Tensor, added: Tensor | None = None, dropout: float = 0.0) -> Any:
        """Return the norm of `hidden`; with `added`, return `add_norm` (post-LN) or `add_and_norm` (pre-LN)."""
        if added is None:
            return super().forward(hidden)
        norm = (self.weight, self.bias, self.eps, self.is_rms)
        return run_compiled(self.region, (hidden, added), dropout, *norm)


class GeluLinear(nn.Linear):
    """A linear map that can include the GELU after it; the GELU is then compiled together with the bias."""

    def forward(self, x: Tensor, gelu: bool = False) -> Any:
        """Return the map of `x`; with `gelu` return (`x` for later readers, GELU of the map)."""
        if not gelu:
            return super().forward(x)
        x, product = self.product(x)
        return x, run_compiled(bias_gelu, (product,), self.bias)

    def product(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return `x` for later readers, and its map without the bias. Tensor parallelism overrides this."""
        return maps_of(x, (self,), with_bias=False)


class _Maps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, *weights_and_biases: Any):  # type: ignore[override]
        weights, biases = weights_and_biases[::2], weights_and_biases[1::2]
        ctx.has_bias = [bias is not None for bias in biases]
        ctx.save_for_backward(x, *weights)
        ctx.set_materialize_grads(False)
        return (x.view_as(x), *(F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)))

    @staticmethod
    @once_differentiable
    def backward(ctx, of_readers: Tensor | None, *gradients: Tensor | None):  # type: ignore[override]
        x, *weights = ctx.saved_tensors
        # HCD can be the only reader of a last layer; the values then have no gradient.
        flat = [None if gradient is None else gradient.flatten(0, -2) for gradient in gradients]  # [tokens, out] each
        of_x = gradient_of_input(None if of_readers is None else of_readers.flatten(0, -2), flat, weights)
        of_parameters = gradients_of_parameters(x.flatten(0, -2), flat, ctx.has_bias)
        return None if of_x is None else of_x.view_as(x), *of_parameters


def gradient_of_input(
    of_readers: Tensor | None, gradients: Sequence[Tensor | None], weights: Sequence[Tensor]
) -> Tensor | None:
    """Return the gradient `[tokens, in]` of an input that some maps and other readers share.

    `of_readers` `[tokens, in]` is the other readers' gradient and is not modified; `gradients` `[tokens, out]` are
    those of the maps' outputs.
    """
    total = of_readers
    for gradient, weight in zip(gradients, weights, strict=True):
        if gradient is None:
            continue
        if total is None:
            total = gradient @ weight
        elif total is of_readers:
            total = torch.addmm(total, gradient, weight)
        else:
            total.addmm_(gradient, weight)
    return total


def gradients_of_parameters(
    tokens: Tensor, gradients: Sequence[Tensor | None], has_bias: Sequence[bool]
) -> list[Tensor | None]:
    """Return the gradients of each map's weight and bias in turn; `tokens` `[tokens, in]` is the maps' input."""
    found: list[Tensor | None] = []
    for gradient, biased in zip(gradients, has_bias, strict=True):
        found.append(None if gradient is None else gradient.T @ tokens)
        found.append(gradient.sum(0) if gradient is not None and biased else None)
    return found


def maps_of(x: Tensor, maps: Sequence[nn.Linear], with_bias: bool = True) -> tuple[Tensor, ...]:
    """Return `x` `[.., in]` for later readers, and its linear maps `[.., out]`, with or without their biases.

    All gradients of `x` accumulate inside the maps' matrix products; separate sums would read and write them again.
    """
    parameters = [parameter for each in maps for parameter in (each.weight, each.bias if with_bias else None)]
    if any(hasattr(each.weight, "ds_id") for each in maps):  # ZeRO 3 gathers weights only for a module's own call
        if with_bias:
            return (x, *(each(x) for each in maps))
        return (x, *(F.linear(x, each.weight) for each in maps))
    return _Maps.apply(x, *parameters)


def is_nvidia(device: torch.device) -> bool:
    """Return whether a device is a GPU of NVIDIA's; AMD's are "cuda" to torch too."""
    return device.type == "cuda" and torch.version.hip is None


def why_not_compile(device: torch.device) -> str | None:
    """Return the reason why layers cannot be compiled for a device, in one line, or None if they can."""
    if device.type == "cuda":
        missing = missing_for_triton()
        return f"compiling for a GPU needs {missing}: use --compile off" if missing else None
    compiler = os.environ.get("CXX") or "g++"
    if shutil.which(compiler) is None:
        return f"compiling for {device.type} needs a C++ compiler, {compiler} is not found: use --compile off"
    return None


@cache
def compiles(setting: str, device: torch.device) -> bool:
    """Return whether `--compile` compiles layers on a device; `auto` does so on GPUs that Triton supports."""
    if setting != "auto":
        return setting == "on"
    if device.type != "cuda" or why_not_compile(device):
        return False
    return torch.cuda.get_device_capability(device) >= LOWEST_CAPABILITY


@cache
def missing_for_triton() -> str | None:
    """Return what Triton lacks on this machine, as the object of "needs", or None if it can compile.

    Triton builds its launcher with a C compiler and Python's headers at the first use. The disk is searched once: every
    layer asks in every forward pass.
    """
    if importlib.util.find_spec("triton") is None:
        return "the package triton, which torch installs for CUDA"
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not (is_interpreted or os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "a C compiler, and neither gcc nor clang is found (install one or set CC)"
    if not (is_interpreted or (_headers() / "Python.h").is_file()):
        return f"Python.h, which is not in {_headers()} (install python3-dev, or use a Python that has it)"
    return None


def _headers() -> Path:
    """Return the folder where Triton looks for Python's headers, also in Debian's Python."""
    scheme = sysconfig.get_default_scheme()
    return Path(sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"])


def named_device(device: str | torch.device | None = None, label: str = "") -> torch.device:
    """Return the device of an argument, by default the GPU if torch sees one, else the CPU.

    Raises `UserError`, which begins with `label`, if torch does not know, see or have code for it.
    """
    count, advice = torch.cuda.device_count(), "leave it out, or give cpu"
    try:
        chosen = torch.device(("cuda" if count else "cpu") if device is None else device)
    except (RuntimeError, TypeError):
        wanted = "expected cpu, cuda, or cuda:N for the GPU with number N"
        raise UserError(f"{label}: {wanted}", WRONG_ARGUMENTS) from None
    if chosen.type == "cuda" and (chosen.index or 0) >= count:
        raise UserError(f"{label}: torch sees {count or 'no'} GPU{'s' * (count > 1)} here; {advice}", WRONG_ARGUMENTS)
    try:
        torch.zeros(1, device=usable(chosen)).item()  # fails on "meta", which holds no numbers
    except (RuntimeError, AssertionError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"{label}: torch cannot compute on it here; {advice} ({reason})", WRONG_ARGUMENTS) from None
    return chosen


def usable(device: torch.device) -> torch.device:
    """Return `device`. Raises `UserError` if it is a GPU that this build of torch has no code for."""
    if fault := missing_code(device):
        error = UserError(f"{fault}, or set CUDA_VISIBLE_DEVICES= to use the CPU")
        gpus = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
        error.agreed = len(gpus) > 1 and all(map(missing_code, gpus))  # then all ranks of this host raise it
        raise error
    return device


def missing_code(device: torch.device) -> str | None:
    """Return a line about a GPU of NVIDIA's for which torch has no code, with the build that has it; None otherwise.

    Builds with CUDA 13 have code for 7.5 and newer, those with CUDA 12.6, which torch 2.15 ended, for 5.0 to 9.0.
    """
    built = torch.cuda.get_arch_list() if is_nvidia(device) else []
    if not built or any(_runs_on(torch.cuda.get_device_capability(device), target) for target in built):
        return None
    capability = torch.cuda.get_device_capability(device)
    old = "torch==2.13.0+cu126 --index-url https://download.pytorch.org/whl/cu126"
    return (
        f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}, and torch "
        f"{torch.__version__} has code for {', '.join(built)} only: pip install "
        f"{'--upgrade torch' if capability >= (7, 5) else old}"
    )


def _runs_on(capability: tuple[int, int], target: str) -> bool:
    """Return whether code that was compiled for `target` runs on a GPU.

    sm_80 runs on 8.0 and 8.6, compute_80 also on all later ones; with "f" both run on the later minor numbers alone,
    with "a" on no other GPU (NVIDIA, CUDA C++ Programming Guide, "Compute capabilities").
    """
    own = divmod(int(re.sub(r"\D", "", target) or 0), 10)
    runs_later = capability[0] == own[0] or (target.startswith("compute_") and not target.endswith("f"))
    return capability == own or (capability > own and runs_later and not target.endswith("a"))
