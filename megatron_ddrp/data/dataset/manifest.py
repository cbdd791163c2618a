"""PREFIX.json, the manifest of a dataset: counts, the tokenizer, SHA-256 of both files, and its own checksum."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_ddrp.data.atomic import AnyPath, write_text
from megatron_ddrp.data.dataset.dataset_index import dataset_path, file_size
from megatron_ddrp.data.sealed import SUM, BrokenSeal, check_object, file_sha256, seal_object
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer
from megatron_ddrp.errors import UserError
from megatron_ddrp.foreign import parse_json


def read_manifest(prefix: AnyPath) -> dict[str, Any] | None:
    """Return the content of `PREFIX.json` without its own checksum, or None if there is no such file.

    Raises `UserError` for a file that is not a manifest or was changed. A manifest of an earlier version, without a
    checksum, is accepted.
    """
    path = dataset_path(prefix, ".json")
    try:
        manifest = parse_json(path.read_bytes(), lenient=True)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise UserError(f"{path}: not a dataset manifest ({error}); preprocess again, or remove it") from None
    if not isinstance(manifest, dict) or not isinstance(manifest.get("tokenizer") or {}, dict):
        raise UserError(f"{path}: not a dataset manifest (unexpected content); preprocess again, or remove it")
    try:
        return check_object(manifest)
    except BrokenSeal:
        raise UserError(f"{path}: damaged or edited (its {SUM} does not match); copy it again, or remove it") from None


def write_manifest(path: Path, manifest: dict[str, Any], ids: Path, index: Path) -> None:
    """Write `PREFIX.json`: `manifest`, size and SHA-256 of the two files, and its own checksum."""
    files = {
        name: {"bytes": file_size(file), "sha256": file_sha256(file)} for name, file in (("bin", ids), ("idx", index))
    }
    sealed = seal_object({**manifest, "files": files})
    write_text(path, json.dumps(sealed, indent=2, sort_keys=True) + "\n")


def entry(manifest: Mapping[str, Any] | None, key: str) -> dict[str, Any]:
    """Return a dictionary inside a manifest; an empty one if the manifest lacks it."""
    value = (manifest or {}).get(key)
    return value if isinstance(value, dict) else {}


def tokenizer_entry(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the manifest's entry `tokenizer`, which identifies the tokenizer of a dataset."""
    return {"type": tokenizer.tokenizer_type, "fingerprint": tokenizer.fingerprint, "vocab_size": tokenizer.vocab_size}


def tokenizer_name(made_by: Mapping[str, Any]) -> str:
    """Return a manifest's `tokenizer` in a few words: type, fingerprint, number of pieces."""
    pieces = made_by.get("vocab_size", "an unknown number of")
    return f"{made_by.get('type', 'of unknown type')} {str(made_by.get('fingerprint'))[:12]} of {pieces} pieces"


def refuse_existing(prefixes: Iterable[AnyPath]) -> None:
    """Raise `UserError` if one of the datasets already has a file."""
    for prefix in prefixes:
        for suffix in (".bin", ".idx", ".json"):
            path = dataset_path(prefix, suffix)
            if os.path.lexists(path):
                hint = "give --overwrite to replace it, or another --output-prefix"
                raise UserError(f"{path}: exists already; {hint}")
