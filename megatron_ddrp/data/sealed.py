"""Sums that show whether a file has changed: CRC-32 of objects and files, SHA-256 of datasets.

    object   {…, "crc32": sum}: the sum covers the other keys, as JSON with sorted keys and without spaces
    file     {"bytes": …, "crc32": …}, kept in another file
    dataset  SHA-256 in hexadecimal, kept in the manifest

CRC-32 detects flipped, missing and zeroed bytes, and costs about a second per gigabyte.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_ddrp.foreign import parse_json, refuse_stand_in

SUM = "crc32"
"""Key of an object's own sum, and of a file's."""
BLOCK = 1 << 20
"""Number of bytes read at a time."""

Advance = Callable[[int], object]
"""Function called with the number of bytes (or tokens) read since the last call, such as a progress bar's `update`."""


def silent(count: int) -> None:
    """Show no progress."""


class BrokenSeal(ValueError):
    """Error for content that differs from its sum."""


def content_sum(content: bytes) -> str:
    """Return the CRC-32 of some bytes as it is written, as eight hexadecimal digits."""
    return f"{zlib.crc32(content):08x}"


def object_sum(value: Mapping[str, Any]) -> str:
    """Return the CRC-32 of a JSON object."""
    return content_sum(json.dumps(value, sort_keys=True, separators=(",", ":")).encode())


def seal_object(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON object with its own sum, and with the types that a reader gets."""
    read = parse_json(json.dumps(value), lenient=True)
    return {**read, SUM: object_sum(read)}


def check_object(sealed: Mapping[str, Any], needs_sum: bool = False) -> dict[str, Any]:
    """Return an object without its own sum. Raises `BrokenSeal` if the sum differs, or is missing and `needs_sum`.

    Objects of older versions have none.
    """
    value = {key: sealed[key] for key in sealed if key != SUM}
    found, written = object_sum(value), sealed.get(SUM)
    if written != found and (needs_sum or SUM in sealed):
        raise BrokenSeal(f"CRC-32 {found} instead of {written!s:.20}")
    return value


def crc_of(path: Path, length: int | None = None) -> int | None:
    """Return the CRC-32 of a file or of its first `length` bytes; None if it is shorter."""
    crc, left = 0, os.path.getsize(path) if length is None else length
    with open(path, "rb") as stream:
        while left > 0 and (data := stream.read(min(left, BLOCK))):
            crc, left = zlib.crc32(data, crc), left - len(data)
    return crc if left <= 0 else None


def file_facts(path: Path) -> dict[str, Any]:
    """Return a file's size and CRC-32."""
    return {"bytes": path.stat().st_size, SUM: f"{crc_of(path):08x}"}


def file_fault(path: Path, written: Mapping[str, Any], read: bool = True) -> str | None:
    """Return the fault of a file whose facts were `written`, or None.

    Without `read` only the size is compared; otherwise the whole file is read for its sum.
    """
    if not path.is_file():
        return f"{path.name} is missing"
    size = path.stat().st_size
    if size != written["bytes"]:
        refuse_stand_in(b"", path)
        return f"{path.name} has {size:,} bytes instead of {written['bytes']:,}"
    found = file_facts(path)[SUM] if read else written[SUM]
    return None if found == written[SUM] else f"{path.name} has the CRC-32 {found} instead of {written[SUM]}"


def file_sha256(path: Path, advance: Advance = silent) -> str:
    """Return the SHA-256 of a file, in hexadecimal. Calls `advance` with the bytes read since the last call."""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while data := stream.read(BLOCK):
            digest.update(data)
            advance(len(data))
    return digest.hexdigest()
