"""Worker processes of one command on one machine; they share a store of jobs.

Queue of jobs for many processes without a server: the process with a job's lease does it and stores its row.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.context import SpawnContext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ddrp.config import load_plugin
from megatron_ddrp.config.registry import plugin_files
from megatron_ddrp.errors import FAILURE, UserError, run_command
from megatron_ddrp.tasks.jobs.store import AnyJob, Row, Store

if TYPE_CHECKING:
    import torch

SPAWN: SpawnContext = multiprocessing.get_context("spawn")
"""Start method of the workers: CUDA does not survive a fork."""


def device_of(worker: int) -> torch.device:
    """Return the device of a worker: GPUs are assigned in turn; without a GPU, the CPU."""
    import torch  # here, because --help must not import it

    from megatron_ddrp.model.gpus import usable

    if torch.cuda.is_available():
        return usable(torch.device("cuda", worker % torch.cuda.device_count()))
    return torch.device("cpu")


def share_threads(workers: int) -> None:
    """Limit torch to this process's share of the cores, unless OMP_NUM_THREADS is set."""
    if "OMP_NUM_THREADS" not in os.environ:
        import torch  # here, because --help must not import it

        torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))


def share_out(
    work: Callable[..., None],
    arguments: tuple[Any, ...],
    count: int,
    jobs: Sequence[AnyJob],
    store: Store,
    tell: Callable[[], None],
    program: str,
) -> None:
    """Start `count` workers and return when all have ended; call `tell` after each check of the store.

    Worker n calls `work(n, *arguments)`. If a worker is killed, the others do its jobs. Jobs may be missing at the end
    if the workers left them to other commands.

    Raises:
        UserError: a worker failed and jobs are missing. The failed worker has printed its own message before.
    """
    plugins = plugin_files()
    workers = [
        SPAWN.Process(
            target=_begin, args=(program, number, count, plugins, work, arguments), name=f"worker {number}", daemon=True
        )
        for number in range(count)
    ]
    for worker in workers:
        worker.start()
    try:
        while any(worker.is_alive() for worker in workers):
            multiprocessing.connection.wait([worker.sentinel for worker in workers if worker.is_alive()], WAIT)
            store.refresh()
            tell()
    finally:
        for worker in workers:
            worker.kill()
            worker.join()
    store.refresh()
    tell()
    missing, lost = len(store.missing(jobs)), next((worker for worker in workers if worker.exitcode), None)
    if missing and lost:
        killed = lost.exitcode == -signal.SIGKILL
        why = " (the system does this when memory runs out; fewer --workers need less)" if killed else ""
        raise UserError(
            f"{lost.name} of {count} ended with exit code {lost.exitcode}{why} and {missing} of {len(jobs)} jobs are "
            "missing; finished jobs are kept, run the same command to do the others"
        )


def _begin(
    program: str,
    number: int,
    count: int,
    plugins: tuple[Path, ...],
    work: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent handles it
    for path in plugins:
        load_plugin(path)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    share_threads(count)
    run_command(lambda: work(number, *arguments), f"{program}: worker {number}")


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(FAILURE)


WAIT = 0.5
"""Seconds between two checks of jobs that other processes hold."""


def drain(
    jobs: Sequence[AnyJob],
    store: Store,
    perform: Callable[[AnyJob], Row],
    tell: Callable[[], None] = lambda: None,
    wait: bool = True,
) -> None:
    """Do all `jobs` whose lease is free and wait for the others; return when the store has all of them.

    Without `wait`, return as soon as other processes hold all missing jobs; the process that appends the last row finds
    the store complete. `perform` does a job and returns its row. `tell` runs whenever the store may have new rows.
    """
    while True:
        store.refresh()
        tell()
        missing = store.missing(jobs)
        if not missing:
            return
        for job in missing:
            if lease := store.lease(job.name):
                with lease:
                    store.append(perform(job))
                break
        else:
            if not wait:
                store.refresh()  # another process may have finished the last job since
                return
            time.sleep(WAIT)
