"""Jobs that any number of processes share: a store of finished jobs, leases, a queue and the time left.

No server is needed: the process with a job's lease does it and stores its row.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import stat
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.context import SpawnContext
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Protocol, TypeVar

from megatron_ddrp.config import load_plugin
from megatron_ddrp.config.reading import COUNT, Section, option
from megatron_ddrp.config.registry import plugin_files
from megatron_ddrp.data.atomic import BrokenSeal, check_object, make_folder, seal_object, sync_folder, take_lock
from megatron_ddrp.data.points import point
from megatron_ddrp.data.progress import end_with_parent
from megatron_ddrp.errors import UserError, refusals_as_user_errors, run_command
from megatron_ddrp.foreign import parse_json, refuse_stand_in
from megatron_ddrp.run.log import duration

if TYPE_CHECKING:
    import torch


class Named(Protocol):
    """Piece of work that is done once."""

    @property
    def name(self) -> str:
        """File name that no other job has."""


AnyJob = TypeVar("AnyJob", bound=Named)
Row = dict[str, Any]


class Store:
    """Finished jobs in a file with one JSON object per line, which any number of processes read and append to.

    Everything that affects a job's result identifies it. So a restarted command repeats nothing, and new weights under
    an old name are never mistaken for the old ones.

    A line is on the disk before a process counts its job as done. A partial line, left by a process killed while
    writing, does not count. Each line carries the CRC-32 of its other fields, so that a changed line is noticed; lines
    of earlier versions carry none. `megatron-ddrp glue` and `finetune` keep their runs in such a file, `minimal-pairs`
    its scores, `compare` its jobs.

    A job belongs to the process with its lease. That process checks the store again after it takes the lease, and
    stores the finished job before it gives the lease back, so that no job is done twice. `refresh` reads lines that
    other processes have appended.
    """

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
        with refusals_as_user_errors(self.path, "give a folder that can hold it"):
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
                row = parse_json(line, lenient=True)
                if not isinstance(row, dict):
                    raise TypeError("expected a JSON object")
                row = self._as_written_now(check_object(row))
                self._done.add(self._name(row))
            except BrokenSeal:
                reason = "changed since it was written (its sum does not match)"
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                reason = str(error) if isinstance(error, Damaged) else f"not {self.what}"
            else:
                self.rows.append(row)
                continue
            sentence = f"{self.path}, line {self._lines}: {reason}"
            if self._on_damage is None:
                raise UserError(f"{sentence}; choose another --output-dir, or delete this line")
            self._on_damage(sentence)
        self._offset += len(whole)
        self.ends_in_half_a_line = len(raw) > len(whole)


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


@dataclass(frozen=True)
class WorkerOptions(Section):
    """machine"""

    workers: int | None = option(None, "processes that share the sweep (default: one per GPU, else 1)", within=COUNT)
    wait: bool = option(
        True,
        "wait for jobs that other commands on the same OUT are doing; --no-wait exits instead, and the command that "
        "finishes last writes the tables (for job arrays)",
    )
    dry_run: bool = option(False, "check the files, print the plan and stop; write nothing")


class Workload(NamedTuple):
    """Job, or part of one, in a forecast."""

    kind: str
    """Kind of the job in words; jobs of one kind take time in proportion to their work."""
    work: float
    seconds: float = 0.0
    """Time that it took, if it is finished."""


def eta(left: Sequence[Workload], finished: Iterable[Workload], workers: int) -> str:
    """Return the time until `workers` finish the jobs `left`, as text. Workers never share a job.

    For each kind of job it is the mean time of the finished work times the work that is left.
    """
    seconds: dict[str, float] = defaultdict(float)
    work: dict[str, float] = defaultdict(float)
    for part in finished:
        seconds[part.kind] += part.seconds
        work[part.kind] += part.work
    total = sum(seconds[part.kind] / work[part.kind] * part.work for part in left if work[part.kind])
    known = duration(total / max(1, min(workers, len(left))))
    unknown = [part.kind for part in left if not work[part.kind]]
    if not unknown:
        return known
    none = f"not known until the first {unknown[0]} is finished"
    return f"more than {known} (no {unknown[0]} is finished yet)" if total else none


SPAWN: SpawnContext = multiprocessing.get_context("spawn")
"""Start method of the workers: CUDA does not survive a fork."""


def device_of(worker: int) -> torch.device:
    """Return the device of a worker: GPUs are assigned in turn; without a GPU, the CPU."""
    import torch  # here, because --help must not import it

    from megatron_ddrp.model.fused import usable

    if torch.cuda.is_available():
        return usable(torch.device("cuda", worker % torch.cuda.device_count()))
    return torch.device("cpu")


def share_threads(workers: int) -> None:
    """Limit torch to this process's share of the cores, unless OMP_NUM_THREADS is set."""
    if "OMP_NUM_THREADS" not in os.environ:
        import torch  # here, because --help must not import it

        torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))


def share_out(
    work: Callable[..., None],
    arguments: tuple[Any, ...],
    count: int,
    jobs: Sequence[AnyJob],
    store: Store,
    tell: Callable[[], None],
    program: str,
) -> None:
    """Start `count` workers and return when all have ended; call `tell` after each check of the store.

    Worker n calls `work(n, *arguments)`. If a worker is killed, the others do its jobs. Jobs may be missing at the end
    if the workers left them to other commands.

    Raises:
        UserError: a worker failed and jobs are missing. The failed worker has printed its own message before.
    """
    plugins = plugin_files()
    workers = [
        SPAWN.Process(
            target=_begin, args=(program, number, count, plugins, work, arguments), name=f"worker {number}", daemon=True
        )
        for number in range(count)
    ]
    for worker in workers:
        worker.start()
    try:
        while any(worker.is_alive() for worker in workers):
            multiprocessing.connection.wait([worker.sentinel for worker in workers if worker.is_alive()], WAIT)
            store.refresh()
            tell()
    finally:
        for worker in workers:
            worker.kill()
            worker.join()
    store.refresh()
    tell()
    missing, lost = len(store.missing(jobs)), next((worker for worker in workers if worker.exitcode), None)
    if missing and lost:
        killed = lost.exitcode == -signal.SIGKILL
        why = " (the system does this when memory runs out; fewer --workers need less)" if killed else ""
        raise UserError(
            f"{lost.name} of {count} ended with exit code {lost.exitcode}{why} and {missing} of {len(jobs)} jobs are "
            "missing; finished jobs are kept, run the same command to do the others"
        )


def _begin(
    program: str,
    number: int,
    count: int,
    plugins: tuple[Path, ...],
    work: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent handles it
    for path in plugins:
        load_plugin(path)
    end_with_parent()
    share_threads(count)
    run_command(lambda: work(number, *arguments), f"{program}: worker {number}")


WAIT = 0.5
"""Seconds between two checks of jobs that other processes hold."""


def drain(
    jobs: Sequence[AnyJob],
    store: Store,
    perform: Callable[[AnyJob], Row],
    tell: Callable[[], None] = lambda: None,
    wait: bool = True,
) -> None:
    """Do all `jobs` whose lease is free and wait for the others; return when the store has all of them.

    Without `wait`, return as soon as other processes hold all missing jobs; the process that appends the last row finds
    the store complete. `perform` does a job and returns its row. `tell` runs whenever the store may have new rows.
    """
    while True:
        store.refresh()
        tell()
        missing = store.missing(jobs)
        if not missing:
            return
        for job in missing:
            if lease := store.lease(job.name):
                with lease:
                    store.append(perform(job))
                break
        else:
            if not wait:
                store.refresh()  # another process may have finished the last job since
                return
            time.sleep(WAIT)
