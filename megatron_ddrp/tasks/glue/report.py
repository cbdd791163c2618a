"""table.md, table.json and table.png: per task the median over the seeds at the best grid point, one row per encoder.

A grid point is all that decides a run but its seed; the best one has the highest median of the last epoch's scores
among those with the most seeds. An undefined score counts as 0 (`runs.count_undefined`), and the table marks how many
there were. An average is shown only where all of its tasks are: of 8 columns, as the paper prints it, with MNLI as one
number (the matched set), and of 9, matched and mismatched apart. The paper's rows stand below where a development set
is the official one.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from megatron_ddrp.tasks import markdown
from megatron_ddrp.tasks.glue.paper import PAPER_AVERAGES, PAPER_SCORES
from megatron_ddrp.tasks.glue.runs import Run
from megatron_ddrp.tasks.glue.tasks import PAPER_TASKS, TASKS

MISMATCHED = "dev_mismatched"


@dataclass(frozen=True)
class Cell:
    """One encoder on one task at its best grid point."""

    task: str
    rows: list[dict[str, Any]]
    """Lines of runs.jsonl as `RunStore` reads them, one per seed."""

    @property
    def scores(self) -> list[float]:
        """The last epoch's scores as fractions, one per seed."""
        return [row["score"] for row in self.rows]

    @property
    def median(self) -> float:
        """Median of the scores."""
        return statistics.median(self.scores)

    @property
    def undefined(self) -> int:
        """Number of scores that are undefined and count as 0."""
        return sum(row["undefined"] for row in self.rows)

    @property
    def is_official(self) -> bool:
        """Whether the development set is as large as the released one."""
        return self.rows[0]["dev_examples"] == TASKS[self.task].dev_examples

    @property
    def others(self) -> dict[str, list[float]]:
        """Scores of further development files (MNLI's mismatched one)."""
        return {name: [row["other_scores"][name] for row in self.rows] for name in self.rows[0].get("other_scores", {})}

    def other_undefined(self, file: str) -> int:
        """Return how many scores of a further development file are undefined."""
        return sum(file in row["other_undefined"] for row in self.rows)


Cells = dict[str, Cell]


def best_cells(rows: Iterable[dict[str, Any]]) -> dict[str, Cells]:
    """Return encoder's name → task → its cell at the best grid point, tasks in the table's order."""
    known = {Run.of_row(row): row for row in rows}  # the same run in two folders counts once
    names: dict[str, set[str]] = {}
    # Scores on other data, at another length or from fewer rows than the newest run's have no place in one median.
    newest: dict[tuple[str, str], tuple[Any, ...]] = {}
    for run, row in known.items():
        names.setdefault(row["load"], set()).add(run.encoder)
        newest[run.encoder, run.task] = _conditions(run)
    groups: dict[str, dict[str, dict[Run, list[dict[str, Any]]]]] = {}
    for run, row in known.items():
        if _conditions(run) != newest[run.encoder, run.task]:
            continue
        name = f"{row['load']} ({run.encoder[:8]})" if len(names[row["load"]]) > 1 else row["load"]
        groups.setdefault(name, {}).setdefault(run.task, {}).setdefault(replace(run, seed=0), []).append(row)
    return {name: {task: _best(task, tasks[task]) for task in TASKS if task in tasks} for name, tasks in groups.items()}


def _conditions(run: Run) -> tuple[Any, ...]:
    return run.data, run.max_seq_length, run.max_train_examples


def _best(task: str, points: dict[Run, list[dict[str, Any]]]) -> Cell:
    def rank(point: Run) -> tuple[int, float, int]:
        cell = Cell(task, points[point])
        return len(cell.rows), cell.median, -cell.undefined

    point = max(sorted(points, key=lambda run: (run.point, run.name)), key=rank)
    return Cell(task, sorted(points[point], key=lambda row: row["seed"]))


def averages(cells: Cells) -> dict[str, float | None]:
    """Return the two averages over the paper's tasks, each None unless every one of its columns is there."""
    if not cells.keys() >= set(PAPER_TASKS):
        return {"average of 8": None, "average of 9": None}
    eight = [cells[task].median for task in PAPER_TASKS]
    mismatched = cells["MNLI"].others.get(MISMATCHED)
    nine = None if mismatched is None else statistics.fmean([*eight, statistics.median(mismatched)])
    return {"average of 8": statistics.fmean(eight), "average of 9": nine}


@dataclass(frozen=True)
class Difference:
    """Mean score over the common tasks of `first` minus that of `second`, paired by seed."""

    first: str
    second: str
    tasks: list[str]
    by_seed: list[float]
    low: float
    high: float
    """Student's 95 % interval of the mean over the seeds."""

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return statistics.fmean(self.by_seed)


def differences(encoders: dict[str, Cells]) -> list[Difference]:
    """Return the difference of every two encoders with common tasks and at least two common seeds."""
    found = []
    for first, second in combinations(encoders, 2):
        tasks = [task for task in encoders[first] if task in encoders[second]]
        pairs = [_by_seed(encoders[name], tasks) for name in (first, second)]
        seeds = sorted(pairs[0].keys() & pairs[1].keys())
        if not tasks or len(seeds) < 2:
            continue
        values = [pairs[0][seed] - pairs[1][seed] for seed in seeds]
        low, high = student_interval(values)
        found.append(Difference(first, second, tasks, values, low, high))
    return found


def _by_seed(cells: Cells, tasks: list[str]) -> dict[int, float]:
    """Return seed → mean over `tasks`, for the seeds that every task has."""
    scores = {task: {row["seed"]: row["score"] for row in cells[task].rows} for task in tasks}
    seeds = set.intersection(*(set(by_seed) for by_seed in scores.values())) if scores else set()
    return {seed: statistics.fmean(scores[task][seed] for task in tasks) for seed in seeds}


def student_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the mean of at least two values."""
    from scipy.stats import t

    half = float(t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    mean = statistics.fmean(values)
    return mean - half, mean + half


def write_report(rows: Iterable[dict[str, Any]], folder: Path, damage: Sequence[str] = ()) -> str:
    """Write table.md, table.json and, with matplotlib, table.png into `folder`; return the text to show.

    `damage` are sentences about runs that are left out or could not be checked; table.md ends with them.
    """
    encoders = best_cells(rows)
    folder.mkdir(parents=True, exist_ok=True)
    text = table(encoders)
    if damage:
        text += "\n".join(["", "## Damage found", "", *(f"- {markdown.escape(sentence)}" for sentence in damage), ""])
    (folder / "table.md").write_text(text, encoding="utf-8")
    (folder / "table.json").write_text(json.dumps(summary(encoders), indent=2) + "\n", encoding="utf-8")
    try:
        from megatron_ddrp.tasks.glue.figure import draw
    except ImportError:
        return f"\n{text}\nwritten to {folder / 'table.md'}; the figure needs matplotlib"
    draw(encoders, folder / "table.png")
    return f"\n{text}\nwritten to {folder / 'table.md'}, .json and .png"


def summary(encoders: dict[str, Cells]) -> dict[str, Any]:
    """Return the content of table.json: the table's numbers as fractions, an average null where a task is missing."""
    result: dict[str, Any] = {"encoders": {}, "differences": []}
    for name, cells in encoders.items():
        tasks = {
            task: {
                "metric": TASKS[task].metric,
                "median": cell.median,
                "scores": cell.scores,
                "undefined": cell.undefined,
                "seeds": [row["seed"] for row in cell.rows],
                "best_epoch_median": statistics.median(row["best_epoch_score"] for row in cell.rows),
                "other_medians": {file: statistics.median(scores) for file, scores in cell.others.items()},
                "point": {key: cell.rows[0][key] for key in ("batch_size", "lr", "epochs")},
                "dev_examples": cell.rows[0]["dev_examples"],
            }
            for task, cell in cells.items()
        }
        result["encoders"][name] = {"tasks": tasks, **averages(cells)}
    for pair in differences(encoders):
        result["differences"].append({**vars(pair), "mean": pair.mean})
    result["paper"] = {name: {**scores, "average of 8": PAPER_AVERAGES[name]} for name, scores in PAPER_SCORES.items()}
    return result


def table(encoders: dict[str, Cells]) -> str:
    """Return the text of table.md."""
    tasks = [name for name in TASKS if any(name in cells for cells in encoders.values())]
    lines = [
        "# GLUE development scores",
        "",
        "Median over seeds of the last epoch's score at the best grid point, x 100. Matthews' correlation for CoLA, "
        "Pearson's for STS-B, accuracy otherwise; MNLI is the matched set. The average of 8 is the paper's. A score "
        "that is undefined (a constant guess, or training that diverged) counts as 0 and is marked.",
        "",
    ]
    means = {name: averages(cells) for name, cells in encoders.items()}
    shown = [
        kind for kind in ("average of 8", "average of 9") if any(mean[kind] is not None for mean in means.values())
    ]
    lines += markdown.header(["encoder", *tasks, *shown])
    for name, cells in encoders.items():
        scores = [_score(cells[task]) if task in cells else "" for task in tasks]
        shown_means = ["" if mean is None else percent(mean) for mean in (means[name][kind] for kind in shown)]
        lines.append(markdown.row([markdown.escape(name), *scores, *shown_means]))
    lines += ["", "## Runs behind each score", ""]
    lines += markdown.header(
        ["encoder", "task", "metric", "median", "min to max", "best epoch, median", "seeds", "undefined"]
        + ["batch", "lr", "epochs", "train examples", "dev examples"]
    )
    for name, cells in encoders.items():
        for cell in cells.values():
            lines += _details(name, cell)
    if pairs := differences(encoders):
        lines += [
            "",
            "## Differences",
            "",
            "Mean over the common tasks, paired by seed, with Student's 95 % interval.",
            "",
        ]
        lines += markdown.header(["encoder", "minus", "tasks", "seeds", "difference", "95 % interval"])
        for pair in pairs:
            counts = [str(len(pair.tasks)), str(len(pair.by_seed))]
            interval = f"{percent(pair.low)} to {percent(pair.high)}"
            names = [markdown.escape(pair.first), markdown.escape(pair.second)]
            lines.append(markdown.row([*names, *counts, percent(pair.mean), interval]))
    if any(task in PAPER_TASKS and cell.is_official for cells in encoders.values() for task, cell in cells.items()):
        lines += ["", "## The paper's scores, not ours", "", "Base size, Tables 1 to 3 of the paper.", ""]
        lines += markdown.header(["the paper's encoder", *PAPER_TASKS, "average of 8"])
        for name, scores_there in PAPER_SCORES.items():
            cells_there = [f"{scores_there[task]:.2f}" for task in PAPER_TASKS]
            lines.append(markdown.row([f"{name} (paper)", *cells_there, f"{PAPER_AVERAGES[name]:.2f}"]))
    return "\n".join(lines) + "\n"


def _score(cell: Cell) -> str:
    return percent(cell.median) + (f" ({cell.undefined} undefined)" if cell.undefined else "")


def _details(name: str, cell: Cell) -> list[str]:
    best_epoch = percent(statistics.median(row["best_epoch_score"] for row in cell.rows))
    lines = [_detail(name, cell, cell.task, cell.scores, best_epoch, str(cell.undefined))]
    for file, scores in cell.others.items():
        lines.append(_detail(name, cell, f"{cell.task} ({file})", scores, "", str(cell.other_undefined(file))))
    if MISMATCHED in cell.others:
        both = [statistics.fmean(pair) for pair in zip(cell.scores, cell.others[MISMATCHED], strict=True)]
        lines.append(_detail(name, cell, f"{cell.task} (mean of both)", both, "", ""))
    return lines


def _detail(name: str, cell: Cell, label: str, scores: list[float], best_epoch: str, undefined: str) -> str:
    first, task = cell.rows[0], TASKS[cell.task]
    spread = f"{percent(min(scores))} to {percent(max(scores))}"
    point = [str(first["batch_size"]), f"{first['lr']:g}", str(first["epochs"])]
    official = "" if cell.is_official else f" (official: {task.dev_examples})"
    examples = [str(first["train_examples"]), f"{first['dev_examples']}{official}" if best_epoch else ""]
    middle = percent(statistics.median(scores))
    names = [markdown.escape(name), markdown.escape(label), task.metric]
    return markdown.row([*names, middle, spread, best_epoch, str(len(scores)), undefined, *point, *examples])


def percent(score: float) -> str:
    """Return a fraction times 100 with two decimals."""
    return f"{100 * score:.2f}"
