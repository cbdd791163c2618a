"""Memory of this process: keep or return freed memory, bound the kernels that are kept, and read the peak."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -2, -3, -4
"""glibc's numbers for `mallopt(3)`."""

NEVER = 2**31 - 1
GROWTH = 64 * 2**20
SMALL = 64 * 2**10
"""Size in bytes from which on a tensor has its own mapping under `return_freed_memory`."""

KEPT_KERNELS = 64
KERNEL_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""Environment variables of oneDNN, and of ideep, by which torch calls it."""


def keep_freed_memory() -> None:
    """Stop returning freed memory to the system; without effect if malloc is not glibc's.

    A training step on a CPU frees and allocates the same large tensors repeatedly. glibc maps each of them anew, and
    every page of a new mapping costs a page fault and 4 KiB of zeros (measured in `docs/lab/benchmarks.md`). The
    process's peak changes little; between peaks it keeps its memory.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(M_MMAP_MAX, 0)
    mallopt(M_TRIM_THRESHOLD, NEVER)
    mallopt(M_TOP_PAD, GROWTH)


def bound_kernel_caches() -> None:
    """Let oneDNN keep 64 kernels instead of 1,024, unless the environment names numbers; before its first kernel.

    In bf16 oneDNN writes a kernel for each shape of a product on a CPU, with about 2 MB, and the number of predicted
    tokens is a new shape in nearly every micro-batch. Writing one takes a quarter of a millisecond.
    """
    for name in KERNEL_CACHES:
        os.environ.setdefault(name, str(KEPT_KERNELS))


def return_freed_memory() -> None:
    """Return the memory of freed tensors to the system at once; without effect if malloc is not glibc's.

    The resident size is then that of the tensors in use, equal in every process to a tenth of a MiB. Otherwise it
    includes memory kept by the heap, which differs by tens of MiB between processes.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, SMALL)


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of tensors on a GPU so far; on a CPU the largest resident size of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_peak_resident_bytes() -> int | None:
    """Reset the peak resident size of this process and return the present size; None without Linux's /proc.

    The peak of `getrusage` cannot be reset and includes that of the process before `exec`.
    """
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return None
    return _status_bytes("VmRSS")


def peak_resident_bytes() -> int:
    """Return the peak resident size of this process since `reset_peak_resident_bytes`."""
    return _status_bytes("VmHWM")


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
