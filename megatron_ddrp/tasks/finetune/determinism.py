"""Deterministic operators of torch on GPUs, so that a run repeats bit for bit; where torch has none, a line says so."""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from tqdm import tqdm

T = TypeVar("T")

_ALERT = re.compile(r"(\w+) does not have a deterministic implementation|not deterministic because it uses (CuBLAS)")
"""Torch's errors about an operator without a deterministic form; the second is about `CUBLAS_WORKSPACE_CONFIG`."""


def fix_workspace() -> None:
    """Give cuBLAS a workspace of a fixed size, without which its products are not deterministic.

    Call this before a process's first product of matrices on a GPU, which is when the variable is read. A user's value
    stays.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Let torch use deterministic operators alone on a GPU, and put its settings back afterwards.

    On a CPU nothing changes: its operators of training are deterministic at one number of threads.
    """
    if device.type != "cuda":
        yield
        return
    switches: Any = torch.utils.deterministic
    mode, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fills = switches.fill_uninitialized_memory
    # Under warn_only, attention would keep its backward passes with atomic additions.
    torch.use_deterministic_algorithms(True, warn_only=False)
    switches.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode, warn_only=warns)
        switches.fill_uninitialized_memory = fills


def with_fallback(compute: Callable[[], T]) -> T:
    """Return `compute()`; at an operator without a deterministic form say so, allow it, and call `compute` again.

    Such operators are then allowed until `deterministic` ends. What a call of `compute` did must not change the next.
    """
    try:
        return compute()
    except RuntimeError as error:
        alert = _ALERT.search(str(error))
        if alert is None:
            raise
        _tell(alert[1] or f"{alert[2]}, with this CUBLAS_WORKSPACE_CONFIG,")
    torch.use_deterministic_algorithms(True, warn_only=True)
    return compute()


@functools.cache
def _tell(operator: str) -> None:
    """Name an operator without a deterministic form, once per process, above the bar of a terminal."""
    (tqdm.write if sys.stderr.isatty() else print)(
        f"warning: torch's {operator} has no deterministic form on this device: results may differ between runs of "
        "one seed",
        file=sys.stderr,
    )
