"""The progress bar of every command that reads files."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from tqdm import tqdm

from megatron_ddrp.data.atomic import AnyPath

Advance = Callable[[int], object]
"""Function called with the number of bytes (or tokens) read since the last call, such as a progress bar's `update`."""


def silent(count: int) -> None:
    """Show no progress."""


def reading_progress(paths: Sequence[AnyPath], doing: str | None = None, show: bool = True) -> tqdm:
    """Return a progress bar on stderr over the bytes of the files as they lie on the disk, with the time left.

    `doing` stands in front of it; without `show` it is silent.
    """
    total = sum(map(os.path.getsize, paths)) if all(map(os.path.isfile, paths)) else None  # unknown for pipes
    return byte_progress(total, doing, show)


def byte_progress(total: int | None, doing: str | None = None, show: bool = True) -> tqdm:
    """Return a progress bar on stderr over `total` bytes. In a log file it appears for long runs only, and seldom."""
    seldom: dict[str, Any] = {} if sys.stderr.isatty() else {"delay": 10, "mininterval": 10}
    unit: dict[str, Any] = {"total": total, "unit": "B", "unit_scale": True}
    return tqdm(desc=doing, **unit, dynamic_ncols=True, leave=False, file=sys.stderr, disable=not show, **seldom)
