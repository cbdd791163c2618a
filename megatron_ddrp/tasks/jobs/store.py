"""Store of finished jobs: a file with one JSON object per line that any number of processes read and append to.

A line is on the disk before a process counts its job as done. A partial line, left by a process killed while writing,
does not count. Each line carries the CRC-32 of its other fields, so that a changed line is noticed; lines of earlier
versions carry none. `megatron-ddrp glue` keeps its runs in such a file, `megatron-ddrp compare` its jobs. A job belongs
to the process with its lease. That process checks the store again after it takes the lease, and stores the finished job
before it gives the lease back, so that no job is done twice.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar

from megatron_ddrp.data.atomic import make_folder, sync_folder, take_lock
from megatron_ddrp.data.points import point
from megatron_ddrp.data.sealed import BrokenSeal, check_object, seal_object
from megatron_ddrp.errors import UserError, refusals_as_user_errors
from megatron_ddrp.foreign import parse_json, refuse_stand_in


class Named(Protocol):
    """Piece of work that is done once."""

    @property
    def name(self) -> str:
        """File name that no other job has."""


AnyJob = TypeVar("AnyJob", bound=Named)
Row = dict[str, Any]


class Store:
    """Finished jobs, one line per job, synced to disk. `refresh` reads lines that other processes have appended."""

    def __init__(
        self,
        path: Path,
        name: Callable[[Row], str],
        what: str,
        read: Callable[[Row], Row] = lambda row: row,
        on_damage: Callable[[str], None] | None = None,
    ):
        """Read the complete lines of the file if it exists.

        `read` converts a row to the form of this version, `name` returns the name of its job. Both raise KeyError,
        TypeError or ValueError for a row that is not `what`; `Damaged` says why. Damaged lines are left out, and
        `on_damage` gets one sentence for each; without `on_damage` a damaged line raises.

        Raises:
            UserError: a complete line is damaged or not `what`, and there is no `on_damage`.
        """
        self.path, self.what = path, what
        self.rows: list[Row] = []
        self.ends_in_half_a_line = False
        self._name, self._as_written_now, self._on_damage = name, read, on_damage
        self._done: set[str] = set()
        self._offset = self._lines = 0  # bytes and complete lines read
        self.refresh()

    def __contains__(self, name: str) -> bool:
        return name in self._done

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def missing(self, jobs: Iterable[AnyJob]) -> list[AnyJob]:
        """Return the jobs that are not finished."""
        return [job for job in jobs if job.name not in self._done]

    def lease(self, name: str) -> BinaryIO | None:
        """Take the lease of a job; return None if another process holds it or the job is finished.

        The lease is a locked file. Closing the file gives the lease back, unless a child process has inherited it. The
        system releases the lock when the last process with the open file ends, so a dead worker's lease is free at
        once. Locks work between machines on a file system that shares them (NFS, Lustre mounted with `flock`).

        Raises:
            UserError: the file system has no locks.
        """
        stream = _locked(self.path.parent, name, wait=False)
        if stream is None:
            return None
        self.refresh()  # another process may have finished the job before we took the lease
        if name in self:
            stream.close()
            return None
        point("job.leased", len(self.rows))
        return stream

    def refresh(self) -> None:
        """Read new lines of the file. Raises `UserError` for anything but a file or a free path."""
        with refusals_as_user_errors(self.path, "give a path to a file"):
            try:
                mode = self.path.stat().st_mode
            except FileNotFoundError:
                return
            if not stat.S_ISREG(mode):
                raise UserError(f"{self.path}: no regular file; give a path to a file, or one that is free")
            with self.path.open("rb") as stream:
                self._read(stream)

    def append(self, row: Row) -> None:
        """Append a row and sync it to disk, unless the file has a line for the same job."""
        with refusals_as_user_errors(self.path), self._opened() as stream:
            take_lock(stream.fileno(), wait=True)
            self._read(stream)
            if self._name(row) in self._done:
                return
            stream.truncate(self._offset)  # drop the partial line of a killed writer
            stream.seek(self._offset)
            stream.write(json.dumps(seal_object(row)).encode() + b"\n")
            stream.flush()
            os.fsync(stream.fileno())
            if not self._offset:
                sync_folder(self.path.parent)  # with the first row, the name of the file
            self._read(stream)
        point("job.appended", len(self.rows))

    def _opened(self) -> BinaryIO:
        make_folder(self.path.parent)
        return os.fdopen(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")

    def _read(self, stream: BinaryIO) -> None:
        stream.seek(self._offset)
        raw = stream.read()
        refuse_stand_in(raw, self.path)
        whole = raw[: raw.rfind(b"\n") + 1]
        for line in whole.split(b"\n")[:-1]:
            self._lines += 1
            try:
                row = self._parse(line)
                self._done.add(self._name(row))
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                reason = str(error) if isinstance(error, Damaged) else f"not {self.what}"
                self._damaged(f"{self.path}, line {self._lines}: {reason}")
                continue
            self.rows.append(row)
        self._offset += len(whole)
        self.ends_in_half_a_line = len(raw) > len(whole)

    def _parse(self, line: bytes) -> Row:
        row = parse_json(line, lenient=True)
        if not isinstance(row, dict):
            raise TypeError("expected a JSON object")
        try:
            return self._as_written_now(check_object(row))
        except BrokenSeal:
            raise Damaged("changed since it was written (its sum does not match)") from None

    def _damaged(self, sentence: str) -> None:
        if self._on_damage is None:
            raise UserError(f"{sentence}; choose another --output-dir, or delete this line")
        self._on_damage(sentence)


def digest(facts: Any) -> str:
    """Return twelve hexadecimal digits that change with any of the facts (JSON values)."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]


def left_to_others(count: int, folder: Path, waits: bool) -> str:
    """Return the last line of a command with --no-wait that leaves the `count` missing jobs to other commands.

    Raises:
        UserError: the command `waits` for others, so nobody does these jobs.
    """
    jobs = "1 job is" if count == 1 else f"{count:,} jobs are"
    if waits:
        raise UserError(f"{jobs} missing in {folder}, and the tables are not written: run the same command again")
    return f"nothing left to do here: {jobs} being done by other commands on {folder}; the last one writes the tables"


@contextlib.contextmanager
def one_at_a_time(folder: Path, name: str) -> Iterator[None]:
    """Hold the lock `name` of an output folder; wait while another process holds it.

    Raises:
        UserError: the file system has no locks.
    """
    stream = _locked(folder, name, wait=True)
    assert stream is not None
    with stream:
        yield


def _locked(folder: Path, name: str, wait: bool) -> BinaryIO | None:
    """Lock the file of a name and return it; None if another process holds it and `wait` is False."""
    path = folder / "locks" / f"{name}.lock"
    make_folder(path.parent)
    stream = path.open("ab")
    try:
        if take_lock(stream.fileno(), wait):
            return stream
    except OSError as error:
        raise UserError(
            f"{path}: this file system has no locks ({error.strerror}); put --output-dir on another file system"
        ) from None
    stream.close()
    return None


class Damaged(ValueError):
    """Error that says why a line is damaged."""
