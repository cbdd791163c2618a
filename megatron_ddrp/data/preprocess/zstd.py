"""Zstandard files as byte streams, with any number of frames; a truncated last frame is an error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

BLOCK_BYTES = 1 << 20
LARGEST_WINDOW = 1 << 31
"""Largest window of the format, in bytes: `zstd --long=31` writes it, and the library's own limit is 128 MiB."""


class ZstdStream:
    """Uncompressed bytes of a .zst file. Reading raises `OSError` for damaged data, `EOFError` for a truncated file."""

    def __init__(self, raw: BinaryIO):
        self._blocks = _unpacked(raw)
        self._rest = memoryview(b"")

    def read(self, count: int) -> bytes:
        """Return the next `count` bytes, fewer only at the end."""
        data = bytearray(self._rest[:count])
        self._rest = self._rest[count:]
        while len(data) < count and (block := next(self._blocks, None)) is not None:
            self._rest = memoryview(block)[count - len(data) :]
            data += block[: count - len(data)]
        return bytes(data)


def _unpacked(raw: BinaryIO) -> Iterator[bytes]:
    import zstandard

    frame = None
    while packed := raw.read(BLOCK_BYTES):
        while packed:
            frame = frame or zstandard.ZstdDecompressor(max_window_size=LARGEST_WINDOW).decompressobj()
            try:
                yield frame.decompress(packed)
            except zstandard.ZstdError as error:
                raise OSError(str(error)) from None
            packed = b""
            if frame.eof:
                packed, frame = frame.unused_data, None
    if frame is not None:
        raise EOFError("the last Zstandard frame has no end")
