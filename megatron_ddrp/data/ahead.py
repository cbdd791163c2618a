"""Work done ahead of its use by threads or processes, with the results in the order of the work."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Executor, Future
from typing import Any


def results_in_order(
    executor: Executor, function: Callable[[Any], Any], items: Iterable[Any], ahead: int
) -> Generator[Any, None, None]:
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
