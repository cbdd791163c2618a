"""PREFIX.json, the manifest of a dataset: counts, the tokenizer, SHA-256 of both files, and its own checksum."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_ddrp.data.atomic import AnyPath, write_text
from megatron_ddrp.data.dataset.dataset_index import dataset_path, file_size
from megatron_ddrp.data.progress import Advance, silent
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer
from megatron_ddrp.errors import UserError
from megatron_ddrp.json_files import object_sum

MANIFEST_SUM = "crc32"
"""Key of the manifest's own checksum."""


def read_manifest(prefix: AnyPath) -> dict[str, Any] | None:
    """Return the content of `PREFIX.json` without its own checksum, or None if there is no such file.

    Raises `UserError` for a file that is not a manifest or was changed. A manifest of an earlier version, without a
    checksum, is accepted.
    """
    path = dataset_path(prefix, ".json")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not a dataset manifest ({error}); preprocess again, or remove it") from None
    if not isinstance(manifest, dict) or not isinstance(manifest.get("tokenizer") or {}, dict):
        raise UserError(f"{path}: not a dataset manifest (unexpected content); preprocess again, or remove it")
    if MANIFEST_SUM in manifest and manifest.pop(MANIFEST_SUM) != object_sum(manifest):
        raise UserError(f"{path}: damaged or edited (its {MANIFEST_SUM} does not match); copy it again, or remove it")
    return manifest


def write_manifest(path: Path, manifest: dict[str, Any], ids: Path, index: Path) -> None:
    """Write `PREFIX.json`: `manifest`, size and SHA-256 of the two files, and its own checksum."""
    files = {
        name: {"bytes": file_size(file), "sha256": file_sha256(file)} for name, file in (("bin", ids), ("idx", index))
    }
    content = json.loads(json.dumps({**manifest, "files": files}))  # with the types that a reader gets
    content[MANIFEST_SUM] = object_sum(content)
    write_text(path, json.dumps(content, indent=2, sort_keys=True) + "\n")


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


def file_sha256(path: Path, advance: Advance = silent) -> str:
    """Return the SHA-256 of a file, in hexadecimal. Calls `advance` with the bytes read since the last call."""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while data := stream.read(1 << 20):
            digest.update(data)
            advance(len(data))
    return digest.hexdigest()
