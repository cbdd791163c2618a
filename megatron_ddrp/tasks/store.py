"""A file of what is finished, one JSON object per line, that any number of processes read and append to.

A line is on the disk before anybody counts it as done. Half a line, which a kill while writing leaves, counts as none.
Each line carries the CRC-32 of its other fields, so that a changed line is noticed; lines of earlier versions have
none. `tasks.glue` keeps its runs in such a file, `tasks.compare` its jobs.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

from megatron_ddrp.errors import UserError
from megatron_ddrp.json_files import object_sum

Key = TypeVar("Key", bound=Hashable)
Row = dict[str, Any]

SUM = "crc32"


class Store(Generic[Key]):
    """One synced line per finished piece of work; `refresh` brings in what other processes have appended."""

    def __init__(
        self,
        path: Path,
        key: Callable[[Row], Key],
        what: str,
        read: Callable[[Row], Row] = lambda row: row,
        on_damage: Callable[[str], None] | None = None,
    ):
        """Read the whole lines of the file, if there is one.

        `read` returns a row as this version writes it, `key` what a row is known by. Both raise KeyError, TypeError or
        ValueError for a row that is not `what`. `on_damage` gets one sentence for each damaged line, which is then
        left out; without it such a line raises.

        Raises:
            UserError: a whole line is damaged or not `what`, and there is no `on_damage`.
        """
        self.path, self.what = path, what
        self.rows: list[Row] = []
        self.ends_in_half_a_line = False
        self._key, self._as_written_now, self._on_damage = key, read, on_damage
        self._done: set[Key] = set()
        self._offset = self._lines = 0  # bytes and lines read, all of them whole
        self.refresh()

    def __contains__(self, key: Key) -> bool:
        return key in self._done

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def refresh(self) -> None:
        """Read the lines that are new."""
        if self.path.is_file():
            with self.path.open("rb") as stream:
                self._read(stream)

    def append(self, row: Row) -> None:
        """Add a line unless the file has one for the same key; it is on the disk when this returns."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            self._read(stream)
            if self._key(row) in self._done:
                return
            stream.truncate(self._offset)  # what a killed writer left of a line
            stream.seek(self._offset)
            stream.write(json.dumps(row | {SUM: object_sum(row)}).encode() + b"\n")
            stream.flush()
            os.fsync(stream.fileno())
            self._read(stream)

    def _read(self, stream: BinaryIO) -> None:
        stream.seek(self._offset)
        raw = stream.read()
        whole = raw[: raw.rfind(b"\n") + 1]
        for line in whole.split(b"\n")[:-1]:
            self._lines += 1
            try:
                row = self._parse(line)
                self._done.add(self._key(row))
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                reason = str(error) if isinstance(error, _Changed) else f"not {self.what}"
                self._damaged(f"{self.path}, line {self._lines}: {reason}")
                continue
            self.rows.append(row)
        self._offset += len(whole)
        self.ends_in_half_a_line = len(raw) > len(whole)

    def _parse(self, line: bytes) -> Row:
        row = json.loads(line)
        if not isinstance(row, dict):
            raise TypeError("expected a JSON object")
        expected = row.pop(SUM, None)
        if expected is not None and expected != object_sum(row):
            raise _Changed("changed since it was written (its sum does not match)")
        return self._as_written_now(row)

    def _damaged(self, sentence: str) -> None:
        if self._on_damage is None:
            raise UserError(f"{sentence}; choose another --output-dir, or take this line out")
        self._on_damage(sentence)


class _Changed(ValueError):
    """A line whose sum does not match."""
