"""JSON objects: reading of files that other programs may have written, and checksums that reveal a change."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_ddrp.errors import UserError


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, which may begin with a byte order mark.

    Raises `UserError` if the file cannot be read, is not UTF-8, is not JSON, is nested too deeply, or holds a value
    other than an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give a readable file") from None
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error}); copy the file again") from None
    except RecursionError:
        raise UserError(f"{path}: nested too deeply; copy the file again") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object, got {type(value).__name__}; copy the file again")
    return value


class RepeatedKey(ValueError):
    """Error for a JSON object with the same key twice."""


def distinct_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object from its keys and values, as `object_pairs_hook` of `json.loads`; raise `RepeatedKey`."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise RepeatedKey(f"key {next(key for key in keys if keys.count(key) > 1)!r} is twice in one object")
    return found


def object_sum(value: Mapping[str, Any]) -> str:
    """Return the CRC-32 of a JSON object with sorted keys and without spaces, as eight hexadecimal digits."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return f"{zlib.crc32(text.encode()):08x}"
