"""Scores on resampled development rows and of a constant guess, read from the files of predictions of finished runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron_ddrp.errors import UserError
from megatron_ddrp.tasks.finetune.cells import Cell
from megatron_ddrp.tasks.finetune.kinds import KINDS
from megatron_ddrp.tasks.finetune.predictions import read_predictions
from megatron_ddrp.tasks.finetune.runs import Run
from megatron_ddrp.tasks.finetune.suite import Suite
from megatron_ddrp.tasks.statistics import percentile_interval

Interval = tuple[float, float]


class Resampled(NamedTuple):
    """Run on resampled rows of its first development file."""

    samples: np.ndarray
    """Score on each bootstrap sample, `[samples]`."""
    guess: float | None
    """Score of a constant guess on all rows; None for kinds of tasks without one."""


class Items:
    """Runs on resampled rows, each read when it is first needed."""

    def __init__(self, suite: Suite) -> None:
        self._suite = suite
        self._found: dict[Path, Resampled | None] = {}

    def of_run(self, row: dict[str, Any]) -> Resampled | None:
        """Return the run of a line that has its `folder`; None if its predictions are missing or damaged."""
        path = Path(row.get("folder", "")) / "predictions" / f"{Run.of_row(row).name}.tsv"
        if path not in self._found:
            self._found[path] = self._read(row, path)
        return self._found[path]

    def _read(self, row: dict[str, Any], path: Path) -> Resampled | None:
        try:
            task = self._suite.task(row)
            answers, predictions = next(iter(read_predictions(path.read_bytes(), task).values()))
        except (OSError, StopIteration, UserError, ValueError):
            return None
        kind, guess = KINDS[task.kind], row.get("baseline")
        if guess is None:
            guess = kind.constant_guess(task, answers)
        return Resampled(kind.resampled_scores(task, answers, predictions), guess)

    def of_cell(self, cell: Cell) -> Interval | None:
        """Return the 95 % interval of a cell's median over seeds; None if predictions are missing."""
        found = [self.of_run(row) for row in cell.rows]
        samples = [each.samples for each in found if each]
        return percentile_interval(np.median(samples, axis=0)) if len(samples) == len(found) else None

    def guess(self, cell: Cell) -> float | None:
        """Return the score of a constant guess on a cell's task; None if it is unknown."""
        found = self.of_run(cell.rows[0])
        return found.guess if found else cell.rows[0].get("baseline")

    def of_difference(self, pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> Interval | None:
        """Return the 95 % interval of the mean difference over pairs of runs; None if predictions are missing.

        Both runs of a pair are scored on the same samples.
        """
        found = [(self.of_run(first), self.of_run(second)) for first, second in pairs]
        differences = [first.samples - second.samples for first, second in found if first and second]
        return percentile_interval(np.mean(differences, axis=0)) if len(differences) == len(found) else None
