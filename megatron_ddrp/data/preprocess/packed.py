"""Files as byte streams, hashed and unpacked: gzip, xz, bzip2 and Zstandard by one reader of any number of streams.

A file is read whole or refused. A later stream that is damaged or cut off, and bytes that belong to no stream, are
errors, although Python's `lzma.LZMAFile` and `bz2.BZ2File` end there without a word.
"""

from __future__ import annotations

import bz2
import hashlib
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, NamedTuple

LARGEST_WINDOW = 1 << 31
"""Largest window of Zstandard's format, in bytes: `zstd --long=31` writes it; the library's own limit is 128 MiB."""

_PACKED_BYTES = 1 << 13  # given to a decompressor at once: Zstandard makes at most 256 MiB of them
_UNPACKED_BYTES = 1 << 20  # taken from a decompressor at once


class Packing(NamedTuple):
    """Format of packed files."""

    begin: Callable[[], Any]
    """Returns a decompressor of one stream, with the methods of `bz2.BZ2Decompressor`."""
    padding: int = 0
    """Unit in bytes of the zeros that may follow a stream; 0 if there may be none."""
    several: bool = True
    """False if nothing may follow the first stream."""


class HashedFile(io.FileIO):
    """File, or descriptor, that counts and hashes the bytes from `begin` to `end` while they are read.

    Attributes:
        count: number of bytes read.
        digest: their SHA-256.
    """

    def __init__(self, file: str | int, begin: int, end: int | None):
        super().__init__(file, "rb", closefd=isinstance(file, str))
        if begin:
            self.seek(begin)
        self._length = None if end is None else end - begin
        self.count = 0
        self.digest = hashlib.sha256()

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        if self._length is not None:
            view = view[: self._length - self.count]
        count = super().readinto(view) or 0
        while not self.count and 0 < count < FIRST_BYTES and (more := super().readinto(view[count:])):
            count += more  # a pipe may give its first bytes one by one
        self.digest.update(view[:count])
        self.count += count
        return count


class PackedStream:
    """Uncompressed bytes of a packed file, whose packing is a key of `PACKINGS`."""

    def __init__(self, raw: BinaryIO, packing: str):
        self._blocks = _unpack(raw, PACKINGS[packing])
        self._rest = memoryview(b"")

    def read(self, count: int) -> bytes:
        """Return the next `count` bytes, fewer only at the end. The libraries raise their own errors."""
        data = bytearray(self._rest[:count])
        self._rest = self._rest[count:]
        while len(data) < count and (block := next(self._blocks, None)) is not None:
            self._rest = memoryview(block)[count - len(data) :]
            data += block[: count - len(data)]
        return bytes(data)


def packing_of(first: bytes) -> str:
    """Return the key of `PACKINGS` that the first `FIRST_BYTES` of a file tell; empty for one that is not packed."""
    return next((packing for magic, packing in _MAGIC.items() if first.startswith(magic)), "")


def _unpack(raw: BinaryIO, packing: Packing) -> Iterator[bytes]:
    packed = raw.read(_PACKED_BYTES)
    if not packed:
        raise EOFError("empty")
    if packing is PACKINGS[".xz"] and packing_of(packed) != ".xz":
        packing = _LZMA
    while packed:
        stream = packing.begin()
        while not stream.eof:
            if stream.needs_input and not (packed := packed or raw.read(_PACKED_BYTES)):
                raise EOFError("the last stream has no end")
            yield stream.decompress(packed, _UNPACKED_BYTES)
            packed = b""
        if not lzma.is_check_supported(getattr(stream, "check", lzma.CHECK_NONE)):
            raise OSError("its integrity check is of an unknown kind")
        packed = _behind_padding(stream.unused_data, raw, packing.padding)
        if packed and not packing.several:
            raise OSError("bytes behind the end")


def _behind_padding(packed: bytes, raw: BinaryIO, unit: int) -> bytes:
    """Return bytes of the next stream, empty at the end of the file. `packed` has been read already."""
    zeros = 0
    while packed := packed or raw.read(_PACKED_BYTES):
        rest = packed.lstrip(b"\0") if unit else packed
        zeros += len(packed) - len(rest)
        packed = rest
        if packed:
            break
    if unit and zeros % unit:
        raise OSError(f"{zeros} bytes of padding, expected a multiple of {unit}")
    return packed


class _GzipMember:
    """Decompressor of one member of a gzip file."""

    def __init__(self) -> None:
        self._stream = zlib.decompressobj(16 + zlib.MAX_WBITS)  # 16: with gzip's head and check sum
        self.needs_input = True

    def decompress(self, packed: bytes, most: int) -> bytes:
        data = self._stream.decompress(self._stream.unconsumed_tail + packed, most)
        self.needs_input = len(data) < most
        return data

    @property
    def eof(self) -> bool:
        return self._stream.eof

    @property
    def unused_data(self) -> bytes:
        return self._stream.unused_data


class _ZstdFrame:
    """Decompressor of one Zstandard frame. It makes all bytes of its input at once."""

    needs_input = True

    def __init__(self) -> None:
        import zstandard

        self._frame = zstandard.ZstdDecompressor(max_window_size=LARGEST_WINDOW).decompressobj()

    def decompress(self, packed: bytes, most: int) -> bytes:
        return self._frame.decompress(packed)

    @property
    def eof(self) -> bool:
        return self._frame.eof

    @property
    def unused_data(self) -> bytes:
        return self._frame.unused_data


PACKINGS = {
    ".gz": Packing(_GzipMember, padding=1),
    ".xz": Packing(lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ), padding=4),
    ".zst": Packing(_ZstdFrame),
    ".bz2": Packing(bz2.BZ2Decompressor),
}
"""Ending of a file name → its packing."""

_LZMA = Packing(lzma.LZMADecompressor, several=False)  # of xz's older format, which `xz` reads from a .xz file too

_MAGIC = {b"\x1f\x8b": ".gz", b"\xfd7zXZ\x00": ".xz", b"BZh": ".bz2", b"\x28\xb5\x2f\xfd": ".zst"}
_MAGIC |= {bytes([0x50 + number]) + b"\x2a\x4d\x18": ".zst" for number in range(16)}  # a skippable frame, as of pzstd
FIRST_BYTES = max(map(len, _MAGIC))
