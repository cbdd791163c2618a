"""Zstandard files as byte streams, in any number of frames, noticing when the last one is cut off."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any, BinaryIO

BLOCK_BYTES = 1 << 20


def open_zstd(raw: BinaryIO) -> io.BufferedReader:
    """The unpacked bytes of a .zst file. Reading raises `OSError` for damaged data, `EOFError` when it is cut off."""
    return io.BufferedReader(_Blocks(_unpack(raw)), buffer_size=BLOCK_BYTES)


def _unpack(raw: BinaryIO) -> Iterator[bytes]:
    import zstandard

    frame = None
    while packed := raw.read(BLOCK_BYTES):
        while packed:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            try:
                yield frame.decompress(packed)
            except zstandard.ZstdError as error:
                raise OSError(str(error)) from None
            packed = b""
            if frame.eof:
                packed, frame = frame.unused_data, None
    if frame is not None:
        raise EOFError("the last Zstandard frame has no end")


class _Blocks(io.RawIOBase):
    """Blocks of bytes as a file."""

    def __init__(self, blocks: Iterator[bytes]):
        self._blocks = blocks
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._rest = memoryview(block)
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count
