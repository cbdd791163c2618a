"""table.md, table.json and table.png: per task the median over the seeds at the best grid point, one row an encoder.

A grid point is all that decides a run but its seed; the best one has the highest median of the last epoch's scores
among those with the most seeds. An undefined score stays undefined: it takes no part in a median, and the table says
how many there were. An average stands there only where all of its tasks do: of 8 columns, as the paper prints it, with
MNLI as one number (the matched set), and of 9, matched and mismatched apart. The paper's rows stand below where a
development set is the official one.
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

from tasks.glue.paper import PAPER_AVERAGES, PAPER_SCORES
from tasks.glue.runs import Run
from tasks.glue.tasks import PAPER_TASKS, TASKS

MISMATCHED = "dev_mismatched"


@dataclass(frozen=True)
class Cell:
    """One encoder on one task at its best grid point."""

    task: str
    rows: list[dict[str, Any]]
    """Lines of runs.jsonl, one a seed."""

    @property
    def scores(self) -> list[float | None]:
        """Of the last epoch, as fractions, None where undefined; one a seed."""
        return [row["score"] for row in self.rows]

    @property
    def median(self) -> float | None:
        """Of the defined scores."""
        return median(self.scores)

    @property
    def is_official(self) -> bool:
        """Whether the development set is as large as the released one."""
        return self.rows[0]["dev_examples"] == TASKS[self.task].dev_examples

    @property
    def others(self) -> dict[str, list[float | None]]:
        """Scores of further development files (MNLI's mismatched one)."""
        return {name: [row["other_scores"][name] for row in self.rows] for name in self.rows[0].get("other_scores", {})}


Cells = dict[str, Cell]


def median(scores: Iterable[float | None]) -> float | None:
    """Median of the defined scores; None where there is none."""
    defined = [score for score in scores if score is not None]
    return statistics.median(defined) if defined else None


def best_cells(rows: Iterable[dict[str, Any]]) -> dict[str, Cells]:
    """Encoder's name → task → its cell at the best grid point, tasks in the table's order."""
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
    def rank(point: Run) -> tuple[int, bool, float]:
        value = median(row["score"] for row in points[point])
        return len(points[point]), value is not None, value or 0.0

    point = max(sorted(points, key=lambda run: (run.point, run.name)), key=rank)
    return Cell(task, sorted(points[point], key=lambda row: row["seed"]))


def averages(cells: Cells) -> dict[str, float | None]:
    """The two averages over the paper's tasks, each None unless every one of its columns is there and defined."""
    eight = [cells[task].median if task in cells else None for task in PAPER_TASKS]
    mismatched = median(cells["MNLI"].others.get(MISMATCHED, ())) if "MNLI" in cells else None
    return {"average of 8": _mean(eight), "average of 9": _mean([*eight, mismatched])}


def _mean(values: Sequence[float | None]) -> float | None:
    defined = [value for value in values if value is not None]
    return statistics.fmean(defined) if defined and len(defined) == len(values) else None


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
    """Of every two encoders with common tasks, at least two common seeds and no undefined score among them."""
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
    """Seed → mean over `tasks`, where every one has a defined score."""
    scores = {task: {row["seed"]: row["score"] for row in cells[task].rows} for task in tasks}
    seeds = set.intersection(*(set(by_seed) for by_seed in scores.values())) if scores else set()
    means = {seed: _mean([scores[task][seed] for task in tasks]) for seed in seeds}
    return {seed: mean for seed, mean in means.items() if mean is not None}


def student_interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the mean of at least two values."""
    from scipy.stats import t

    half = float(t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    mean = statistics.fmean(values)
    return mean - half, mean + half


def write_report(rows: Iterable[dict[str, Any]], folder: Path) -> str:
    """Write table.md, table.json and, with matplotlib, table.png into `folder`; returns the text to show."""
    encoders = best_cells(rows)
    folder.mkdir(parents=True, exist_ok=True)
    text = table(encoders)
    (folder / "table.md").write_text(text, encoding="utf-8")
    (folder / "table.json").write_text(json.dumps(summary(encoders), indent=2) + "\n", encoding="utf-8")
    try:
        from tasks.glue.figure import draw
    except ImportError:
        return f"\n{text}\nwritten to {folder / 'table.md'}; the figure needs matplotlib"
    draw(encoders, folder / "table.png")
    return f"\n{text}\nwritten to {folder / 'table.md'}, .json and .png"


def summary(encoders: dict[str, Cells]) -> dict[str, Any]:
    """table.json: the table's numbers as fractions, null where undefined."""
    result: dict[str, Any] = {"encoders": {}, "differences": []}
    for name, cells in encoders.items():
        tasks = {
            task: {
                "metric": TASKS[task].metric,
                "median": cell.median,
                "scores": cell.scores,
                "seeds": [row["seed"] for row in cell.rows],
                "best_epoch_median": median(row["best_epoch_score"] for row in cell.rows),
                "other_medians": {file: median(scores) for file, scores in cell.others.items()},
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
    """The text of table.md."""
    tasks = [name for name in TASKS if any(name in cells for cells in encoders.values())]
    lines = [
        "# GLUE development scores",
        "",
        "Median over seeds of the last epoch's score at the best grid point, x 100. Matthews' correlation for CoLA, "
        "Pearson's for STS-B, accuracy otherwise; MNLI is the matched set. The average of 8 is the paper's.",
        "",
    ]
    means = {name: averages(cells) for name, cells in encoders.items()}
    shown = [
        kind for kind in ("average of 8", "average of 9") if any(mean[kind] is not None for mean in means.values())
    ]
    lines += _header(["encoder", *tasks, *shown])
    for name, cells in encoders.items():
        scores = [percent(cells[task].median) if task in cells else "" for task in tasks]
        lines.append(
            _row([name, *scores, *("" if means[name][kind] is None else percent(means[name][kind]) for kind in shown)])
        )
    lines += ["", "## Runs behind each score", ""]
    lines += _header(
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
        lines += _header(["encoder", "minus", "tasks", "seeds", "difference", "95 % interval"])
        for pair in pairs:
            counts = [str(len(pair.tasks)), str(len(pair.by_seed))]
            interval = f"{percent(pair.low)} to {percent(pair.high)}"
            lines.append(_row([pair.first, pair.second, *counts, percent(pair.mean), interval]))
    if any(task in PAPER_TASKS and cell.is_official for cells in encoders.values() for task, cell in cells.items()):
        lines += ["", "## The paper's scores, not ours", "", "Base size, Tables 1 to 3 of the paper.", ""]
        lines += _header(["the paper's encoder", *PAPER_TASKS, "average of 8"])
        for name, scores_there in PAPER_SCORES.items():
            cells_there = [f"{scores_there[task]:.2f}" for task in PAPER_TASKS]
            lines.append(_row([f"{name} (paper)", *cells_there, f"{PAPER_AVERAGES[name]:.2f}"]))
    return "\n".join(lines) + "\n"


def _details(name: str, cell: Cell) -> list[str]:
    best_epoch = percent(median(row["best_epoch_score"] for row in cell.rows))
    first = cell.rows[0]
    point = [str(first["batch_size"]), f"{first['lr']:g}", str(first["epochs"])]
    lines = [_detail(name, cell.task, cell.scores, best_epoch, point, first)]
    for file, scores in cell.others.items():
        lines.append(_detail(name, f"{cell.task} ({file})", scores, "", point, first))
    if MISMATCHED in cell.others:
        both = [_mean(pair) for pair in zip(cell.scores, cell.others[MISMATCHED], strict=True)]
        lines.append(_detail(name, f"{cell.task} (mean of both)", both, "", point, first))
    return lines


def _detail(
    name: str, task: str, scores: list[float | None], best_epoch: str, point: list[str], first: dict[str, Any]
) -> str:
    defined = [score for score in scores if score is not None]
    spread = f"{percent(min(defined))} to {percent(max(defined))}" if defined else ""
    counts = [str(len(scores)), str(len(scores) - len(defined))]
    official = TASKS[first["task"]].dev_examples
    told = f"{first['dev_examples']}" + (f" (official: {official})" if first["dev_examples"] != official else "")
    examples = [str(first["train_examples"]), told if best_epoch else ""]
    metric = TASKS[first["task"]].metric
    return _row([name, task, metric, percent(median(scores)), spread, best_epoch, *counts, *point, *examples])


def percent(score: float | None) -> str:
    """A fraction times 100 with two decimals, or the word for what is none."""
    return "undefined" if score is None else f"{100 * score:.2f}"


def _header(names: list[str]) -> list[str]:
    return [_row(names), _row(["---"] + ["---:"] * (len(names) - 1))]


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"
