"""PREFIX.json, the manifest of a dataset: counts, the tokenizer, SHA-256 of both files, and its own checksum.

It gives the tokenizer back as flags: `--tokenizer-type`, and the vocabulary where it still lies. The path of the
vocabulary is relative to the folder of the dataset, so that a tree of both can be moved or copied as a whole, and equal
runs give equal manifests.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron_ddrp.data.atomic import AnyPath, write_text
from megatron_ddrp.data.dataset.dataset_index import dataset_path, file_size
from megatron_ddrp.data.sealed import SUM, BrokenSeal, check_object, file_sha256, seal_object
from megatron_ddrp.data.tokenizers.tokenizer import TOKENIZER_TYPES, Tokenizer, build_tokenizer
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError
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


PATH = "tokenizer_path"
"""Manifest entry of the vocabulary's path."""
MOST_LINKS = 40
"""Largest number of links that are followed from a file, as in Linux."""


class TokenizerFlags(NamedTuple):
    """Values of the three flags that name a tokenizer; None for a flag that is not given."""

    tokenizer_type: str | None = None
    vocab_file: str | None = None
    tokenizer_model: str | None = None

    @property
    def path_name(self) -> str:
        """Name of the flag that gives the vocabulary of this type."""
        is_wordpiece = (self.tokenizer_type or TOKENIZER_TYPES[0]).startswith("BertWordPiece")
        return "vocab_file" if is_wordpiece else "tokenizer_model"

    @property
    def path(self) -> str | None:
        """Vocabulary of this type."""
        return getattr(self, self.path_name)

    def with_path(self, path: str | None) -> TokenizerFlags:
        """Return the same type with another vocabulary."""
        return self._replace(**{self.path_name: path})

    @classmethod
    def from_arguments(cls, arguments: Any) -> TokenizerFlags | None:
        """Return the three flags of a parsed command line; None if none of them was given."""
        flags = cls(*(getattr(arguments, name) for name in cls._fields))
        return None if flags == cls() else flags

    def build(self) -> Tokenizer:
        """Make the tokenizer, of the first type if none is named. Raises `UserError` as `build_tokenizer` does."""
        return build_tokenizer(self.tokenizer_type or TOKENIZER_TYPES[0], self.vocab_file, self.tokenizer_model)

    def words(self) -> list[str]:
        """Return the flags as the words that one types."""
        return [word for name, value in self._asdict().items() if value for word in (_flag(name), value)]


def relative_path(path: AnyPath, prefix: AnyPath) -> str:
    """Return a vocabulary's path as the manifest of `prefix` records it.

    Its folder is resolved and its name is kept: where the name is a link, the settings of the vocabulary lie beside it.
    """
    folder, name = os.path.split(os.fspath(path).rstrip(os.sep))
    has_name = name not in ("", os.curdir, os.pardir)
    real = os.path.join(os.path.realpath(folder), name) if has_name else os.path.realpath(path)
    return os.path.relpath(real, os.path.realpath(dataset_path(prefix, ".json").parent))


def recorded_flags(prefix: AnyPath) -> TokenizerFlags:
    """Return the flags that the manifest of a dataset names, whether the vocabulary is still there or not.

    Without a manifest, or with one of another writer, all are None.
    """
    manifest = read_manifest(prefix) or {}
    kind, recorded = entry(manifest, "tokenizer").get("type"), manifest.get(PATH)
    if kind not in TOKENIZER_TYPES:
        return TokenizerFlags()
    if not isinstance(recorded, str):
        return TokenizerFlags(kind)
    paths = [os.path.normpath(os.path.join(folder, recorded)) for folder in _folders(dataset_path(prefix, ".json"))]
    path = next(filter(os.path.exists, paths), paths[0])
    here = os.path.relpath(path)
    return TokenizerFlags(kind).with_path(path if here.startswith(os.pardir) else here)


def _folders(manifest: Path) -> list[str]:
    """Return the folders, resolved, in which a manifest lies: that of the file itself, then those of links to it."""
    folders = [os.path.realpath(manifest.parent)]
    while manifest.is_symlink() and len(folders) <= MOST_LINKS:
        manifest = manifest.parent / os.readlink(manifest)
        folders.append(os.path.realpath(manifest.parent))
    return folders[::-1]


def path_entry(prefixes: Sequence[AnyPath], output_prefix: AnyPath) -> dict[str, str]:
    """Return the entry `PATH` for a dataset made from others; empty where these name several vocabularies, or none."""
    paths = {recorded_flags(prefix).path for prefix in prefixes}
    path = paths.pop()
    return {} if paths or path is None else {PATH: relative_path(path, output_prefix)}


def complete(given: TokenizerFlags, prefixes: Sequence[AnyPath]) -> TokenizerFlags:
    """Return the flags with those that are not given taken from the first manifest that names a tokenizer.

    The manifest's vocabulary is taken only where no flag gives one. A type that contradicts the manifest stays as
    given; opening the dataset refuses it. Without a manifest the type is `BertWordPieceLowerCase`. Raises `UserError`
    where the vocabulary is not given and does not lie where the manifest says, or where there is no dataset that could
    name it.
    """
    for prefix in prefixes:
        recorded = recorded_flags(prefix)
        if recorded.tokenizer_type is None:
            continue
        chosen = given._replace(tokenizer_type=given.tokenizer_type or recorded.tokenizer_type)
        is_given = (given.vocab_file, given.tokenizer_model) != (None, None)  # also as an empty text, refused later
        if is_given or recorded.path is None or chosen.path_name != recorded.path_name:
            return chosen
        if not os.path.exists(recorded.path):
            made_with = f"{os.fspath(prefix)} was made with {recorded.path}, which is not there any more"
            raise UserError(f"{made_with}; give {_flag(recorded.path_name)} (a local path)", WRONG_ARGUMENTS)
        return chosen.with_path(recorded.path)
    if given == TokenizerFlags():
        for prefix in prefixes:
            file_size(dataset_path(prefix, ".idx"))  # a wrong prefix is the mistake, not the missing vocabulary
    return given._replace(tokenizer_type=given.tokenizer_type or TOKENIZER_TYPES[0])


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
