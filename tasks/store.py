"""A file of what is finished, one JSON object a line, that any number of processes read and append to.

A line is on the disk before anybody counts it as done, and half a line, which a kill while writing leaves, counts as
none. The runs of `tasks.glue` and the courses of `tasks.compare` are kept in it.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

from megatron_ddrp.errors import UserError

Key = TypeVar("Key", bound=Hashable)


class Store(Generic[Key]):
    """One synced line a finished piece of work; `refresh` brings in what other processes have appended."""

    def __init__(self, path: Path, key: Callable[[dict[str, Any]], Key], what: str):
        """Read what is there; an unfinished last line (a kill while writing) does not count.

        `key` says what a line tells of, and raises KeyError, TypeError or ValueError for one that is not `what`.

        Raises:
            UserError: a whole line is not `what`.
        """
        self.path, self.what = path, what
        self.rows: list[dict[str, Any]] = []
        self._key = key
        self._done: set[Key] = set()
        self._offset = 0  # bytes read, all of them whole lines
        self.refresh()

    def __contains__(self, key: Key) -> bool:
        return key in self._done

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)

    def refresh(self) -> None:
        """Read the lines that are new."""
        if self.path.is_file():
            with self.path.open("rb") as stream:
                self._read(stream)

    def append(self, row: dict[str, Any]) -> None:
        """Add a line unless it stands there; it is on the disk when this returns."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            self._read(stream)
            if self._key(row) in self._done:
                return
            stream.truncate(self._offset)  # what a killed writer left of a line
            stream.seek(self._offset)
            stream.write(json.dumps(row).encode() + b"\n")
            stream.flush()
            os.fsync(stream.fileno())
            self._read(stream)

    def _read(self, stream: BinaryIO) -> None:
        stream.seek(self._offset)
        raw = stream.read()
        whole = raw[: raw.rfind(b"\n") + 1]
        for line in whole.splitlines():
            try:
                row = json.loads(line)
                key = self._key(row)
            except (ValueError, KeyError, TypeError):
                raise UserError(
                    f"{self.path}, line {len(self.rows) + 1}: not {self.what}; choose another --output-dir, or take "
                    "this line out"
                ) from None
            self.rows.append(row)
            self._done.add(key)
        self._offset += len(whole)
