"""Triton's dispatch and DeepSpeed's settings for a GPU that is not there.

Triton's launches take their whole way in Python, and no kernel is run; DeepSpeed's engine trains on the CPU.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from megatron_ddrp.engine import build
from megatron_ddrp.engine.layout import Setup
from megatron_ddrp.model.attention.gpu import triton_attention


class Kernel:
    """A kernel that was compiled and does nothing."""

    function = 0
    packed_metadata = ()

    def launch_metadata(self, *_: Any) -> None: ...

    def run(self, *_: Any) -> None: ...


class Driver:
    """Triton's driver of an H100 that is not there."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


@contextmanager
def triton_without_gpu(compiled: Callable[[str, Any], object] = lambda name, signature: None) -> Iterator[None]:
    """Let Triton attention launch its kernels on nothing; `compiled(name, signature)` hears of each compilation."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    def compile_nothing(self: Any, key: Any, signature: Any, *_: Any, **__: Any) -> Kernel:
        compiled(self.fn.__name__, signature)
        return self.device_caches[0][0].setdefault(key, Kernel())

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(JITFunction, "_do_compile", compile_nothing))
        stack.enter_context(mock.patch.object(triton_attention, "capability_of", lambda _: (9, 0)))
        stack.enter_context(mock.patch.object(triton_attention, "why_not_device", lambda *_: None))
        driver.set_active(Driver())
        forget_compilations()
        try:
            yield
        finally:
            forget_compilations()
            driver._active = None


def forget_compilations() -> None:
    """Make Triton compile every attention kernel anew."""
    from megatron_ddrp.model.attention.gpu import triton_heads, triton_kernels

    for module in (triton_kernels, triton_heads):
        for value in vars(module).values():
            if hasattr(value, "device_caches"):
                value.device_caches.clear()


@contextmanager
def deepspeed_without_gpu() -> Iterator[None]:
    """Let DeepSpeed train on the CPU in any half precision, with the settings for a GPU."""
    from deepspeed.accelerator import get_accelerator

    settings, accelerator = build.deepspeed_settings, type(get_accelerator())
    half = [torch.float, torch.half, torch.bfloat16]

    def of_gpu(setup: Setup, parameters: int) -> dict[str, Any]:
        return settings(replace(setup, ranks=setup.ranks._replace(device=torch.device("cuda"))), parameters)

    with (
        mock.patch.object(build, "deepspeed_settings", of_gpu),
        mock.patch.object(accelerator, "is_fp16_supported", lambda _: True),
        mock.patch.object(accelerator, "supported_dtypes", lambda _: half),
        mock.patch.object(accelerator, "resolves_data_dependency", lambda _: False),
    ):
        yield
