"""File of a run's predictions for the development sets, and scores on resampled rows.

OUT/predictions/RUN.tsv has the columns file, index (the row's number from 0), prediction and label. Classes are written
by name, numbers with all digits, and a prediction that is not finite as `nan`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron_ddrp.data.atomic import write_bytes
from megatron_ddrp.errors import UserError
from megatron_ddrp.tasks.finetune.cells import Cell
from megatron_ddrp.tasks.finetune.kinds import KINDS
from megatron_ddrp.tasks.finetune.metrics import MOST_RESAMPLED
from megatron_ddrp.tasks.finetune.runs import Run
from megatron_ddrp.tasks.finetune.suite import Suite
from megatron_ddrp.tasks.finetune.task import Task
from megatron_ddrp.tasks.statistics import percentile_interval

HEADER = "file\tindex\tprediction\tlabel"

Scored = dict[str, tuple[Any, Any]]
"""Development file → (labels, predictions) in the form that the task's metric takes."""


def predictions_file(folder: Path, run: Run) -> Path:
    """Return the file of a run's predictions in an output folder."""
    return folder / "predictions" / f"{run.name}.tsv"


def write_predictions(path: Path, task: Task, scored: Scored) -> None:
    """Write a run's predictions."""
    kind, lines = KINDS[task.kind], [HEADER]
    for file, sides in scored.items():
        texts = (map(kind.text_of, kind.as_values(task, side)) for side in sides)
        lines += [f"{file}\t{row}\t{told}\t{label}" for row, (label, told) in enumerate(zip(*texts, strict=True))]
    write_bytes(path, ("\n".join(lines) + "\n").encode())


def read_predictions(content: bytes, task: Task) -> Scored:
    """Return the predictions in a file of `write_predictions`. Raises ValueError for any other content."""
    header, *lines = content.decode().removesuffix("\n").split("\n")
    if header != HEADER:
        raise ValueError(f"its first line is {header[:80]!r}")
    kind = KINDS[task.kind]
    found: dict[str, tuple[list[Any], list[Any]]] = {}
    for line in lines:
        file, index, prediction, label = line.split("\t")
        labels, predictions = found.setdefault(file, ([], []))
        if index != str(len(labels)):
            raise ValueError(f"{file}: row {index} is at the place of row {len(labels)}")
        labels.append(kind.value_of(task, label))
        predictions.append(kind.value_of(task, prediction))
    return {file: kind.read(task, *sides) for file, sides in found.items()}


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
        """Return the run of a line that has its `folder`; None if its predictions are missing, damaged or too many."""
        path = predictions_file(Path(row.get("folder", "")), Run.of_row(row))
        if path not in self._found:
            self._found[path] = self._read(row, path)
        return self._found[path]

    def _read(self, row: dict[str, Any], path: Path) -> Resampled | None:
        try:
            task = self._suite.task(row)
            answers, predictions = next(iter(read_predictions(path.read_bytes(), task).values()))
        except (OSError, StopIteration, UserError, ValueError):
            return None
        if len(answers) > MOST_RESAMPLED:
            return None
        kind, guess = KINDS[task.kind], row.get("baseline")
        if guess is None:
            guess = kind.constant_guess(task, answers)
        return Resampled(kind.resampled_scores(task, answers, predictions), guess)

    def samples(self, cell: Cell) -> np.ndarray | None:
        """Return a cell's median over seeds on each bootstrap sample, `[samples]`; None if predictions are missing."""
        found = [self.of_run(row) for row in cell.rows]
        samples = [each.samples for each in found if each]
        return np.median(samples, axis=0) if len(samples) == len(found) else None

    def of_cell(self, cell: Cell) -> Interval | None:
        """Return the 95 % interval of a cell's median over seeds; None if predictions are missing."""
        samples = self.samples(cell)
        return None if samples is None else percentile_interval(samples)

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
