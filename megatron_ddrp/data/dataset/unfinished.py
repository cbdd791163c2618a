"""Datasets being written: in PREFIX.unfinished/, until they are complete and appear under their names, the index last.

A kill or a power cut at any moment leaves either no dataset or the whole one. What is left of an unfinished one is
removed by the next command. A complete one, marked by a file in the folder, gets its names from the next command, which
then has nothing more to do if it is the same one. A folder with any other file is refused.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from megatron_ddrp.data.atomic import AnyPath, atomic_file, lock, make_folder, sync, sync_folder, write_text
from megatron_ddrp.data.dataset.dataset_index import SIZE, dataset_path, write_index
from megatron_ddrp.data.dataset.manifest import write_manifest
from megatron_ddrp.errors import UserError
from megatron_ddrp.foreign import parse_json

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

    Attributes:
        dtype: type of the ids.
    """

    def __init__(self, folder: str, prefixes: Sequence[str], dtype: np.dtype, job: Job | None = None):
        """Open the folder and remove what a killed command left there. Raises `UserError` if another process has it."""
        self.folder, self._prefixes, self.dtype, self._job = Path(folder), prefixes, dtype, job
        self._lock = _take_lock(self.folder)
        for path in self.folder.iterdir():
            if path.name != "lock":
                path.unlink()
        self._files: list[list[BinaryIO]] = [
            [open(self._path(number, part), "wb", buffering=1 << 20) for part in PARTS]  # noqa: SIM115
            for number in range(len(prefixes))
        ]

    def append(
        self, number: int, ids: bytes = b"", sizes: np.ndarray = NOTHING, documents: np.ndarray = NOTHING
    ) -> None:
        """Append to dataset `number`: ids end to end, tokens of each sequence `[sequences]`, sequences of each document
        `[documents]`. The three may be appended separately; they must fit together in the end."""
        for file, data in zip(self._files[number], (ids, _as_sizes(sizes), _as_sizes(documents)), strict=True):
            file.write(data)

    def publish(self, manifests: Sequence[dict[str, Any] | None]) -> None:
        """Rename every dataset to its final name, with its manifest if it has one."""
        for number, manifest in enumerate(manifests):
            self._complete(number, manifest)
        write_text(self.folder / COMPLETE, json.dumps(self._job))
        _give_names(self.folder, self._prefixes)
        _remove(self.folder)

    def _complete(self, number: int, manifest: dict[str, Any] | None) -> None:
        """Write the index and the manifest of a dataset whose growing files are complete."""
        for growing in self._files[number]:
            sync(growing)
        ids, sizes, documents, index, text = (self._path(number, part) for part in (*PARTS, "idx", "json"))
        with atomic_file(index) as file, open(sizes, "rb") as lengths, open(documents, "rb") as counts:
            write_index(file, self.dtype, lengths, counts)
        if manifest is not None:
            write_manifest(text, manifest, ids, index)

    def __enter__(self) -> UnfinishedDatasets:
        return self

    def __exit__(self, *error: object) -> None:
        if not (self.folder / COMPLETE).exists():  # a signal may come while files get their names
            _remove(self.folder)
        for stream in [*itertools.chain(*self._files), self._lock]:
            with contextlib.suppress(OSError):  # a full disk refuses the last flush too
                stream.close()

    def _path(self, number: int, part: str) -> Path:
        return _path(self.folder, number, part)


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
            left = parse_json(stream.read())
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:  # not absent: the next step would remove complete files
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{marker} cannot be read: {reason}; try again, or remove {folder} to begin anew") from None
    with _take_lock(marker.parent):
        _give_names(marker.parent, prefixes)
        _remove(marker.parent)
    files = (dataset_path(prefix, suffix) for prefix in prefixes for suffix in (".bin", ".idx"))
    return left == parse_json(json.dumps(job)) and all(os.path.isfile(path) for path in files)


def _path(folder: Path, number: int, part: str) -> Path:
    return folder / f"{number}.{part}"


def _give_names(folder: Path, prefixes: Sequence[str]) -> None:
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


def _as_sizes(numbers: np.ndarray) -> bytes:
    return numbers.astype(SIZE).tobytes()
