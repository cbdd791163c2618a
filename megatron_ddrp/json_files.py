"""JSON files that somebody else may have written: every mistake in them is one line that names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_ddrp.errors import UserError


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises `UserError` where the file cannot be read, is not UTF-8 or not JSON, is nested too deeply, or holds another
    value than an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give a file that can be read") from None
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error}); copy the file again") from None
    except RecursionError:
        raise UserError(f"{path}: nested too deeply; copy the file again") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object, got {type(value).__name__}; copy the file again")
    return value
