"""Cells of a table: the runs of one encoder on one task at the best grid point, one per seed.

A grid point is every setting of a run except its seed. The best point is the one with the highest median of the last
epoch's scores among the points with the most seeds. An undefined score counts as `Metric.undefined`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_ddrp.tasks.finetune.kinds import KINDS
from megatron_ddrp.tasks.finetune.runs import Run
from megatron_ddrp.tasks.finetune.task import Task


@dataclass(frozen=True)
class Cell:
    """Result of one encoder on one task at its best grid point."""

    task: str
    rows: list[dict[str, Any]]
    """Lines of runs.jsonl in the form of `RunStore`, one per seed."""

    @property
    def scores(self) -> list[float]:
        """Last epoch's scores as fractions, one per seed."""
        return [row["score"] for row in self.rows]

    @property
    def median(self) -> float:
        """Median of the scores."""
        return statistics.median(self.scores)

    @property
    def undefined(self) -> int:
        """Number of undefined scores, which count as `Metric.undefined`."""
        return sum(row["undefined"] for row in self.rows)

    @property
    def metric(self) -> str:
        """Name of the scores' metric."""
        return str(self.rows[0]["metric"])

    @property
    def score_name(self) -> str:
        """Metric as the tables show it (`Kind.score_name`); GLUE's keep its plain name."""
        facts = self.rows[0].get("facts")
        return KINDS[facts["kind"]].score_name(Task.of(facts)) if facts and facts["kind"] in KINDS else self.metric

    @property
    def others(self) -> dict[str, list[float]]:
        """Scores of further development files, such as MNLI's mismatched one."""
        return {name: [row["other_scores"][name] for row in self.rows] for name in self.rows[0].get("other_scores", {})}

    @property
    def beside(self) -> dict[str, list[float]]:
        """Scores by further metrics; an undefined score counts as 0."""
        rows = [row.get("beside", {}) for row in self.rows]
        return {name: [row[name] or 0.0 for row in rows] for name in rows[0] if all(name in row for row in rows)}

    @property
    def conditions(self) -> tuple[Any, ...]:
        """Data, row length, number of training rows and scaling of labels; scores are comparable if these are equal."""
        return _conditions(Run.of_row(self.rows[0]))

    def other_undefined(self, file: str) -> int:
        """Return the number of undefined scores of a further development file."""
        return sum(file in row["other_undefined"] for row in self.rows)


Cells = dict[str, Cell]


def best_cells(
    rows: Iterable[dict[str, Any]], order: Sequence[str] = (), asked: Iterable[Run] = ()
) -> dict[str, Cells]:
    """Return encoder's name → task → cell at the best grid point, tasks in `order`, others after them.

    A cell has only runs with the `conditions` of the encoder's newest run on the task. If some of its runs are `asked`
    for, it has no others.
    """
    known = {Run.of_row(row): row for row in rows}  # the same run in two folders counts once
    wanted = {run for run in asked if run in known}
    places = {(run.encoder, run.task) for run in wanted}
    known = {run: row for run, row in known.items() if run in wanted or (run.encoder, run.task) not in places}
    names: dict[str, set[str]] = {}
    # One median must not mix scores from different data, row lengths, numbers of training rows or scales of labels.
    newest = {(run.encoder, run.task): _conditions(run) for run in known}
    loads = {run.encoder: row["load"] for run, row in known.items()}  # the newest path of each encoder
    for encoder, load in loads.items():
        names.setdefault(load, set()).add(encoder)
    groups: dict[str, dict[str, dict[Run, list[dict[str, Any]]]]] = {}
    for run, row in known.items():
        if _conditions(run) != newest[run.encoder, run.task]:
            continue
        load = loads[run.encoder]
        name = f"{load} ({run.encoder[:8]})" if len(names[load]) > 1 else load
        groups.setdefault(name, {}).setdefault(run.task, {}).setdefault(replace(run, seed=0), []).append(row)
    return {
        name: {task: _best(task, tasks[task]) for task in dict.fromkeys([*order, *tasks]) if task in tasks}
        for name, tasks in groups.items()
    }


def task_order(encoders: dict[str, Cells], order: Sequence[str]) -> list[str]:
    """Return the tasks of all encoders, in `order`, others after them."""
    found = dict.fromkeys(task for cells in encoders.values() for task in cells)
    return [task for task in dict.fromkeys([*order, *found]) if task in found]


def _conditions(run: Run) -> tuple[Any, ...]:
    return run.data, run.max_seq_length, run.max_train_examples, run.scales_labels


def _best(task: str, points: dict[Run, list[dict[str, Any]]]) -> Cell:
    def rank(point: Run) -> tuple[int, float, int]:
        cell = Cell(task, points[point])
        return len(cell.rows), cell.median, -cell.undefined

    point = max(sorted(points, key=lambda run: (run.batch_size, run.lr, run.epochs, run.name)), key=rank)
    return Cell(task, sorted(points[point], key=lambda row: row["seed"]))
