"""Report of a sweep: table.md, table.json, tables/ and table.png with the medians over seeds, one row per encoder.

Each median is at a task's best grid point. The table marks undefined scores, which count as 0. It shows an average only
if all of its tasks are there.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from megatron_ddrp.data.atomic import write_text
from megatron_ddrp.pages.markdown import Table, percent
from megatron_ddrp.pages.rendering import render
from megatron_ddrp.pages.tables import write_tables
from megatron_ddrp.tasks.finetune.cells import Cell, Cells, best_cells, task_order
from megatron_ddrp.tasks.finetune.figure import draw
from megatron_ddrp.tasks.finetune.runs import Run
from megatron_ddrp.tasks.finetune.suite import Suite
from megatron_ddrp.tasks.learning_curves import Score, draw_learning_curves
from megatron_ddrp.tasks.names import with_random_weights
from megatron_ddrp.tasks.statistics import EQUAL_SEEDS, Difference, paired

DETAILS = [
    *("encoder", "task", "metric", "median", "min to max", "best epoch, median", "seeds", "undefined"),
    *("batch", "lr", "epochs", "row length", "train examples", "dev examples"),
]
"""Columns of the table of the runs behind each score."""


class Pair(NamedTuple):
    """Difference of two encoders' mean scores over their common tasks, by at least two seeds."""

    first: str
    second: str
    tasks: list[str]
    difference: Difference


def differences(encoders: dict[str, Cells]) -> list[Pair]:
    """Return the difference of every two encoders that share tasks with equal files and at least two seeds."""
    found = []
    for first, second in combinations(encoders, 2):
        tasks = [task for task in encoders[first] if task in encoders[second] and _alike(encoders, task, first, second)]
        difference = paired(_by_seed(encoders[first], tasks), _by_seed(encoders[second], tasks))
        if difference and len(difference.values) > 1:
            found.append(Pair(first, second, tasks, difference))
    return found


def _alike(encoders: dict[str, Cells], task: str, first: str, second: str) -> bool:
    """Return whether the runs of two encoders on a task had the same files, labels, metric and training rows."""
    one, other = (encoders[name][task].rows[0] for name in (first, second))
    return one["data"] == other["data"] and one.get("max_train_examples") == other.get("max_train_examples")


def _unlike(encoders: dict[str, Cells], tasks: list[str]) -> list[str]:
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


def write_report(
    rows: Iterable[dict[str, Any]],
    folder: Path,
    suite: Suite,
    damage: Sequence[str] = (),
    asked: Iterable[Run] = (),
) -> str:
    """Write table.md, table.json, tables/ and, with matplotlib, table.png into `folder`; return the text to show.

    `damage` has sentences about runs that are left out or could not be checked; table.md ends with them. `asked` are
    the runs of this command; the table shows them even if newer runs had other data, lengths or numbers of rows.
    """
    encoders = best_cells(rows, suite.order, asked)
    folder.mkdir(parents=True, exist_ok=True)
    tables = all_tables(encoders, suite)
    text = page(encoders, suite, tables, damage)
    write_text(folder / "table.md", text)
    write_tables(folder / "tables", tables)
    write_text(folder / "table.json", json.dumps(summary(encoders, suite), indent=2) + "\n")
    if find_spec("matplotlib") is None:
        return f"\n{text}\nwritten to {folder / 'table.md'} and tables/; the figure needs matplotlib"
    tasks = task_order(encoders, suite.order)
    draw(encoders, tasks, suite.title, folder / "table.png")
    panels = [
        (task, {name: _spread(cells[task]) for name, cells in encoders.items() if task in cells}) for task in tasks
    ]
    curves = draw_learning_curves(panels, "lowest and highest seed", folder)
    beside = f", and {folder / curves}" if curves else ""
    return f"\n{text}\nwritten to {folder / 'table.md'}, .json and .png, tables/{beside}"


def _spread(cell: Cell) -> Score:
    """Return a cell's median, lowest and highest score."""
    return Score(cell.median, min(cell.scores), max(cell.scores))


def summary(encoders: dict[str, Cells], suite: Suite) -> dict[str, Any]:
    """Return the content of table.json: the table's numbers as fractions; an average is null if a task is missing."""
    result: dict[str, Any] = {"encoders": {}, "gains": [], "differences": []}
    for name, cells in encoders.items():
        tasks = {
            task: {
                "metric": cell.metric,
                "median": cell.median,
                "scores": cell.scores,
                "undefined": cell.undefined,
                "seeds": [row["seed"] for row in cell.rows],
                "best_epoch_median": statistics.median(row["best_epoch_score"] for row in cell.rows),
                "other_medians": {file: statistics.median(scores) for file, scores in cell.others.items()},
                "beside_medians": {metric: statistics.median(scores) for metric, scores in cell.beside.items()},
                "point": {key: cell.rows[0][key] for key in ("batch_size", "lr", "epochs")},
                "dev_examples": cell.rows[0]["dev_examples"],
            }
            for task, cell in cells.items()
        }
        result["encoders"][name] = {"tasks": tasks, **suite.means(cells)}
    for gain in gains(encoders):
        result["gains"].append(
            {
                "encoder": gain.encoder,
                "task": gain.pretrained.task,
                "metric": gain.pretrained.metric,
                "pretrained": gain.pretrained.median,
                "random": gain.random.median,
                "difference": gain.difference,
            }
        )
    for pair in differences(encoders):
        low, high = pair.difference.interval or (None, None)
        result["differences"].append(
            {
                "first": pair.first,
                "second": pair.second,
                "tasks": pair.tasks,
                "by_seed": list(pair.difference.values),
                "low": low,
                "high": high,
                "mean": pair.difference.mean,
            }
        )
    if published := suite.published():
        result["paper"] = published
    return result


def page(encoders: dict[str, Cells], suite: Suite, tables: dict[str, Table | None], damage: Sequence[str] = ()) -> str:
    """Return the text of table.md."""
    unlike = _unlike(encoders, task_order(encoders, suite.order))
    return render("scores.md.jinja", title=suite.title, about=suite.about, unlike=unlike, damage=damage, **tables)


def all_tables(encoders: dict[str, Cells], suite: Suite) -> dict[str, Table | None]:
    """Return the tables of the page by name."""
    tasks = task_order(encoders, suite.order)
    means = {name: suite.means(cells) for name, cells in encoders.items()}
    shown = [kind for kind in suite.averages if any(mean[kind] is not None for mean in means.values())]
    scores = [
        [name, *(_score(cells[task]) if task in cells else "" for task in tasks)]
        + [percent(means[name][kind]) for kind in shown]
        for name, cells in encoders.items()
    ]
    details = [
        line for name, cells in encoders.items() for cell in cells.values() for line in _details(name, cell, suite)
    ]
    pairs = [
        [pair.first, pair.second, str(len(pair.tasks)), str(len(pair.difference.values))]
        + [percent(pair.difference.mean), " to ".join(map(percent, pair.difference.interval or ())) or EQUAL_SEEDS]
        for pair in differences(encoders)
    ]
    gained = [
        [gain.encoder, gain.pretrained.task, gain.pretrained.score_name, _score(gain.pretrained), _score(gain.random)]
        + ["undefined" if gain.difference is None else f"{100 * gain.difference:+.2f}"]
        for gain in gains(encoders)
    ]
    return {
        "scores": Table(["encoder", *tasks, *shown], scores + _baselines(encoders, tasks, len(shown))),
        "gains": Table(["encoder", "task", "metric", "pre-trained", "random weights", "difference"], gained),
        "runs": Table(DETAILS, details),
        "differences": Table(["encoder", "minus", "tasks", "seeds", "difference", "95 % interval"], pairs),
        "paper": suite.published_table(encoders),
    }


def _baselines(encoders: dict[str, Cells], tasks: list[str], blanks: int) -> list[list[str]]:
    """Return the row of the most frequent label's scores, if runs have recorded any."""
    known = {
        task: cell.rows[0]["baseline"]
        for cells in encoders.values()
        for task, cell in cells.items()
        if cell.rows[0].get("baseline") is not None
    }
    row = ["(always the most frequent label)", *(percent(known[task]) if task in known else "" for task in tasks)]
    return [row + [""] * blanks] if known else []


def _score(cell: Cell) -> str:
    return percent(cell.median) + (f" ({cell.undefined} undefined)" if cell.undefined else "")


def _details(name: str, cell: Cell, suite: Suite) -> list[list[str]]:
    """Return the rows of a cell in the table of runs: by the task's metric, by further metrics, on further files."""
    best_epoch = percent(statistics.median(row["best_epoch_score"] for row in cell.rows))
    first, size = cell.rows[0], suite.official_size(cell.task)
    point = [str(first["batch_size"]), f"{first['lr']:g}", str(first["epochs"])]
    point += [str(first["max_seq_length"]), str(first["train_examples"])]
    official = "" if size in (None, first["dev_examples"]) else f" (official: {size})"

    def row(
        label: str,
        scores: list[float],
        undefined: str,
        best: str = "",
        examples: str = "",
        metric: str = cell.score_name,
    ) -> list[str]:
        spread = f"{percent(min(scores))} to {percent(max(scores))}"
        middle = percent(statistics.median(scores))
        return [name, label, metric, middle, spread, best, str(len(scores)), undefined, *point, examples]

    rows = [row(cell.task, cell.scores, str(cell.undefined), best_epoch, f"{first['dev_examples']}{official}")]
    rows += [row(cell.task, scores, "", metric=metric) for metric, scores in cell.beside.items()]
    for file, scores in cell.others.items():
        rows.append(row(f"{cell.task} ({file})", scores, str(cell.other_undefined(file))))
    return rows + [row(label, scores, "") for label, scores in suite.combined(cell).items()]
