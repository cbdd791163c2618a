"""Cache files beside the data. Each ends with a checksum, so a damaged file is made again instead of being used.

The checksum is the CRC-32 of the file's name and content. It detects flipped, missing and zeroed bytes, files of an
earlier version, and another dataset's file under this name. It costs about a second per gigabyte. A file's content
follows from its name, so processes need not wait for each other: each one that finds no file computes the same bytes.
While one of them writes the file, the others leave it to that one.
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from megatron_ddrp.data.atomic import AnyPath, AtomicFile, BeingWritten
from megatron_ddrp.data.dataset.indexed_dataset import IndexedDataset, dataset_path
from megatron_ddrp.errors import UserError

_SUM = struct.Struct("<I")
T = TypeVar("T")


class BrokenSealError(Exception):
    """Error for a file whose checksum does not fit its name and content."""


class CacheFile:
    """`FOLDER/NAME.FINGERPRINT.ENDING`, in `folder` (`--index-cache-dir`) or beside the dataset.

    Attributes:
        path: the file.
        damaged: True if `load` found a file that is damaged or from an earlier version.
    """

    def __init__(self, dataset: IndexedDataset, fingerprint: str, ending: str, folder: AnyPath | None = None):
        self._index = dataset_path(dataset.prefix, ".idx")
        self._folder = folder
        self.path = Path(folder or self._index.parent) / f"{self._index.stem}.{fingerprint}.{ending}"
        self.damaged = False

    def load(self, read: Callable[[Path], T]) -> T | None:
        """Return `read(path)`, or None if there is no intact file; `read` may raise `BrokenSealError`."""
        try:
            check_seal(self.path)
            return read(self.path)
        except OSError:  # no file yet, or a folder that cannot be made; writing will report that
            return None
        except BrokenSealError:
            self.damaged = True
            return None

    def write(self, content: bytes) -> str | None:
        """Write the file, whole or not at all. Return None, or the reason why the data's folder cannot be written to.

        Raises `UserError` if the user named a folder that cannot be written to.
        """
        try:
            with AtomicFile(self.path, mode=self._index.stat().st_mode & 0o666) as file:  # the data's rights
                file.write(seal(self.path.name, content))
        except BeingWritten:
            return None
        except (OSError, UserError) as error:
            cause = error.__cause__ or error
            reason = cause.strerror if isinstance(cause, OSError) else str(cause)
            if self._folder is None:
                return f"{self.path.parent} cannot be written ({reason})"
            raise UserError(
                f"--index-cache-dir {self._folder}: cannot be written: {reason}; give a folder that can be"
            ) from None
        return None


def seal(name: str, content: bytes) -> bytes:
    """Return the bytes of a sealed file: `content`, then the checksum."""
    return content + _SUM.pack(_sum(name, content))


def check_seal(path: Path) -> None:
    """Raise `BrokenSealError` for a file that differs from what `seal` made, `OSError` if it cannot be opened."""
    status = path.stat()  # opened once: another process may replace or remove the file at any moment
    if not stat.S_ISREG(status.st_mode) or status.st_size < _SUM.size:
        raise BrokenSealError(path)
    with (
        open(path, "rb") as stream,
        mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data,
        memoryview(data)[: -_SUM.size] as content,
    ):
        whole = _SUM.pack(_sum(path.name, content)) == data[-_SUM.size :]
    if not whole:
        raise BrokenSealError(path)


def _sum(name: str, content: bytes | memoryview) -> int:
    return zlib.crc32(content, zlib.crc32(os.fsencode(name)))
