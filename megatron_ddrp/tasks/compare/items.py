"""Scores of finished jobs on bootstrap samples of their test items."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from megatron_ddrp.tasks.finetune.cells import Cell
from megatron_ddrp.tasks.finetune.kinds import KINDS
from megatron_ddrp.tasks.finetune.predictions import read_predictions
from megatron_ddrp.tasks.finetune.runs import Run
from megatron_ddrp.tasks.finetune.task import Task
from megatron_ddrp.tasks.glue.tasks import TASKS
from megatron_ddrp.tasks.minimal_pairs.jobs import SCORES_FILE, PairStore
from megatron_ddrp.tasks.minimal_pairs.results import cell as cell_of_pairs
from megatron_ddrp.tasks.statistics import BOOTSTRAP_SAMPLES, BOOTSTRAP_SEED


def task_samples(cell: Cell, folder: Path) -> np.ndarray | None:
    """Return a score of each sample, the median over fine-tuning seeds; None if predictions are missing or damaged."""
    found = [_run_samples(row, folder) for row in cell.rows]
    known = [samples for samples in found if samples is not None]
    return np.median(known, axis=0) if found and len(known) == len(found) else None


def _run_samples(row: dict[str, Any], folder: Path) -> np.ndarray | None:
    path = folder / "predictions" / f"{Run.of_row(row).name}.tsv"
    try:
        task = Task.of(row["facts"]) if "facts" in row else TASKS[row["task"]]
        scored = read_predictions(path.read_bytes(), task)
    except (OSError, LookupError, TypeError, ValueError):
        return None
    return KINDS[task.kind].resampled_scores(task, *next(iter(scored.values())))


def pair_samples(folder: Path) -> np.ndarray | None:
    """Return the accuracy on resampled pairs of a single paradigm; None for several, which are resampled themselves.

    `folder` is the output of `megatron-ddrp minimal-pairs` with one encoder. As there, deviations are multiplied by
    √(n/(n − 1)) for n pairs.
    """
    rows = list(PairStore(folder / SCORES_FILE))
    if len(rows) != 1:
        return None
    right = cell_of_pairs(rows[0], "strict").right.astype(float)
    count = len(right)
    if count < 2:
        return None
    drawn = np.random.default_rng(BOOTSTRAP_SEED).integers(count, size=(BOOTSTRAP_SAMPLES, count))
    return right.mean() + np.sqrt(count / (count - 1)) * (right[drawn].mean(axis=1) - right.mean())
