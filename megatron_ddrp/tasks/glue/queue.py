"""Many processes, one sweep, no server: a run belongs to the process that holds its byte of OUT/claims.lock.

Record locks belong to a process and go with it, however it ends, so a dead worker's claim is free at once and no
claim can go stale. They work between machines on a shared file system with locks (NFS 4, Lustre with `flock`). After
taking a claim a process looks into runs.jsonl once more, and it writes the finished run there before it lets go, so
that no run is ever done twice.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_ddrp.errors import UserError
from megatron_ddrp.tasks.glue.runs import Run, RunStore

WAIT = 0.5
"""Seconds between two looks at runs that other processes hold."""


class Claims:
    """The claims of this process. Open one a process: closing any other on the same file would drop its locks."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)

    def take(self, run: Run) -> bool:
        """Claim a run; False where another process holds it."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self._byte(run))
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            raise UserError(
                f"{self.path}: this file system has no locks ({error.strerror}); put --output-dir on another one"
            ) from None
        return True

    def release(self, run: Run) -> None:
        """Give a claim back."""
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, self._byte(run))

    @staticmethod
    def _byte(run: Run) -> int:
        # Two runs that share a byte, one pair in thousands of sweeps, are done one after the other.
        return int.from_bytes(hashlib.sha256(run.name.encode()).digest()[:4], "big") >> 1


def drain(
    runs: Sequence[Run],
    store: RunStore,
    claims: Claims,
    perform: Callable[[Run], dict[str, Any]],
    tell: Callable[[], None] = lambda: None,
) -> None:
    """Return when the store holds all of `runs`: do those that nobody has claimed, wait for those of others.

    `perform` does a run and returns its row; `tell` is called whenever the store may hold new rows.
    """
    while True:
        store.refresh()
        tell()
        missing = [run for run in runs if run not in store]
        if not missing:
            return
        for run in missing:
            if claims.take(run):
                break
        else:
            time.sleep(WAIT)
            continue
        try:
            store.refresh()  # it may have been finished between our look and our claim
            if run not in store:
                store.append(perform(run))
        finally:
            claims.release(run)
