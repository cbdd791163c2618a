"""The right to do a job: a lock on a file of its own, which the system drops with the last process that has it open.

A dead worker's lease is free at once, and none can go stale. A process that inherits `descriptor` holds the lease too.
Locks work between machines on a shared file system that has them (NFS 4, Lustre with `flock`).
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from megatron_ddrp.errors import UserError


class Lease:
    """A lock that is held; as a context manager it is released when the block ends."""

    def __init__(self, descriptor: int):
        self.descriptor = descriptor

    @classmethod
    def take(cls, path: Path) -> Lease | None:
        """Lock a file, made where it is missing; None where somebody else holds it.

        Raises:
            UserError: the file system has no locks.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError as error:
            os.close(descriptor)
            raise UserError(
                f"{path}: this file system has no locks ({error.strerror}); put --output-dir on another one"
            ) from None
        return cls(descriptor)

    def release(self) -> None:
        """Close the file. A process that inherited the descriptor keeps the lock."""
        os.close(self.descriptor)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
