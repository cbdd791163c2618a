"""Output files that exist whole or not at all: written under a temporary name, synced, then renamed.

The temporary name is fixed (`FILE.tmp`), so a killed run leaves at most one stale file, which the next run overwrites.
A lock prevents two processes from writing the same file.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from megatron_ddrp.errors import UserError

AnyPath = str | os.PathLike[str]


class AtomicFile:
    """A file of bytes that gets its name when its `with` block ends, and is removed if the block raises.

    Raises `UserError` if the folder cannot be made or another process is writing the same file.

    Attributes:
        stream: the open file, for libraries that write into one.
    """

    def __init__(self, path: AnyPath):
        self.path = Path(path)
        temporary = self.path.with_name(self.path.name + ".tmp")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise UserError(f"{self.path}: cannot be written: {error.strerror}") from None
        self.stream = os.fdopen(descriptor, "wb", buffering=1 << 20)
        if not lock(self.stream, temporary):
            self.stream.close()
            raise UserError(f"{self.path}: another process is writing this file; wait for it or choose another name")
        self.stream.truncate(0)
        self._renamed = renamed(self.stream, temporary, self.path)

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        self.stream.write(data)

    def __enter__(self) -> AtomicFile:
        self._renamed.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._renamed.__exit__(*error)


def write_text(path: AnyPath, text: str) -> None:
    """Write a file of text in UTF-8, whole or not at all. Raises `UserError` as `AtomicFile` does."""
    with AtomicFile(path) as file:
        file.write(text.encode())


@contextlib.contextmanager
def renamed(stream: IO[bytes], temporary: Path, path: Path) -> Iterator[None]:
    """Rename an open file from `temporary` to `path` when the block ends; remove it if the block raises."""
    try:
        yield
        sync(stream)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        with contextlib.suppress(OSError):  # a full disk refuses the last flush too
            stream.close()
        raise
    stream.close()
    sync_folder(path.parent)


def lock(stream: IO[bytes], path: Path) -> bool:
    """Lock the open file `path` for this process. Return False while another process holds it or has just renamed it.

    A file system without locks counts as locked.
    """
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return path.exists() and os.path.samestat(os.fstat(stream.fileno()), os.stat(path))
    except BlockingIOError:
        return False
    except OSError:
        return True


def sync(stream: IO[bytes]) -> None:
    """Sync everything written to an open file to the disk."""
    stream.flush()
    os.fsync(stream.fileno())


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
