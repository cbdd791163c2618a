"""Output files that exist whole or not at all: written under a temporary name, synced, then renamed.

The temporary name is fixed (`FILE.tmp`), so that a killed run leaves one stale file which the next run takes over; a
lock keeps two runs that write the same file apart.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from types import TracebackType

from megatron_ddrp.errors import UserError


class AtomicFile:
    """A file opened for writing bytes that takes its name on `commit()` and vanishes on `abort()`.

    As a context manager it commits when the block ends well and aborts when it raises. Raises `UserError` when the
    folder cannot be made or when another process is writing the same file.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self.temporary = self.path.with_name(self.path.name + ".tmp")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.temporary, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise UserError(f"{self.path}: cannot be written: {error.strerror}") from None
        self.stream = os.fdopen(descriptor, "wb", buffering=1 << 20)
        self._open = True
        self._lock()

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        self.stream.write(data)

    def sync(self) -> None:
        """Bring everything written so far to the disk."""
        self.stream.flush()
        os.fsync(self.stream.fileno())

    def commit(self) -> None:
        """Give the complete file its name; one that cannot be completed, on a full disk say, vanishes."""
        try:
            self.sync()
            os.replace(self.temporary, self.path)
        except OSError:
            self.abort()
            raise
        self._open = False
        self.stream.close()
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def abort(self) -> None:
        """Remove the temporary file; nothing happens after `commit()`."""
        if self._open:
            self._open = False
            self.temporary.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # a full disk refuses the last flush too
                self.stream.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self.stream.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever held the lock before may just have renamed the file that we opened.
            ours = os.path.exists(self.temporary) and os.path.samestat(
                os.fstat(self.stream.fileno()), os.stat(self.temporary)
            )
        except BlockingIOError:
            ours = False
        except OSError:
            ours = True  # a file system without locks
        if not ours:
            self._open = False
            self.stream.close()
            raise UserError(f"{self.path}: another process is writing this file; wait for it or choose another name")
        self.stream.truncate(0)

    def __enter__(self) -> AtomicFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.commit()
        else:
            self.abort()
