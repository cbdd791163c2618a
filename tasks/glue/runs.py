"""The runs of a sweep: the paper's grid, and runs.jsonl, the store of the finished ones.

One line is one finished run. A run is known by what decides its score (weights, data, hyper-parameters, seed), so
that a restarted sweep repeats nothing, and other weights under an old name are never taken for the old ones.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tasks.store import Store


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


class RunStore(Store[Run]):
    """runs.jsonl of a sweep."""

    def __init__(self, path: Path):
        """Raises `UserError` where a line is not a run of this program."""
        super().__init__(path, Run.of_row, "a run written by tasks.glue")
