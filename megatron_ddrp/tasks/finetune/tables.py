"""Tables of a sweep: scores, gains over random weights, the runs behind each score, differences, the paper's scores.

Differences between encoders: over common tasks paired by seed, and to the same encoder with random weights.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple

from megatron_ddrp.encoders.encoder import with_random_weights
from megatron_ddrp.pages.markdown import Table, percent
from megatron_ddrp.tasks.finetune.cells import Cell, Cells, task_order
from megatron_ddrp.tasks.finetune.predictions import Interval, Items
from megatron_ddrp.tasks.finetune.suite import Suite
from megatron_ddrp.tasks.statistics import EQUAL_SEEDS, Difference, judge, pair_by_seed

DETAILS = [
    "encoder", "task", "metric", "median", "min to max", "95 % over items", "best epoch, median", "seeds", "undefined",
    "batch", "lr", "epochs", "row length", "train examples", "dev examples",
]  # fmt: skip
"""Columns of the table of the runs behind each score."""
DIFFERENCES = [
    "encoder", "minus", "tasks", "seeds", "difference", "95 % over seeds", "95 % over items", "the encoder is",
]  # fmt: skip
"""Columns of the table of differences."""


def all_tables(encoders: dict[str, Cells], suite: Suite, items: Items) -> dict[str, Table | None]:
    """Return the tables of the page by name."""
    details = [
        line
        for name, cells in encoders.items()
        for cell in cells.values()
        for line in _details(name, cell, suite, items)
    ]
    gained = [
        [gain.encoder, gain.pretrained.task, gain.pretrained.score_name]
        + [_score(cell, items) for cell in (gain.pretrained, gain.random)]
        + ["undefined" if gain.difference is None else f"{100 * gain.difference:+.2f}"]
        for gain in gains(encoders)
    ]
    return {
        "scores": _scores(encoders, suite, items),
        "gains": Table(["encoder", "task", "metric", "pre-trained", "random weights", "difference"], gained),
        "runs": Table(DETAILS, details),
        "differences": _differences(differences(encoders, items)),
        "paper": suite.published_table(encoders),
    }


def _scores(encoders: dict[str, Cells], suite: Suite, items: Items) -> Table:
    """Return the table of medians, one row per encoder, with a last row of constant guesses if any are known."""
    tasks = task_order(encoders, suite.order)
    means = {name: suite.means(cells) for name, cells in encoders.items()}
    shown = [kind for kind in suite.averages if any(mean[kind] is not None for mean in means.values())]
    rows = [
        [name, *(_score(cells[task], items) if task in cells else "" for task in tasks)]
        + [percent(means[name][kind]) for kind in shown]
        for name, cells in encoders.items()
    ]
    guesses = {task: items.guess(cell) for cells in encoders.values() for task, cell in cells.items()}
    if any(guess is not None for guess in guesses.values()):
        rows.append(["(constant guess)", *(percent(guesses[task]) for task in tasks), *[""] * len(shown)])
    return Table(["encoder", *tasks, *shown], rows)


def _differences(pairs: list[Pair]) -> Table:
    rows = [
        [pair.first, pair.second, str(len(pair.tasks)), str(len(pair.difference.values))]
        + [percent(pair.difference.mean), _interval(pair.difference.interval) or EQUAL_SEEDS]
        + [_interval(pair.over_items), pair.word]
        for pair in pairs
    ]
    return Table(DIFFERENCES, rows, wordy=[1, len(DIFFERENCES) - 1])


def _score(cell: Cell, items: Items) -> str:
    """Return a cell's median, with its faults in words."""
    guess = items.guess(cell)
    remarks = [f"{cell.undefined} undefined"] * bool(cell.undefined)
    remarks += ["below a constant guess"] * (guess is not None and cell.median < guess)
    return percent(cell.median) + (f" ({', '.join(remarks)})" if remarks else "")


def _interval(interval: Interval | None) -> str:
    return " to ".join(map(percent, interval or ()))


def _details(name: str, cell: Cell, suite: Suite, items: Items) -> list[list[str]]:
    """Return the rows of a cell in the table of runs: by the task's metric, by further metrics, on further files."""
    best_epoch = percent(statistics.median(row["best_epoch_score"] for row in cell.rows))
    first, size = cell.rows[0], suite.official_size(cell.task)
    point = [str(first["batch_size"]), f"{first['lr']:g}", str(first["epochs"])]
    point += [str(first["max_seq_length"]), str(first["train_examples"])]
    official = "" if size in (None, first["dev_examples"]) else f" (official: {size})"

    def row(label: str, scores: list[float], undefined: str, *facts: str, metric: str = cell.score_name) -> list[str]:
        interval, best, examples = facts or ("", "", "")
        spread = f"{percent(min(scores))} to {percent(max(scores))}"
        middle = percent(statistics.median(scores))
        return [name, label, metric, middle, spread, interval, best, str(len(scores)), undefined, *point, examples]

    own = _interval(items.of_cell(cell)), best_epoch, f"{first['dev_examples']}{official}"
    rows = [row(cell.task, cell.scores, str(cell.undefined), *own)]
    rows += [row(cell.task, scores, "", metric=metric) for metric, scores in cell.beside.items()]
    for file, scores in cell.others.items():
        rows.append(row(f"{cell.task} ({file})", scores, str(cell.other_undefined(file))))
    return rows + [row(label, scores, "") for label, scores in suite.combined(cell).items()]


class Pair(NamedTuple):
    """Difference of two encoders' mean scores over their common tasks, by at least two seeds."""

    first: str
    second: str
    tasks: list[str]
    difference: Difference
    over_items: Interval | None
    """95 % interval of the mean difference from resampling development rows; None if predictions are missing."""
    word: str = ""
    """Judgement of the first encoder against the second, over seeds and within this table."""


def differences(encoders: dict[str, Cells], items: Items) -> list[Pair]:
    """Return the difference of every two encoders that share tasks with equal files and at least two seeds."""
    found = []
    for first, second in combinations(encoders, 2):
        tasks = [task for task in encoders[first] if task in encoders[second] and _alike(encoders, task, first, second)]
        difference = pair_by_seed(_by_seed(encoders[first], tasks), _by_seed(encoders[second], tasks))
        if difference and len(difference.values) > 1:
            seeds = difference.seeds
            runs = (_runs(encoders[name], tasks, seeds) for name in (first, second))
            over_items = items.of_difference(list(zip(*runs, strict=True)))
            found.append(Pair(first, second, tasks, difference, over_items))
    words = judge([pair.difference for pair in found])
    return [pair._replace(word=word) for pair, word in zip(found, words, strict=True)]


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
