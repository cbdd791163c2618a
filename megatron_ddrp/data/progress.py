"""The progress bar of every command, and work done ahead of its use by threads or processes, with results in order."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from tqdm import tqdm

from megatron_ddrp.data.atomic import AnyPath
from megatron_ddrp.errors import FAILURE, UserError

T = TypeVar("T")
Work = Callable[[Any], Any]
"""Function that makes the result of one item."""


def progress(
    unit: str, total: int | None = None, doing: str | None = None, show: bool = True, scale: bool = False
) -> tqdm:
    """Return a progress bar on stderr, with the time left where `total` is known.

    In a log file it appears for long runs only, and updates every 10 seconds. `doing` stands in front of it; without
    `show` it is silent; with `scale` large numbers are shortened.
    """
    seldom: dict[str, Any] = {} if sys.stderr.isatty() else {"delay": 10, "mininterval": 10}
    how: dict[str, Any] = {"unit": unit, "unit_scale": scale, "disable": not show, **seldom}
    return tqdm(desc=doing, total=total, dynamic_ncols=True, leave=False, file=sys.stderr, **how)


def show_phase(bar: tqdm, words: str) -> None:
    """Put words in front of a full bar: what goes on behind it. In a log file they appear in long runs only."""
    is_shown = not bar.disable and bar.format_dict["elapsed"] >= bar.delay
    bar.set_description(words, refresh=is_shown)


def reading_progress(paths: Sequence[AnyPath], doing: str | None = None) -> tqdm:
    """Return a progress bar over the bytes of the files on disk."""
    total = sum(map(os.path.getsize, paths)) if all(map(os.path.isfile, paths)) else None  # unknown for pipes
    return progress("B", total, doing, scale=True)


def track(items: Sequence[T], unit: str, doing: str | None = None) -> Iterator[T]:
    """Yield the items under a progress bar."""
    with progress(unit, len(items), doing) as bar:
        for item in items:
            yield item
            bar.update()


def results_in_order(executor: Executor, function: Work, items: Iterable[T], ahead: int) -> Generator[Any, None, None]:
    """Yield `function(item)` for every item, in order, with at most `ahead` more of them in progress.

    An error of the function is raised here, at its item. Stopping early (`close()`, or leaving the loop) drops the
    rest. The executor ends with the iteration.
    """
    pending: deque[Future[Any]] = deque()
    try:
        for item in items:
            pending.append(executor.submit(function, item))
            if len(pending) > ahead:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


AHEAD = 4
"""Chunks in progress per worker: enough to keep it busy, few enough to bound memory."""


def map_in_order(
    make: Callable[[Any], Work], settings: Any, made: Work, chunks: Iterable[Any], workers: int
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
    end_with_parent()


def end_with_parent() -> None:
    """Let this worker end when the main process ends: a killed main process cannot stop its workers."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(FAILURE)

    threading.Thread(target=wait, daemon=True).start()


@functools.lru_cache(maxsize=1)
def _make_once(make: Callable[[Any], Work], settings: Any) -> Work:
    return make(settings)


def _apply(make: Callable[[Any], Work], settings: Any, chunk: Any) -> Any:
    return _make_once(make, settings)(chunk)
