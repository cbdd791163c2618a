"""Cache files that end in a sum, so that a damaged file is made again instead of being believed.

The sum is the CRC-32 of the file's name and content: it finds flipped, missing and zeroed bytes, files of an earlier
version, and another dataset's file under this name. It costs about a second per gigabyte.
"""

from __future__ import annotations

import mmap
import stat
import struct
import zlib
from pathlib import Path

_SUM = struct.Struct("<I")


class BrokenSealError(Exception):
    """A file whose sum does not fit its name and content."""


def seal(name: str, content: bytes) -> bytes:
    """Return the bytes of a sealed file: `content`, then the sum."""
    return content + _SUM.pack(_sum(name, content))


def check_seal(path: Path) -> None:
    """Raise `BrokenSealError` for a file that is not as `seal` made it, `OSError` for one that cannot be opened."""
    status = path.stat()  # once: another process may replace or remove the file at any moment
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
    return zlib.crc32(content, zlib.crc32(name.encode()))
