"""Queue of jobs for many processes without a server: the process with a job's lease does it and stores its row."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from megatron_ddrp.tasks.jobs.store import AnyJob, Row, Store

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
