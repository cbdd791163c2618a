"""Results per test item, and intervals over items, which show the effect of other test sentences."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ddrp.tasks.compare.runs import TrainingRun
from megatron_ddrp.tasks.finetune.cells import Cell
from megatron_ddrp.tasks.finetune.metrics import resampled_scores
from megatron_ddrp.tasks.finetune.predictions import read_predictions
from megatron_ddrp.tasks.finetune.runs import Run
from megatron_ddrp.tasks.finetune.task import Task
from megatron_ddrp.tasks.glue.tasks import TASKS
from megatron_ddrp.tasks.ladder.rows import Arm
from megatron_ddrp.tasks.minimal_pairs.jobs import SCORES_FILE, PairStore
from megatron_ddrp.tasks.minimal_pairs.results import cell as cell_of_pairs
from megatron_ddrp.tasks.minimal_pairs.results import over_pairs, over_paradigms
from megatron_ddrp.tasks.statistics import percentile_interval

Interval = tuple[float, float]
Paradigms = Mapping[str, np.ndarray]
"""Paradigm → 1.0 per right pair, 0.0 per wrong pair, `[pairs]`."""


class Items:
    """Outcomes of a plan's runs per item, by arm and seed."""

    def __init__(self) -> None:
        self._cells: dict[str, dict[Arm, dict[int, tuple[Cell, Path]]]] = defaultdict(lambda: defaultdict(dict))
        """Task → arm → seed → score with the folder of its predictions."""
        self._samples: dict[tuple[str, Arm, int], np.ndarray | None] = {}
        """Scores of the bootstrap samples of a task's rows, `[samples]`, computed when they are first needed."""
        self._pairs: dict[Arm, dict[int, Paradigms]] = defaultdict(dict)
        self._rows: dict[str, int] = {}
        """Task → number of rows of its development set."""

    def add_cell(self, task: str, run: TrainingRun, cell: Cell, folder: Path) -> None:
        """Add a score of a run and the folder of its predictions."""
        self._rows[task] = cell.rows[0]["dev_examples"]
        self._cells[task][run.arm][run.seed] = cell, folder

    def add_pairs(self, run: TrainingRun, paradigms: Paradigms) -> None:
        """Add the results of a run on minimal pairs, unless the file of scores is missing."""
        if paradigms:
            self._pairs[run.arm][run.seed] = paradigms

    def of_tasks(self, tasks: Collection[str], first: Arm, second: Arm, seeds: Sequence[int]) -> Interval | None:
        """Return the interval of `first` − `second` on resampled rows, averaged over the tasks and the seeds.

        Both models and all seeds are scored on the same samples. Return None if predictions are missing.
        """
        differences = []
        for task in tasks:
            for seed in seeds:
                ours, theirs = (self._samples_of(task, arm, seed) for arm in (first, second))
                if ours is None or theirs is None:
                    return None
                differences.append(ours - theirs)
        return percentile_interval(np.mean(differences, axis=0)) if differences else None

    def _samples_of(self, task: str, arm: Arm, seed: int) -> np.ndarray | None:
        """Return the scores of the samples `[samples]`; None if predictions are missing or damaged."""
        key = task, arm, seed
        if key not in self._samples:
            found = self._cells[task][arm].get(seed)
            self._samples[key] = _resampled(*found) if found else None
        return self._samples[key]

    def of_pairs(self, first: Arm, second: Arm, seeds: Sequence[int]) -> Interval | None:
        """Return the interval of `first` − `second` on resampled paradigms (of one: pairs), averaged over seeds.

        Return None if scores are missing.
        """
        ours, theirs = (
            [found[seed] for seed in seeds if seed in found]
            for found in (self._pairs.get(first, {}), self._pairs.get(second, {}))
        )
        if not seeds or len(ours) < len(seeds) or len(theirs) < len(seeds):
            return None
        gains = [np.mean([a[name] - b[name] for a, b in zip(ours, theirs, strict=True)], axis=0) for name in ours[0]]
        if len(gains) == 1:
            return over_pairs(gains[0])
        return over_paradigms(np.array([gain.mean() for gain in gains]))

    def accuracies(self, arm: Arm, seed: int) -> dict[str, float]:
        """Return paradigm → accuracy of a run on minimal pairs; empty if nothing is measured."""
        return {name: float(right.mean()) for name, right in self._pairs.get(arm, {}).get(seed, {}).items()}

    def count_rows(self, tasks: Collection[str]) -> int:
        """Return the number of development rows of some tasks."""
        return sum(self._rows.get(task, 0) for task in tasks)

    def pairs_by_paradigm(self, arm: Arm, seed: int) -> dict[str, int]:
        """Return the number of pairs by paradigm that a run was scored on; empty if it was not."""
        return {name: len(right) for name, right in self._pairs.get(arm, {}).get(seed, {}).items()}

    def count_pairs(self) -> tuple[int, int]:
        """Return the numbers of pairs and of paradigms; 0 if nothing is measured."""
        for by_seed in self._pairs.values():
            for found in by_seed.values():
                return sum(map(len, found.values())), len(found)
        return 0, 0


def read_right(folder: Path) -> Paradigms:
    """Return the right and wrong pairs in an output folder of `megatron-ddrp minimal-pairs` with one encoder."""
    return {
        row["paradigm"]: cell_of_pairs(row, "strict").right.astype(float) for row in PairStore(folder / SCORES_FILE)
    }


def _resampled(cell: Cell, folder: Path) -> np.ndarray | None:
    """Return the score of each bootstrap sample, the median over fine-tuning seeds, `[samples]`; None without all."""
    found = [samples for row in cell.rows if (samples := _resampled_run(row, folder)) is not None]
    return np.median(found, axis=0) if len(found) == len(cell.rows) else None


def _resampled_run(row: dict[str, Any], folder: Path) -> np.ndarray | None:
    path = folder / "predictions" / f"{Run.of_row(row).name}.tsv"
    try:
        task = Task.of(row["facts"]) if "facts" in row else TASKS[row["task"]]
        scored = read_predictions(path.read_bytes(), task)
    except (OSError, LookupError, TypeError, ValueError):
        return None
    return resampled_scores(task, *next(iter(scored.values())))
