"""The device of the GPU report: its name and versions, and memory in use. Every call of torch.cuda stands here.

Without a CUDA device the same functions serve a trial on the CPU (`gpu_report.py --tiny`), where memory is not counted.
"""

from __future__ import annotations

import gc
import importlib.metadata
import platform
import subprocess
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from measure import DEVICE

from megatron_ddrp.engine.device import precision_fault

HAS_GPU = DEVICE.type == "cuda"
PACKAGES = ("torch", "triton", "deepspeed", "transformers", "flash-attn", "flashdeberta", "disentangled-flash")
"""PyPI packages whose versions belong into the report."""

GIB = 2**30
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def describe_machine() -> dict[str, str]:
    """Return what a reader of the timings must know: device, driver and versions, "none" for what is missing."""
    described = {"device": device_name(), "python": platform.python_version(), "driver": driver_version()}
    if HAS_GPU:
        properties = torch.cuda.get_device_properties(DEVICE)
        described["compute capability"] = f"{properties.major}.{properties.minor}"
        described["memory"] = f"{properties.total_memory / GIB:.1f} GiB"
        described["devices"] = str(torch.cuda.device_count())
    described["precision"] = precision()
    described["CUDA of torch"] = torch.version.cuda or "none"
    return described | {name: package_version(name) for name in PACKAGES}


def device_name() -> str:
    """Return the device's name as its maker gives it."""
    return torch.cuda.get_device_name(DEVICE) if HAS_GPU else f"{platform.machine()} CPU"


def precision() -> str:
    """Return "bf16" where the device computes in it, else "fp16"."""
    return "fp16" if precision_fault("bf16", DEVICE) else "bf16"


def package_version(name: str) -> str:
    """Return the installed version of a PyPI package, or "none"."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def driver_version() -> str:
    """Return the version of NVIDIA's driver, or "none" where `nvidia-smi` gives none."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return "none"
    lines = answer.stdout.splitlines() if answer.returncode == 0 else []
    return lines[0].strip() if lines else "none"


def start_peak() -> int:
    """Begin to record the peak of memory in use; return the bytes in use now."""
    if not HAS_GPU:
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def peak_gib(before: int) -> float | None:
    """Return the peak since `start_peak` above `before` bytes, in GiB; None without a GPU."""
    return (torch.cuda.max_memory_allocated() - before) / GIB if HAS_GPU else None


def release_memory() -> None:
    """Give the memory of deleted models back to the device."""
    gc.collect()
    if HAS_GPU:
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


def waits_during(run: Callable[[], object]) -> list[str]:
    """Return where in Python `run()` waits for the device, one `FILE:LINE` per wait that CUDA knows of."""
    if not HAS_GPU:
        run()
        return []
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = (warning for warning in found if "called a synchronizing" in str(warning.message))
    return [f"{Path(warning.filename).name}:{warning.lineno}" for warning in waits]
