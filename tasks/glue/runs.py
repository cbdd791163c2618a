"""The runs of a sweep: the paper's grid, and runs.jsonl, the store of the finished ones.

One line is one finished run. A run is known by what decides its score (weights, data, hyper-parameters, seed), so
that a restarted sweep repeats nothing, and other weights under an old name are never taken for the old ones. Several
processes may read and append at once.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from megatron_ddrp.errors import UserError


@dataclass(frozen=True, order=True)
class Point:
    """One point of the hyper-parameter grid."""

    batch_size: int
    lr: float
    epochs: int


def grid(batch_sizes: Iterable[int], lrs: Iterable[float], epochs: Iterable[int]) -> tuple[Point, ...]:
    """All combinations."""
    return tuple(itertools.starmap(Point, itertools.product(batch_sizes, lrs, epochs)))


GRIDS: dict[str, dict[str, tuple[Any, ...]]] = {
    "paper": {"batch_sizes": (16, 32), "lrs": (1e-5, 2e-5, 3e-5), "epochs": (4, 6)},
    "quick": {"batch_sizes": (32,), "lrs": (3e-5,), "epochs": (4,)},
}
"""Arguments of `grid`: appendix B's, and one point for a first look."""


@dataclass(frozen=True)
class Run:
    """What decides a score."""

    task: str
    batch_size: int
    lr: float
    epochs: int
    seed: int
    max_seq_length: int
    encoder: str
    """Fingerprint of the encoder's weights."""
    data: str
    """Fingerprint of the task's files."""
    micro_batch_size: int
    """Rows of one forward and backward pass; a batch is the sum of several."""
    layerwise_lr_decay: float = 1.0
    precision: str = "fp32"
    max_train_examples: int | None = None
    """Training rows that are used; None for all."""

    @property
    def name(self) -> str:
        """A file name of its own."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()
        return f"{self.task}-b{self.batch_size}-lr{self.lr:g}-e{self.epochs}-s{self.seed}-{digest[:12]}"

    @property
    def point(self) -> Point:
        """Its place in the grid."""
        return Point(self.batch_size, self.lr, self.epochs)

    @classmethod
    def of_row(cls, row: dict[str, Any]) -> Run:
        """The run that a line of runs.jsonl tells of."""
        return cls(**{name: row[name] for name in cls.__dataclass_fields__})


class RunStore:
    """runs.jsonl: one synced line a finished run; `refresh` brings in what other processes have appended."""

    def __init__(self, path: Path):
        """Read what is there; an unfinished last line (a kill while writing) does not count.

        Raises:
            UserError: another line is not a run of this program.
        """
        self.path = path
        self.rows: list[dict[str, Any]] = []
        self._done: set[Run] = set()
        self._offset = 0  # bytes read, all of them whole lines
        self.refresh()

    def __contains__(self, run: Run) -> bool:
        return run in self._done

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)

    def refresh(self) -> None:
        """Read the lines that are new."""
        if self.path.is_file():
            with self.path.open("rb") as stream:
                self._read(stream)

    def append(self, row: dict[str, Any]) -> None:
        """Add a finished run unless it stands there; it is on the disk when this returns."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            self._read(stream)
            if Run.of_row(row) in self._done:
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
                run = Run.of_row(row)
            except (ValueError, KeyError, TypeError):
                raise UserError(
                    f"{self.path}, line {len(self.rows) + 1}: not a run written by tasks.glue; choose another "
                    "--output-dir, or take this line out"
                ) from None
            self.rows.append(row)
            self._done.add(run)
        self._offset += len(whole)
