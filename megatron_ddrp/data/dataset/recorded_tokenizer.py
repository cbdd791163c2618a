"""The tokenizer of a dataset as flags, from its manifest: `--tokenizer-type`, and the vocabulary where it still lies.

A manifest records the vocabulary's path relative to the dataset's folder, so that a tree of both can be moved or copied
as a whole, and equal runs give equal manifests.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megatron_ddrp.data.atomic import AnyPath
from megatron_ddrp.data.dataset.dataset_index import dataset_path
from megatron_ddrp.data.dataset.manifest import entry, read_manifest
from megatron_ddrp.data.tokenizers.tokenizer import TOKENIZER_TYPES
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError

PATH = "tokenizer_path"
"""Manifest entry of the vocabulary's path."""


class TokenizerFlags(NamedTuple):
    """Values of the three flags that name a tokenizer; None for a flag that is not given."""

    tokenizer_type: str | None = None
    vocab_file: str | None = None
    tokenizer_model: str | None = None

    def words(self) -> list[str]:
        """Return the flags as the words that one types."""
        return [word for name, value in self._asdict().items() if value for word in (_flag(name), value)]


def relative_path(path: AnyPath, prefix: AnyPath) -> str:
    """Return a vocabulary's path as the manifest of `prefix` records it."""
    return os.path.relpath(os.path.realpath(path), os.path.realpath(dataset_path(prefix, ".json").parent))


def recorded_path(prefix: AnyPath, manifest: Mapping[str, Any]) -> Path | None:
    """Return where the vocabulary of a dataset lay when it was made; None where the manifest does not say."""
    recorded = manifest.get(PATH)
    if not isinstance(recorded, str):
        return None
    return Path(os.path.relpath(os.path.realpath(dataset_path(prefix, ".json").parent / recorded)))


def completed(given: TokenizerFlags, prefixes: Iterable[AnyPath]) -> TokenizerFlags:
    """Return the flags with those that are not given taken from the first manifest that names a tokenizer.

    Without a manifest the type is `BertWordPieceLowerCase`. Raises `UserError` where the vocabulary is not given, and
    does not lie where the manifest says.
    """
    for prefix in prefixes:
        manifest = read_manifest(prefix) or {}
        kind = entry(manifest, "tokenizer").get("type")
        if kind in TOKENIZER_TYPES:
            return _with_recorded(given, kind, recorded_path(prefix, manifest), prefix)
    return given._replace(tokenizer_type=given.tokenizer_type or TOKENIZER_TYPES[0])


def _with_recorded(given: TokenizerFlags, kind: str, path: Path | None, prefix: AnyPath) -> TokenizerFlags:
    chosen = given._replace(tokenizer_type=given.tokenizer_type or kind)
    name = "vocab_file" if str(chosen.tokenizer_type).startswith("BertWordPiece") else "tokenizer_model"
    if path is None or chosen.tokenizer_type != kind or getattr(given, name) is not None:
        return chosen
    if not path.exists():
        made_with = f"{os.fspath(prefix)} was made with {path}, which is not there any more"
        raise UserError(f"{made_with}; give {_flag(name)} (a local path)", WRONG_ARGUMENTS)
    return chosen._replace(**{name: os.fspath(path)})


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
