"""table.md: per task the median over the seeds at the best grid point, one row an encoder.

The best grid point is the one with the highest median of the last epoch's scores. An undefined score stays undefined:
it takes no part in a median, and the table says how many there were. The average stands there only where all eight
tasks of the paper do.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tasks.glue.runs import Point
from tasks.glue.tasks import PAPER_TASKS, TASKS


@dataclass(frozen=True)
class Cell:
    """The scores of one encoder on one task at its best grid point; fractions, None where undefined."""

    task: str
    point: Point
    scores: list[float | None]
    """Of the last epoch, one a seed."""
    best_epoch_scores: list[float | None]
    other_scores: dict[str, list[float | None]]
    """Of further development files (MNLI's mismatched one)."""
    dev_examples: int

    @property
    def median(self) -> float | None:
        """Of the defined scores."""
        return median(self.scores)


def median(scores: Iterable[float | None]) -> float | None:
    """Median of the defined scores; None where there is none."""
    defined = [score for score in scores if score is not None]
    return statistics.median(defined) if defined else None


def best_cells(rows: Iterable[dict[str, Any]]) -> dict[str, dict[str, Cell]]:
    """Encoder's name → task → its cell at the best grid point, tasks in the table's order."""
    groups: dict[str, dict[str, dict[Point, list[dict[str, Any]]]]] = {}
    rows = list(rows)
    fingerprints: dict[str, set[str]] = {}
    for row in rows:
        fingerprints.setdefault(row["load"], set()).add(row["encoder"])
    # Scores on other data or at another length than the newest run's do not belong in the same median.
    newest = {(row["encoder"], row["task"]): (row["data"], row["max_seq_length"]) for row in rows}
    for row in rows:
        if newest[row["encoder"], row["task"]] != (row["data"], row["max_seq_length"]):
            continue
        several = len(fingerprints[row["load"]]) > 1
        name = f"{row['load']} ({row['encoder'][:8]})" if several else row["load"]
        point = Point(row["batch_size"], row["lr"], row["epochs"])
        groups.setdefault(name, {}).setdefault(row["task"], {}).setdefault(point, []).append(row)
    return {name: {task: _best(task, tasks[task]) for task in TASKS if task in tasks} for name, tasks in groups.items()}


def _best(task: str, points: dict[Point, list[dict[str, Any]]]) -> Cell:
    def rank(point: Point) -> tuple[bool, float]:
        value = median(row["score"] for row in points[point])
        return value is not None, value or 0.0

    point = max(sorted(points), key=rank)
    rows = sorted(points[point], key=lambda row: row["seed"])
    others = list(rows[0].get("other_scores", {}))
    return Cell(
        task,
        point,
        [row["score"] for row in rows],
        [row["best_epoch_score"] for row in rows],
        {name: [row["other_scores"][name] for row in rows] for name in others},
        rows[0]["dev_examples"],
    )


def average(cells: dict[str, Cell]) -> float | None:
    """The paper's average over its eight tasks, MNLI as the matched score; None unless all eight are there."""
    medians = [cells[task].median if task in cells else None for task in PAPER_TASKS]
    defined = [value for value in medians if value is not None]
    return statistics.fmean(defined) if len(defined) == len(PAPER_TASKS) else None


def table(rows: Iterable[dict[str, Any]]) -> str:
    """The text of table.md."""
    encoders = best_cells(rows)
    tasks = [name for name in TASKS if any(name in cells for cells in encoders.values())]
    lines = [
        "# GLUE development scores",
        "",
        "Median over seeds of the last epoch's score at the best grid point, x 100. Matthews' correlation for CoLA, "
        "Pearson's for STS-B, accuracy otherwise; MNLI is the matched set.",
        "",
    ]
    averages = {name: average(cells) for name, cells in encoders.items()}
    has_average = any(mean is not None for mean in averages.values())
    header = ["encoder", *tasks] + ["average of 8"] * has_average
    lines += [_row(header), _row(["---"] + ["---:"] * (len(header) - 1))]
    for name, cells in encoders.items():
        scores = [percent(cells[task].median) if task in cells else "" for task in tasks]
        if has_average:
            mean = averages[name]
            scores.append("" if mean is None else percent(mean))
        lines.append(_row([name, *scores]))
    header = ["encoder", "task", "metric", "median", "min to max", "best epoch, median", "seeds", "undefined"]
    header += ["batch", "lr", "epochs", "dev examples"]
    lines += ["", "## Runs behind each score", "", _row(header), _row(["---"] * len(header))]
    for name, cells in encoders.items():
        for cell in cells.values():
            lines.append(_detail(name, cell.task, cell, cell.scores, percent(median(cell.best_epoch_scores))))
            for file, scores_there in cell.other_scores.items():
                lines.append(_detail(name, f"{cell.task} ({file})", cell, scores_there, ""))
    return "\n".join(lines) + "\n"


def _detail(name: str, task: str, cell: Cell, scores: list[float | None], best_epoch: str) -> str:
    defined = [score for score in scores if score is not None]
    spread = f"{percent(min(defined))} to {percent(max(defined))}" if defined else ""
    counts = [str(len(scores)), str(len(scores) - len(defined))]
    point = [str(cell.point.batch_size), f"{cell.point.lr:g}", str(cell.point.epochs)]
    examples = str(cell.dev_examples) if best_epoch else ""
    metric = TASKS[cell.task].metric
    return _row([name, task, metric, percent(median(scores)), spread, best_epoch, *counts, *point, examples])


def percent(score: float | None) -> str:
    """A fraction times 100 with two decimals, or the word for what is none."""
    return "undefined" if score is None else f"{100 * score:.2f}"


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"
