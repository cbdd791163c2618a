"""Datasets being written, in a folder that a killed run leaves behind and from which the same command resumes.

PREFIX.unfinished/ holds one set of growing files per dataset (ids, sizes, documents) and job.json. The latter has the
command's settings, and the length and CRC-32 of the synced part of each growing file. A resumed run cuts the files back
to that length. Leftovers of another command and damaged ones are deleted; a folder
with any other file is refused. When all tokens are written, the index and the manifest are made in the same folder, and
then the three files of each dataset are renamed, the index last. A kill at any moment leaves either no dataset or the
whole one, and the same command finishes the renaming.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from megatron_ddrp.data.atomic import atomic_file, lock, sync, sync_folder, write_text
from megatron_ddrp.data.dataset.dataset_index import SIZE, dataset_path, write_index
from megatron_ddrp.data.dataset.manifest import write_manifest
from megatron_ddrp.data.sealed import check_object, crc_of, seal_object
from megatron_ddrp.errors import UserError
from megatron_ddrp.foreign import parse_json

PARTS = ("ids", "sizes", "documents")
"""Growing files of a dataset: token ids; int32 tokens of each sequence; int32 sequences of each document."""

_OWN = re.compile(rf"lock|job\.json|\d+\.({'|'.join((*PARTS, 'idx', 'json'))})|\..*\.tmp")
"""Names of the files that this module writes."""

NOTHING = np.empty(0, SIZE)


class _GrowingFile:
    """A file to which bytes are appended; `crc` is the CRC-32 of all of them."""

    def __init__(self, path: Path, length: int, crc: int):
        """Open `path` and cut it back to its first `length` bytes, whose CRC-32 is `crc`."""
        self.stream: BinaryIO = open(path, "ab", buffering=1 << 20)  # noqa: SIM115
        self.stream.truncate(length)
        self.stream.seek(0, os.SEEK_END)
        self.crc = crc

    def write(self, data: bytes) -> None:
        """Append bytes."""
        self.stream.write(data)
        self.crc = zlib.crc32(data, self.crc)

    def sync(self) -> list[int]:
        """Sync everything to the disk; return the file's length and CRC-32."""
        sync(self.stream)
        return [self.stream.tell(), self.crc]


class UnfinishedDatasets:
    """Growing files of some datasets; a context manager.

    If the block ends before the first `checkpoint` and without `publish`, everything written is removed.

    Attributes:
        dtype: type of the ids.
        state: the last argument of `checkpoint`, in this run or in the killed one; None at the start.
        published: True if only the renaming remains.
        discarded: True if leftovers of another command, or damaged ones, were found and removed.
    """

    def __init__(self, folder: str, prefixes: Sequence[str], dtype: np.dtype, job: dict[str, Any]):
        """Open the folder for the command with settings `job` (JSON). Raises `UserError` if another process has it."""
        self.folder = Path(folder)
        self._prefixes, self.dtype, self._job = prefixes, dtype, job
        self._lock = self._take_lock()
        self.discarded = self.published = False
        self.state: dict[str, Any] | None = None
        saved = self._read_job()
        if saved is not None:
            self.state, self.published = saved["state"], saved["published"]
        self._files: list[list[_GrowingFile]] = [] if self.published else self._open_files(saved)

    def append(
        self, number: int, ids: bytes = b"", sizes: np.ndarray = NOTHING, documents: np.ndarray = NOTHING
    ) -> None:
        """Append to dataset `number`: ids end to end, tokens of each sequence `[sequences]`, sequences of each document
        `[documents]`. The three may be appended separately; they must fit together in the end."""
        for file, data in zip(self._files[number], (ids, _as_sizes(sizes), _as_sizes(documents)), strict=True):
            file.write(data)

    def checkpoint(self, state: dict[str, Any]) -> None:
        """Sync everything to the disk, with `state`: a killed run resumes from here."""
        written = [[file.sync() for file in files] for files in self._files]
        self.state = state
        self._write_job(written, published=False)

    def publish(self, manifests: Sequence[dict[str, Any] | None]) -> None:
        """Rename every dataset to its final name, with its manifest if it has one."""
        if not self.published:
            for number, manifest in enumerate(manifests):
                self._complete(number, manifest)
            self._write_job([], published=True)
            self.published = True
        for number, prefix in enumerate(self._prefixes):
            ids, index, manifest_path = (dataset_path(prefix, suffix) for suffix in (".bin", ".idx", ".json"))
            if self._path(number, "ids").exists():
                # An old index or manifest must never lie beside new ids, not even after a crash at this point.
                index.unlink(missing_ok=True)
                manifest_path.unlink(missing_ok=True)
            for part, path in (("ids", ids), ("json", manifest_path), ("idx", index)):
                if self._path(number, part).exists():
                    os.replace(self._path(number, part), path)
        self.discard()
        sync_folder(self.folder.parent)

    def _complete(self, number: int, manifest: dict[str, Any] | None) -> None:
        """Write the index and the manifest of a dataset whose growing files are complete."""
        for growing in self._files[number]:
            growing.sync()
        ids, sizes, documents, index, text = (self._path(number, part) for part in (*PARTS, "idx", "json"))
        with atomic_file(index) as file, open(sizes, "rb") as lengths, open(documents, "rb") as counts:
            write_index(file, self.dtype, lengths, counts)
        if manifest is not None:
            write_manifest(text, manifest, ids, index)

    def discard(self) -> None:
        """Remove the folder with its files."""
        with contextlib.suppress(OSError):
            for path in self.folder.iterdir():
                if _OWN.fullmatch(path.name):
                    path.unlink()
            self.folder.rmdir()

    def __enter__(self) -> UnfinishedDatasets:
        return self

    def __exit__(self, *error: object) -> None:
        if self.state is None and not self.published:
            self.discard()
        for stream in [file.stream for files in self._files for file in files] + [self._lock]:
            with contextlib.suppress(OSError):  # a full disk refuses the last flush too
                stream.close()

    def _path(self, number: int, part: str) -> Path:
        return self.folder / f"{number}.{part}"

    def _take_lock(self) -> BinaryIO:
        path = self.folder / "lock"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            strange = next((p for p in self.folder.iterdir() if p.is_symlink() or not _OWN.fullmatch(p.name)), None)
            if strange or self.folder.is_symlink():
                raise UserError(
                    f"{strange or self.folder} was not written by this command, which needs {self.folder} for itself: "
                    "move it away, or choose another prefix"
                )
            stream = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "wb")
        except OSError as error:
            raise UserError(f"{self.folder}: cannot be written: {error.strerror}") from None
        if not lock(stream.fileno(), path):
            stream.close()
            raise UserError(f"{self.folder}: another process is writing here; wait for it, or choose another prefix")
        return stream

    def _read_job(self) -> dict[str, Any] | None:
        """Return job.json of a run of the same command if its files are intact; remove any other leftovers."""
        found = [path for path in self.folder.iterdir() if path.name != "lock"]
        try:
            sealed = parse_json((self.folder / "job.json").read_bytes(), lenient=True)
            saved = check_object(sealed, needs_sum=True)
            usable = saved["job"] == parse_json(json.dumps(self._job), lenient=True)
            for number, files in enumerate(saved["written"]):
                for part, (length, crc) in zip(PARTS, files, strict=True):
                    usable = usable and crc_of(self._path(number, part), length) == crc
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            usable = False
        if usable:
            return saved
        self.discarded = any(path.name == "job.json" for path in found)
        for path in found:
            path.unlink()
        return None

    def _open_files(self, saved: dict[str, Any] | None) -> list[list[_GrowingFile]]:
        nothing = [[[0, 0]] * len(PARTS)] * len(self._prefixes)
        return [
            [_GrowingFile(self._path(number, part), *done) for part, done in zip(PARTS, written, strict=True)]
            for number, written in enumerate(saved["written"] if saved else nothing)
        ]

    def _write_job(self, written: list[list[list[int]]], published: bool) -> None:
        content = {"job": self._job, "state": self.state, "written": written, "published": published}
        write_text(self.folder / "job.json", json.dumps(seal_object(content)))


def _as_sizes(numbers: np.ndarray) -> bytes:
    return numbers.astype(SIZE).tobytes()
