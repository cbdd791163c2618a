"""Runs of a sweep, and runs.jsonl, the store of finished runs.

One line is one finished run. Everything that affects its score (weights, data, hyper-parameters, seed) identifies a
run. So a restarted sweep repeats nothing, and new weights under an old name are never mistaken for the old ones.

An undefined score counts as 0 in medians, averages and the choice of the grid point, and is marked: one seed at 0.50
with four collapsed seeds is worse than five seeds at 0.45. By the metric of a plug-in it counts as -1, the worst score.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_ddrp.data.randomness import hash_uint64
from megatron_ddrp.tasks.jobs.store import Row, Store, digest

RUNS = "runs.jsonl"


@dataclass(frozen=True)
class Point:
    """Point of the hyper-parameter grid."""

    batch_size: int
    lr: float
    epochs: int


GRIDS: dict[str, dict[str, tuple[Any, ...]]] = {
    "paper": {"batch_size": (16, 32), "lr": (1e-5, 2e-5, 3e-5), "epochs": (4, 6)},
    "quick": {"batch_size": (32,), "lr": (3e-5,), "epochs": (4,)},
}
"""Values of the fields of `Point`: the grid of the paper's appendix B, and a single point for a first look."""


@dataclass(frozen=True)
class Run:
    """Everything that determines a score."""

    task: str
    batch_size: int
    lr: float
    epochs: int
    seed: int
    max_seq_length: int
    encoder: str
    """Fingerprint of the encoder."""
    data: str
    """Fingerprint of the task's files."""
    micro_batch_size: int
    """Rows per forward and backward pass; a batch is the sum of its micro-batches."""
    layerwise_lr_decay: float = 1.0
    precision: str = "fp32"
    max_train_examples: int | None = None
    """Number of training rows to use; None for all."""
    head: str = "common"
    """Head on top of the encoder: `common` (the head in `heads.py`) or `family` (the head of the encoder's family)."""

    scales_labels: bool = False
    """True if a regression learns the labels minus their mean, divided by their standard deviation."""

    @cached_property
    def name(self) -> str:
        """File name that no other run has."""
        facts = asdict(self)
        if self.head == "common":  # runs of earlier versions had no other
            del facts["head"]
        if not self.scales_labels:  # nor this
            del facts["scales_labels"]
        return f"{self.task}-b{self.batch_size}-lr{self.lr:g}-e{self.epochs}-s{self.seed}-{digest(facts)}"

    def seed_of(self, purpose: str, *counters: int) -> int:
        """Return the seed of one of the run's random draws."""
        return int(hash_uint64(self.seed, purpose, *counters).item()) >> 1

    @classmethod
    def of_row(cls, row: dict[str, Any]) -> Run:
        """Return the run of a line of runs.jsonl."""
        return cls(**{"head": "common"} | {name: row[name] for name in cls.__dataclass_fields__ if name in row})


class RunStore(Store):
    """Store of finished runs in runs.jsonl."""

    def __init__(self, path: Path, on_damage: Callable[[str], None] | None = None, tasks: Container[str] | None = None):
        """Read the finished runs. With `tasks`, lines of other tasks count as damaged; `Store` explains `on_damage`.

        Raises:
            UserError: a line is damaged or of another task, and there is no `on_damage`.
        """

        def read(row: Row) -> Row:
            if tasks is not None and row["task"] not in tasks:
                raise ValueError(f"no task {row['task']!r}")
            return count_undefined(row)

        super().__init__(path, lambda row: Run.of_row(row).name, "a run of this program", read, on_damage)


_KINDS: dict[str, Any] = {
    "task": str, "batch_size": int, "lr": (int, float), "epochs": int, "seed": int, "max_seq_length": int,
    "encoder": str, "data": str, "micro_batch_size": int, "layerwise_lr_decay": (int, float), "precision": str,
    "load": str, "metric": str, "train_examples": int, "dev_examples": int, "seconds": (int, float),
}  # fmt: skip
"""Required keys of a line and their types."""


def count_undefined(row: dict[str, Any], undefined: float = 0.0) -> dict[str, Any]:
    """Return a row with undefined scores (null) replaced by the score `undefined` and marked.

    `undefined` marks `score`; `other_undefined` lists the files with undefined `other_scores`. A row that was converted
    before stays the same. Raises KeyError, TypeError or ValueError if the row is not a finished run.
    """
    if wrong := [key for key, kind in _KINDS.items() if not isinstance(row[key], kind)]:
        raise TypeError(f"{wrong[0]} is {row[wrong[0]]!r}")
    epochs = [_count(score, undefined) for score in row["epoch_scores"]]
    best = max(epochs)
    counted = row | {
        "score": _count(row["score"], undefined),
        "undefined": bool(row.get("undefined", row["score"] is None)),
        "best_epoch_score": best,
        "best_epoch": epochs.index(best) + 1,
        "epoch_scores": epochs,
    }
    if "other_scores" in row:
        others = row["other_scores"]
        counted["other_scores"] = {file: _count(score, undefined) for file, score in others.items()}
        counted["other_undefined"] = row.get("other_undefined", [file for file in others if others[file] is None])
    return counted


def _count(score: Any, undefined: float) -> float:
    if score is None:
        return undefined
    if not math.isfinite(score):
        raise ValueError(f"a score is {score}")
    return float(score)
