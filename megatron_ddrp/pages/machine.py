"""Hardware and package versions, as recorded in pages and in finished jobs."""

from __future__ import annotations

import os
import platform
from functools import lru_cache
from importlib import metadata
from pathlib import Path

PACKAGES = ("megatron-ddrp", "torch", "deepspeed", "numpy", "tokenizers", "transformers", "scipy")


@lru_cache(maxsize=1)
def gpu_names() -> tuple[str, ...]:
    """Return the names of the GPUs that torch sees."""
    import torch

    return tuple(torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count()))


@lru_cache(maxsize=1)
def hardware() -> str:
    """Return a description of this machine, such as `2 x Some GPU, 16 cores of Some CPU with AVX512`.

    The vector instructions of a CPU change its speed and the last bits of its results.
    """
    import torch

    gpus = gpu_names()
    counted = [f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)]
    vectors = torch.backends.cpu.get_cpu_capability()
    with_vectors = "" if vectors == "DEFAULT" else f" with {vectors}"
    return ", ".join([*counted, f"{os.cpu_count()} cores of {_cpu_name()}{with_vectors}"])


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


@lru_cache(maxsize=1)
def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that affect results."""
    found = {"Python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
