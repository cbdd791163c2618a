"""Keep freed memory of the host for the next tensor."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
"""glibc's numbers for `mallopt(3)`."""

NEVER = 2**31 - 1
GROWTH = 64 * 2**20


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
