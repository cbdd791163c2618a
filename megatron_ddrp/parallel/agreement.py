"""Agreement of all ranks: one error for all of them, and the same settings and data on each."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from threading import Thread
from typing import Any, TypeVar

import torch.distributed as dist

from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError, shared_error

T = TypeVar("T")

PAUSE = 5.0
"""Most seconds between two collective calls of ranks of which one still works."""


def gather_objects(item: T) -> list[T]:
    """Return every rank's `item`, in the order of ranks; for small Python objects."""
    items: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(items, item)
    return items


def agree(action: Callable[[], T]) -> T:
    """Run `action` on every rank; if any rank raises a `UserError`, raise one on all of them, the same if one failed.

    The error names the host if other hosts do not fail. Without this, a rank that stops alone leaves the others waiting
    in their next collective call until the timeout.
    """
    result, own, message = None, None, None
    try:
        result = action()
    except UserError as error:
        own, message = error, (str(error), error.exit_code)
        own.agreed = True
    gathered = gather_objects((socket.gethostname(), message))
    failures = [(host, *failure) for host, failure in gathered if failure is not None]
    if failures:
        host, text, code = failures[0]
        if {host for host, _ in gathered} - {host for host, *_ in failures}:
            raise shared_error(f"{text} (on host {host})", code)
        raise own or shared_error(text, code)
    return result  # type: ignore[return-value]


def agree_on_long_work(action: Callable[[], T]) -> T:
    """Do as `agree` does where `action` may take longer, on some ranks or all, than a collective call may wait.

    A thread runs it, and until every rank is done all of them meet again and again, so that none waits long.
    """
    work: Future[T] = Future()

    def run() -> None:
        try:
            work.set_result(action())
        except BaseException as error:  # for the thread that waits, which raises it
            work.set_exception(error)

    Thread(target=run, daemon=True).start()
    pause = min(PAUSE, dist.distributed_c10d.default_pg_timeout.total_seconds() / 4)
    while not all(gather_objects(bool(wait([work], pause).done))):
        pass
    return agree(work.result)


def refuse_differences(own: Mapping[str, str]) -> None:
    """Raise a `UserError` on all ranks if a rank has another value under some name than rank 0; a collective call.

    Each node may be given its own command; with other settings or text, what the ranks train together has no meaning.
    """
    (_, first), *others = gather_objects((socket.gethostname(), dict(own)))
    for rank, (host, theirs) in enumerate(others, 1):
        for name in first | theirs:
            ours, other = first.get(name, "not given"), theirs.get(name, "not given")
            if ours != other:
                raise UserError(
                    f"{name} is {other} on rank {rank} (host {host}) and {ours} on rank 0: start all ranks with the "
                    "same code, settings and data",
                    WRONG_ARGUMENTS,
                )
