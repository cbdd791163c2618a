"""Differences between encoders: over common tasks paired by seed, and to the same encoder with random weights."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple

from megatron_ddrp.encoders.names import with_random_weights
from megatron_ddrp.tasks.finetune.cells import Cell, Cells
from megatron_ddrp.tasks.finetune.items import Interval, Items
from megatron_ddrp.tasks.statistics import Difference, judge, paired


class Pair(NamedTuple):
    """Difference of two encoders' mean scores over their common tasks, by at least two seeds."""

    first: str
    second: str
    tasks: list[str]
    difference: Difference
    over_items: Interval | None
    """95 % interval of the mean difference from resampling development rows; None if predictions are missing."""


def differences(encoders: dict[str, Cells], items: Items) -> list[Pair]:
    """Return the difference of every two encoders that share tasks with equal files and at least two seeds."""
    found = []
    for first, second in combinations(encoders, 2):
        tasks = [task for task in encoders[first] if task in encoders[second] and _alike(encoders, task, first, second)]
        difference = paired(_by_seed(encoders[first], tasks), _by_seed(encoders[second], tasks))
        if difference and len(difference.values) > 1:
            seeds = difference.seeds
            runs = (_runs(encoders[name], tasks, seeds) for name in (first, second))
            over_items = items.of_difference(list(zip(*runs, strict=True)))
            found.append(Pair(first, second, tasks, difference, over_items))
    return found


def words(pairs: list[Pair]) -> list[str]:
    """Return how the first encoder of each pair compares with the second, judged over seeds within this table."""
    return judge([pair.difference for pair in pairs])


def _alike(encoders: dict[str, Cells], task: str, first: str, second: str) -> bool:
    """Return whether the runs of two encoders on a task had the same files, labels, metric and training rows."""
    one, other = (encoders[name][task].rows[0] for name in (first, second))
    return one["data"] == other["data"] and one.get("max_train_examples") == other.get("max_train_examples")


def unlike(encoders: dict[str, Cells], tasks: list[str]) -> list[str]:
    """Return one sentence per task and way in which the runs of encoders differ from those of the first encoder."""
    found = []
    for task in tasks:
        rows = {name: cells[task].rows[0] for name, cells in encoders.items() if task in cells}
        first, own = next(iter(rows.items()))
        files = [name for name in rows if rows[name]["data"] != own["data"]]
        if files:
            found.append(
                f"{task}: {', '.join(files)} had other files, labels or another metric than {first}; the scores "
                "are not comparable"
            )
        alike = [name for name in rows if name not in files]
        fewer = [name for name in alike if not _alike(encoders, task, first, name)]
        if fewer:
            told = ", ".join(f"{name} had {rows[name]['train_examples']:,} training rows" for name in fewer)
            found.append(f"{task}: {told}, {first} {own['train_examples']:,}; the scores are not comparable")
        shorter = [name for name in alike if rows[name]["max_seq_length"] != own["max_seq_length"]]
        if shorter:
            told = ", ".join(f"{name} read rows of up to {rows[name]['max_seq_length']} pieces" for name in shorter)
            found.append(f"{task}: {told}, {first} of up to {own['max_seq_length']}; the differences include this")
    return found


def _by_seed(cells: Cells, tasks: list[str]) -> dict[int, float]:
    """Return seed → mean over `tasks`, for the seeds that all tasks share."""
    scores = {task: {row["seed"]: row["score"] for row in cells[task].rows} for task in tasks}
    seeds = set.intersection(*(set(by_seed) for by_seed in scores.values())) if scores else set()
    return {seed: statistics.fmean(scores[task][seed] for task in tasks) for seed in seeds}


def _runs(cells: Cells, tasks: list[str], seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Return the lines of the runs on some tasks with some seeds, in this order."""
    return [next(row for row in cells[task].rows if row["seed"] == seed) for task in tasks for seed in seeds]


@dataclass(frozen=True)
class Gain:
    """Scores on one task of an encoder and of the same encoder with random weights."""

    encoder: str
    pretrained: Cell
    random: Cell

    @property
    def difference(self) -> float | None:
        """Median of the pre-trained encoder minus median of the random one; None if any score is undefined."""
        if self.pretrained.undefined or self.random.undefined:
            return None
        return self.pretrained.median - self.random.median


def gains(encoders: dict[str, Cells]) -> list[Gain]:
    """Return the gain from pre-training per task, for encoders that also ran with random weights, all else equal."""
    return [
        Gain(name, cell, twin)
        for name, cells in encoders.items()
        for task, cell in cells.items()
        for twin in [encoders.get(with_random_weights(name), {}).get(task)]
        if twin is not None and twin.conditions == cell.conditions
    ]
