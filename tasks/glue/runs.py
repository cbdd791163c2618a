"""The runs of a sweep: the paper's grid, and runs.jsonl, the store of the finished ones.

One line is one finished run. A run is known by what decides its score (weights, data, hyper-parameters, seed), so
that a restarted sweep repeats nothing, and other weights under an old name are never taken for the old ones.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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


_KEY = tuple(Run.__dataclass_fields__)


class RunStore:
    """runs.jsonl, read once and then appended to, one synced line a finished run."""

    def __init__(self, path: Path):
        """Read what is there; an unfinished last line (a kill while writing) is cut off.

        Raises:
            UserError: another line is not a run of this program.
        """
        self.path = path
        self.rows: list[dict[str, Any]] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        raw = path.read_bytes() if path.is_file() else b""
        whole = raw[: raw.rfind(b"\n") + 1]
        if whole != raw:
            os.truncate(path, len(whole))
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                row = json.loads(line)
                self._key(row)
            except (ValueError, KeyError, TypeError):
                raise UserError(
                    f"{path}, line {number}: not a run written by tasks.glue; choose another --output-dir, "
                    "or take this line out"
                ) from None
            self.rows.append(row)
        self._done = {self._key(row) for row in self.rows}

    def __contains__(self, run: Run) -> bool:
        return self._key(asdict(run)) in self._done

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)

    def append(self, row: dict[str, Any]) -> None:
        """Add a finished run; it is on the disk when this returns."""
        self._done.add(self._key(row))
        self.rows.append(row)
        with self.path.open("ab") as stream:
            stream.write(json.dumps(row).encode() + b"\n")
            stream.flush()
            os.fsync(stream.fileno())

    @staticmethod
    def _key(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row[name] for name in _KEY)
