"""The device of the GPU report: its name and versions, and memory in use. Every call of torch.cuda stands here.

Without a CUDA device the same functions serve a trial on the CPU (`gpu_report.py --tiny`), where memory is not counted.
"""

from __future__ import annotations

import gc
import importlib.metadata
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from measure import DEVICE
from torch.utils import collect_env

from megatron_ddrp.engine.build import precision_fault

HAS_GPU = DEVICE.type == "cuda"
PACKAGES = ("torch", "triton", "deepspeed", "transformers")
GIB = 2**30
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def describe_machine() -> dict[str, str]:
    """Return what a reader of the timings must know: device, driver and versions, "none" for what is missing."""
    described = {"device": device_name(), "python": platform.python_version(), "precision": precision()}
    if HAS_GPU:
        properties = torch.cuda.get_device_properties(DEVICE)
        described["compute capability"] = f"{properties.major}.{properties.minor}"
        described["memory"] = f"{properties.total_memory / GIB:.1f} GiB"
    described["driver"] = collect_env.get_nvidia_driver_version(collect_env.run) or "none"
    described["CUDA of torch"] = torch.version.cuda or "none"
    found = {package.name: package.version for package in importlib.metadata.distributions()}
    return described | {name: found.get(name, "none") for name in PACKAGES}


def device_name() -> str:
    """Return the device's name as its maker gives it."""
    return torch.cuda.get_device_name(DEVICE) if HAS_GPU else f"{platform.machine()} CPU"


def precision() -> str:
    """Return "bf16" where the device computes in it, else "fp16"."""
    return "fp16" if precision_fault("bf16", DEVICE) else "bf16"


@contextmanager
def peak_memory(row: dict[str, Any]) -> Iterator[None]:
    """Write the peak of the device's memory above that in use now into a row; give deleted models' memory back."""
    if HAS_GPU:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    yield
    gc.collect()
    if HAS_GPU:
        row["peak GiB"] = (torch.cuda.max_memory_allocated() - before) / GIB
        torch.cuda.empty_cache()


def wait_for_device() -> None:
    """Wait until the device has done all that it was given."""
    if HAS_GPU:
        torch.cuda.synchronize()


def kernel_seconds(run: Callable[[], object]) -> dict[str, float]:
    """Return kernel → seconds on the device during `run()`; nothing without a GPU."""
    if not HAS_GPU:
        run()
        return {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    events = (event for event in profile.key_averages() if not event.is_user_annotation)
    return {event.key: event.self_device_time_total / 1e6 for event in events if event.self_device_time_total > 0}
