"""A function mapped over chunks by several processes, with results in order and bounded memory."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from megatron_ddrp.data.progress import results_in_order
from megatron_ddrp.errors import UserError

AHEAD = 4
"""Chunks in progress per worker: enough to keep it busy, few enough to bound memory."""


def map_in_order(
    make: Callable[[Any], Callable[[Any], Any]],
    settings: Any,
    made: Callable[[Any], Any],
    chunks: Iterable[Any],
    workers: int,
) -> Iterator[Any]:
    """Yield `made(chunk)` for every chunk, in order. Several `workers` each call `make(settings)` instead.

    `make` and the hashable `settings` must pickle. Raises `UserError` if a worker dies.
    """
    if workers == 1:
        yield from map(made, chunks)
        return
    context = multiprocessing.get_context("spawn")  # safe beside threads, and the same on every platform
    pool = ProcessPoolExecutor(workers, context, _start_worker)
    apply = functools.partial(_apply, make, settings)
    try:
        yield from results_in_order(pool, apply, chunks, AHEAD * workers - 1)
    except BrokenProcessPool:
        raise UserError("a worker process died, probably out of memory; try fewer --workers") from None


def _start_worker() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # the main process handles them
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this worker when the main process ends: a killed main process cannot stop its workers."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@functools.lru_cache(maxsize=1)
def _made(make: Callable[[Any], Callable[[Any], Any]], settings: Any) -> Callable[[Any], Any]:
    return make(settings)


def _apply(make: Callable[[Any], Callable[[Any], Any]], settings: Any, chunk: Any) -> Any:
    return _made(make, settings)(chunk)
