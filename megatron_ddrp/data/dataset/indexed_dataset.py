"""A dataset on disk: Megatron's two files, our manifest, and the folder of a dataset that is not finished.

    PREFIX.bin   the token ids of all sequences, one after another, little-endian
    PREFIX.idx   the begin of each sequence and document (dataset_index.py)
    PREFIX.json  the manifest (ours): counts, the tokenizer, SHA-256 of both files, and its own checksum; absent for
                 datasets that other programs wrote

`UnfinishedDatasets` writes the files, and `IndexedDataset` reads the first two through a memory map.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from megatron_ddrp.data.atomic import (
    SUM,
    AnyPath,
    BrokenSeal,
    atomic_file,
    check_object,
    file_sha256,
    lock,
    make_folder,
    seal_object,
    sync,
    sync_folder,
    write_text,
)
from megatron_ddrp.data.dataset.dataset_index import (
    MEND,
    SIZE,
    DatasetIndex,
    dataset_path,
    file_size,
    index_faults,
    write_index,
)
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
        if not isinstance(manifest, dict) or not isinstance(manifest.get("tokenizer") or {}, dict):
            raise ValueError("unexpected content")
        return check_object(manifest)
    except FileNotFoundError:
        return None
    except BrokenSeal:
        raise UserError(f"{path}: damaged or edited (its {SUM} does not match); copy it again, or remove it") from None
    except ValueError as error:
        raise UserError(f"{path}: not a dataset manifest ({error}); preprocess again, or remove it") from None


def entry(manifest: Mapping[str, Any] | None, key: str) -> dict[str, Any]:
    """Return a dictionary inside a manifest; an empty one if the manifest lacks it."""
    value = (manifest or {}).get(key)
    return value if isinstance(value, dict) else {}


def recorded_sum(manifest: Mapping[str, Any] | None, suffix: str) -> Any:
    """Return the SHA-256 of a dataset's `.bin` or `.idx` from its manifest, or None if the manifest lacks it."""
    return entry(entry(manifest, "files"), suffix.removeprefix(".")).get("sha256")


def tokenizer_entry(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the manifest's entry `tokenizer`, which identifies the tokenizer of a dataset."""
    return {"type": tokenizer.tokenizer_type, "fingerprint": tokenizer.fingerprint, "vocab_size": tokenizer.vocab_size}


def tokenizer_name(made_by: Mapping[str, Any]) -> str:
    """Return a manifest's `tokenizer` in a few words: type, fingerprint, number of pieces."""
    pieces = made_by.get("vocab_size", "an unknown number of")
    return f"{made_by.get('type', 'of unknown type')} {str(made_by.get('fingerprint'))[:12]} of {pieces} pieces"


def refuse_existing(prefixes: Iterable[AnyPath]) -> None:
    """Raise `UserError` if one of the datasets already has a file."""
    for path in (dataset_path(prefix, suffix) for prefix in prefixes for suffix in (".bin", ".idx", ".json")):
        if os.path.lexists(path):
            raise UserError(f"{path}: exists already; give --overwrite to replace it, or another --output-prefix")


PATH = "tokenizer_path"
"""Manifest entry of the vocabulary's path."""
MOST_LINKS = 40
"""Largest number of links that are followed from a file, as in Linux."""


class TokenizerFlags(NamedTuple):
    """Values of the three flags that name a tokenizer; None for a flag that is not given.

    The manifest of a dataset gives them back: `--tokenizer-type`, and the vocabulary where it still lies.
    """

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
    def of(cls, settings: Any) -> TokenizerFlags:
        """Return the three flags of settings that have their names, such as a parsed command line."""
        return cls(*(getattr(settings, name) for name in cls._fields))

    def build(self) -> Tokenizer:
        """Make the tokenizer, of the first type if none is named. Raises `UserError` as `build_tokenizer` does."""
        return build_tokenizer(self.tokenizer_type or TOKENIZER_TYPES[0], self.vocab_file, self.tokenizer_model)

    def words(self) -> list[str]:
        """Return the flags as the words that one types."""
        return [word for name, value in self._asdict().items() if value for word in (_flag(name), value)]


def relative_path(path: AnyPath, prefix: AnyPath) -> str:
    """Return a vocabulary's path as the manifest of `prefix` records it: relative to the folder of the dataset.

    So a tree of both can be moved or copied as a whole, and equal runs give equal manifests. The vocabulary's folder is
    resolved and its name is kept: where the name is a link, the settings of the vocabulary lie beside it.
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


PARTS = ("ids", "sizes", "documents")
"""Growing files of a dataset: token ids; int32 tokens of each sequence; int32 sequences of each document."""

COMPLETE = "complete"
"""File that says that all files are complete; it holds the job that wrote them."""

Job = dict[str, Any]
"""Settings and inputs of a command, as JSON. An equal job writes the same bytes."""

_OWN = re.compile(rf"lock|{COMPLETE}|\d+\.({'|'.join((*PARTS, 'idx', 'json'))})|\..*\.tmp")
"""Names of the files that this module writes."""

NOTHING = np.empty(0, SIZE)


class UnfinishedDatasets:
    """Growing files of some datasets; a context manager. Without `publish`, everything written is removed.

    The files lie in PREFIX.unfinished/ until they are complete and appear under their names, the index last. A kill or
    a power cut at any moment leaves either no dataset or the whole one. What is left of an unfinished one is removed by
    the next command. A complete one, marked by a file in the folder, gets its names from the next command; a merge or a
    shuffle then has nothing more to do if the dataset is its own, and preprocessing makes it again. A folder with any
    other file is refused.

    Attributes:
        dtype: type of the ids.
    """

    def __init__(self, folder: str, prefixes: Sequence[str], dtype: np.dtype, job: Job | None = None):
        """Write nothing yet: the block of the context manager begins with the folder."""
        self.folder, self._prefixes, self.dtype, self._job = Path(folder), prefixes, dtype, job
        self._files: list[list[BinaryIO]] = []

    def __enter__(self) -> UnfinishedDatasets:
        """Open the folder and remove what a killed command left there. Raises `UserError` if another process has it."""
        self._lock = _take_lock(self.folder)
        try:
            for path in self.folder.iterdir():
                if path.name != "lock":
                    path.unlink()
            self._files = [
                [open(_path(self.folder, number, part), "wb", buffering=1 << 20) for part in PARTS]  # noqa: SIM115
                for number in range(len(self._prefixes))
            ]
        except BaseException:  # a signal, before the block that would end with `__exit__`
            self.__exit__()
            raise
        return self

    def append(
        self, number: int, ids: bytes = b"", sizes: np.ndarray = NOTHING, documents: np.ndarray = NOTHING
    ) -> None:
        """Append to dataset `number`: ids end to end, tokens of each sequence `[sequences]`, sequences of each document
        `[documents]`. The three may be appended separately; they must fit together in the end."""
        numbers = (each.astype(SIZE).tobytes() for each in (sizes, documents))
        for file, data in zip(self._files[number], (ids, *numbers), strict=True):
            file.write(data)

    def publish(self, manifests: Sequence[dict[str, Any] | None]) -> None:
        """Write the index of every dataset, and its manifest, if it has one, with sums; rename all to their names."""
        for number, manifest in enumerate(manifests):
            for growing in self._files[number]:
                sync(growing)
            ids, sizes, documents, index = (_path(self.folder, number, part) for part in (*PARTS, "idx"))
            with atomic_file(index) as file, open(sizes, "rb") as lengths, open(documents, "rb") as counts:
                write_index(file, self.dtype, lengths, counts)
            if manifest is not None:
                sums = {
                    name: {"bytes": file_size(path), "sha256": file_sha256(path)}
                    for name, path in (("bin", ids), ("idx", index))
                }
                text = json.dumps(seal_object(manifest | {"files": sums}), indent=2, sort_keys=True)
                write_text(_path(self.folder, number, "json"), f"{text}\n")
        write_text(self.folder / COMPLETE, json.dumps([self._job, [*map(os.path.basename, self._prefixes)]]))
        _give_names(self.folder, self._prefixes)
        _remove(self.folder)

    def __exit__(self, *error: object) -> None:
        if not (self.folder / COMPLETE).exists():  # a signal may come while files get their names
            _remove(self.folder)
        for stream in [*itertools.chain(*self._files), self._lock]:
            with contextlib.suppress(OSError):  # a full disk refuses the last flush too
                stream.close()


def job_of(name: str, settings: Any, inputs: Sequence[AnyPath]) -> Job:
    """Return the job of a command by its settings (JSON) and by the sizes and times of its input files.

    What is no file, such as a pipe, is never the same again.
    """
    read: list[Any] = []
    for path in inputs:
        is_file = os.path.isfile(path)
        status = os.stat(path) if is_file else None
        read.append([os.fspath(path), status.st_size, status.st_mtime_ns] if status else os.urandom(8).hex())
    return {"command": name, "settings": settings, "inputs": read}


def finish_left(folder: str, prefixes: Sequence[str], job: Job) -> bool:
    """Give complete datasets that a killed command left in `folder` their names; return whether `job` wrote them."""
    marker = Path(folder) / COMPLETE
    try:
        with marker.open("rb") as stream:
            left, names = parse_json(stream.read())
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:  # not absent: the next step would remove complete files
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{marker} cannot be read: {reason}; try again, or remove {folder} to begin anew") from None
    with _take_lock(marker.parent):
        _give_names(marker.parent, [marker.parent.parent / name for name in names])  # perhaps another command's
        _remove(marker.parent)
    files = (dataset_path(prefix, suffix) for prefix in prefixes for suffix in (".bin", ".idx"))
    is_same = (left, names) == (parse_json(json.dumps(job)), [*map(os.path.basename, prefixes)])
    return is_same and all(os.path.isfile(path) for path in files)


def _path(folder: Path, number: int, part: str) -> Path:
    return folder / f"{number}.{part}"


def _give_names(folder: Path, prefixes: Sequence[AnyPath]) -> None:
    """Rename the complete files of all datasets that do not have their names yet."""
    for number, prefix in enumerate(prefixes):
        ids, index, manifest = (dataset_path(prefix, suffix) for suffix in (".bin", ".idx", ".json"))
        if _path(folder, number, "ids").exists():  # an old index or manifest must never lie beside new ids
            index.unlink(missing_ok=True)
            manifest.unlink(missing_ok=True)
            sync_folder(folder.parent)
        for part, path in (("ids", ids), ("json", manifest), ("idx", index)):
            if _path(folder, number, part).exists():
                os.replace(_path(folder, number, part), path)
    sync_folder(folder.parent)  # before the folder goes, from which the next command would finish the renaming


def _remove(folder: Path) -> None:
    """Remove a folder with its files, the mark of complete ones last."""
    with contextlib.suppress(OSError):
        for path in sorted(folder.iterdir(), key=lambda path: path.name == COMPLETE):
            if _OWN.fullmatch(path.name):
                path.unlink()
        folder.rmdir()
        sync_folder(folder.parent)


def _take_lock(folder: Path) -> BinaryIO:
    path = folder / "lock"
    try:
        make_folder(folder)
        strange = next((p for p in folder.iterdir() if p.is_symlink() or not _OWN.fullmatch(p.name)), None)
        if strange or folder.is_symlink():
            raise UserError(
                f"{strange or folder} was not written by this command, which needs {folder} for itself: "
                "move it away, or choose another prefix"
            )
        stream = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "wb")
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {error.strerror}") from None
    if not lock(stream.fileno(), path):
        stream.close()
        raise UserError(f"{folder}: another process is writing here; wait for it, or choose another prefix")
    return stream


CHUNK_TOKENS = 1 << 22
"""Number of tokens in memory at once while a whole dataset is read."""


class IndexedDataset(DatasetIndex):
    """Dataset whose item `dataset[i]` is sequence i, a read-only numpy view `[size]` of the memory map of `PREFIX.bin`.

    It has the lists of `DatasetIndex`. The memory of an open dataset does not grow with its size. It is pickled as its
    prefix.

    Raises `UserError` if a file is missing or not in this format, for a header that does not fit the files' sizes, and
    on access to a sequence that does not lie inside `PREFIX.bin` or does not end at the begin of the next one. It
    cannot detect an id that changed into another id, nor a document border that moved from one sequence to another:
    only the SHA-256 in the manifest does (`verification.py`, `--verify-data`).

    Attributes:
        sample_totals: row length → totals of the sample index (`batches/samples.py`), once they have been asked for.
    """

    def __init__(self, prefix: AnyPath):
        self.prefix = os.fspath(dataset_path(prefix, ""))
        path = dataset_path(prefix, ".idx")
        super().__init__(path)
        for fault in self.faults_of_ends():
            raise UserError(f"{path}: {fault}")
        path = dataset_path(prefix, ".bin")
        for fault in self.faults_of_bin(file_size(path)):
            raise UserError(f"{path}: {fault}")
        mapped = np.memmap(path, self.dtype, mode="r") if self.bin_bytes else np.empty(0, self.dtype)
        self._tokens = np.asarray(mapped)  # [tokens]
        self._tokens.flags.writeable = False
        self.sample_totals: dict[int, np.ndarray] = {}

    def __getitem__(self, index: int) -> np.ndarray:
        return self.get(index)

    def get(self, index: int, offset: int = 0, length: int | None = None, count: int = 1) -> np.ndarray:
        """Return ids `[offset, offset + length)` of `count` sequences end to end, of which `index` is the first.

        No copy is made. If `length` is None, the ids go up to the end of the sequences.
        """
        size, pointer = int(self.sizes[index]), int(self.pointers[index])
        begin, rest = divmod(pointer, self.dtype.itemsize)
        behind = index % len(self.sizes) + count
        if count > 1:
            size = int(self.sizes[index:behind].sum(dtype=np.int64))
        end = self._tokens.nbytes if behind == len(self.sizes) else int(self.pointers[behind])
        if rest or not 0 <= begin <= begin + size or pointer + size * self.dtype.itemsize != end:
            raise UserError(
                f"{self.prefix}.idx: sequence {index} has {size} tokens from byte {pointer} of a .bin with "
                f"{len(self._tokens)} tokens: damaged; {MEND}, and see all of it by megatron-ddrp dataset verify"
            )
        stop = size if length is None else offset + length
        if not 0 <= offset <= stop <= size:
            raise IndexError(f"{self.prefix}: tokens [{offset}, {stop}) of sequence {index}, which has {size}")
        return self._tokens[begin + offset : begin + stop]  # [length]

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self.document_indices) - 1

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all sequences."""
        return len(self._tokens)

    @cached_property
    def manifest(self) -> dict[str, Any] | None:
        """Content of `PREFIX.json`, or None if there is no such file; read on first use."""
        return read_manifest(self.prefix)

    @property
    def sample_digest(self) -> str:
        """SHA-256 of up to 64 evenly spread sequences, which distinguishes datasets whose counts agree by chance."""
        digest = hashlib.sha256()
        for sequence in np.unique(np.linspace(0, max(0, len(self) - 1), 64).astype(int)) if len(self) else ():
            digest.update(np.ascontiguousarray(self[int(sequence)]).tobytes())
        return digest.hexdigest()

    @cached_property
    def description(self) -> str:
        """Numbers of documents and tokens, and the begin of `sample_digest`: the same for every copy of the files."""
        return f"{self.num_documents:,} documents, {self.num_tokens:,} tokens, digest {self.sample_digest:.12}"

    @cached_property
    def closing_tokens(self) -> int:
        """Number of [SEP] that end each document: 1 with `--append-eod`, by the manifest, otherwise 0."""
        return int((self.manifest or {}).get("append_eod") is True)

    def check(self) -> None:
        """Check the whole index. Raises `UserError` for its first fault."""
        path = dataset_path(self.prefix, ".idx")
        for fault in index_faults(DatasetIndex(path)):  # a separate map, so that its pages are released
            raise UserError(f"{path}: {fault}: damaged; {MEND}, and see all of it by megatron-ddrp dataset verify")

    def chunks(self) -> Iterator[np.ndarray]:
        """Yield copies of all tokens in file order, at most `CHUNK_TOKENS` at a time."""
        return token_chunks(dataset_path(self.prefix, ".bin"), self.dtype)

    def piece_counts(self) -> np.ndarray:
        """Read the whole file and return the count of each piece, int64 `[pieces]`."""
        counts = np.zeros(0, dtype=np.int64)
        for tokens in self.chunks():
            found = np.bincount(tokens, minlength=len(counts))
            found[: len(counts)] += counts
            counts = found
        return counts

    def __reduce__(self) -> tuple[Any, ...]:
        return IndexedDataset, (self.prefix,)


def token_chunks(path: Path, dtype: np.dtype) -> Iterator[np.ndarray]:
    """Yield all ids of a `PREFIX.bin`, at most `CHUNK_TOKENS` at a time.

    Reads instead of mapping, so that no page stays in memory.
    """
    with open(path, "rb", buffering=0) as stream:
        while len(tokens := np.fromfile(stream, dtype, CHUNK_TOKENS)):
            yield tokens
