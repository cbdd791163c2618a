"""A function of chunks mapped over processes, the results in the order of the chunks, with bounded memory."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from megatron_ddrp.errors import UserError

AHEAD = 4  # chunks per worker: enough to keep it busy, few enough to bound memory


def map_in_order(
    make: Callable[[Any], Callable[[Any], Any]],
    settings: Any,
    made: Callable[[Any], Any],
    chunks: Iterable[Any],
    workers: int,
) -> Iterator[Any]:
    """`made(chunk)` for every chunk, in order; with several `workers` each makes its own `make(settings)` once.

    `make` and the hashable `settings` must pickle. Raises `UserError` when a worker dies.
    """
    if workers == 1:
        yield from map(made, chunks)
        return
    context = multiprocessing.get_context("spawn")  # safe beside threads, and the same on every platform
    pool = ProcessPoolExecutor(workers, context, _start_worker)
    pending: deque[Future[Any]] = deque()
    try:
        for chunk in chunks:
            pending.append(pool.submit(_apply, make, settings, chunk))
            if len(pending) >= AHEAD * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool:
        raise UserError("a worker process died, likely for want of memory; try fewer --workers") from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _start_worker() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # which may reach the whole group, and are the main process's
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A main process that was killed cannot stop its workers: they see it end, and go."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@functools.lru_cache(maxsize=1)
def _made(make: Callable[[Any], Callable[[Any], Any]], settings: Any) -> Callable[[Any], Any]:
    return make(settings)


def _apply(make: Callable[[Any], Callable[[Any], Any]], settings: Any, chunk: Any) -> Any:
    return _made(make, settings)(chunk)
