"""Memory of this process: keep what it freed for the next tensor or give it back, and read how much it took at most."""

from __future__ import annotations

import ctypes
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
"""Bytes from which on a tensor has a mapping of its own under `return_freed_memory`."""


def keep_freed_memory() -> None:
    """Stop giving freed memory back to the system from here on; without effect where malloc is not glibc's.

    A training step on a CPU frees and takes the same large tensors over and over. glibc maps each of them anew, and
    every page of a fresh mapping is a page fault and 4 KiB of zeros (`docs/benchmarks.md` has what that costs). The
    process's peak stays about what it was; between peaks it keeps what it had.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(M_MMAP_MAX, 0)
    mallopt(M_TRIM_THRESHOLD, NEVER)
    mallopt(M_TOP_PAD, GROWTH)


def return_freed_memory() -> None:
    """Give the memory of freed tensors back to the system at once from here on; without effect where malloc is not
    glibc's.

    The resident size is then that of the tensors in use, to a tenth of a MiB the same in every process. Otherwise it
    holds what the heap keeps, which differs by tens of MiB from one process to the next.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, SMALL)


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory that tensors took on a GPU so far; on a CPU the largest resident size of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_peak_resident_bytes() -> int | None:
    """Forget the largest resident size of this process so far, and return the present one; None where Linux's /proc is
    missing.

    Unlike `getrusage`, whose peak is never reset and begins with that of the process before `exec`.
    """
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return None
    return _status_bytes("VmRSS")


def peak_resident_bytes() -> int:
    """Return the largest resident size of this process since `reset_peak_resident_bytes`."""
    return _status_bytes("VmHWM")


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
