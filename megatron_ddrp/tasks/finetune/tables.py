"""Tables and report of a sweep: table.md, table.json, tables/ and table.png.

They have the medians over seeds, one row per encoder; each median is at a task's best grid point. The table marks
undefined scores (`Metric.undefined`). It shows an average only if all of its tasks are there.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

from megatron_ddrp.encoders.encoder import with_random_weights
from megatron_ddrp.errors import FAILURE, UserError
from megatron_ddrp.pages.markdown import Table, percent, render_page, write_page
from megatron_ddrp.pages.plotting import GREY, figure_tools, legend_below, run_styles, short_names, wrap_title
from megatron_ddrp.tasks.finetune.runs import (
    RUNS,
    Cell,
    Cells,
    Interval,
    Items,
    RunStore,
    Suite,
    TuningRun,
    best_cells,
    task_order,
)
from megatron_ddrp.tasks.jobs import Row
from megatron_ddrp.tasks.statistics import (
    CURVES,
    Gain,
    Score,
    draw_learning_curves,
    gain_table,
    judge,
    pair_by_seed,
)

DETAILS = [
    "encoder", "task", "metric", "median", "min to max", "95 % over items", "best epoch, median", "seeds", "undefined",
    "batch", "lr", "epochs", "row length", "train examples", "dev examples",
]  # fmt: skip
"""Columns of the table of the runs behind each score."""


def all_tables(encoders: dict[str, Cells], suite: Suite, items: Items) -> dict[str, Table | None]:
    """Return the tables of the page by name."""
    details = [
        line
        for name, cells in encoders.items()
        for cell in cells.values()
        for line in _details(name, cell, suite, items)
    ]
    gained = [
        [name, cell.task, cell.score_name, _score(cell, items), _score(twin, items)]
        + ["undefined" if difference is None else f"{100 * difference:+.2f}"]
        for name, cell, twin, difference in gains(encoders)
    ]
    return {
        "scores": _scores(encoders, suite, items),
        "gains": Table(["encoder", "task", "metric", "pre-trained", "random weights", "difference"], gained),
        "runs": Table(DETAILS, details),
        "differences": gain_table(differences(encoders, items)),
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
    first, size = cell.rows[0], suite.official_sizes.get(cell.task)
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
    for other in cell.others.values():
        found = _interval(items.of_cell(other)), "", str(other.rows[0]["dev_examples"])
        rows.append(row(other.task, other.scores, str(other.undefined), *found))
    return rows + [row(label, scores, "") for label, scores in suite.combined(cell).items()]


def differences(encoders: dict[str, Cells], items: Items) -> list[Gain]:
    """Return the gains in the mean over common tasks, of every two encoders with equal files and at least two seeds.

    Gains on further files follow those on the first ones, and those on one name of files are judged together.
    """
    files = dict.fromkeys(file for cells in encoders.values() for cell in cells.values() for file in cell.others)
    found = judge(_gains_on("", encoders, items))
    for file in files:
        on_file = {
            name: {task: cell.others[file] for task, cell in cells.items() if file in cell.others}
            for name, cells in encoders.items()
        }
        found += judge(_gains_on(file, on_file, items))
    return found


def _gains_on(file: str, encoders: dict[str, Cells], items: Items) -> list[Gain]:
    found = []
    for first, second in combinations(encoders, 2):
        tasks = [task for task in encoders[first] if task in encoders[second] and _alike(encoders, task, first, second)]
        by_seed = pair_by_seed(_by_seed(encoders[first], tasks), _by_seed(encoders[second], tasks))
        if by_seed and len(by_seed.values) > 1:
            runs = (_runs(encoders[name], tasks, by_seed.seeds) for name in (first, second))
            over_items = items.of_difference(list(zip(*runs, strict=True)))
            found.append(Gain(first, second, "score", by_seed, over_items, tasks=tasks, text=file))
    return found


def _alike(encoders: dict[str, Cells], task: str, first: str, second: str) -> bool:
    """Return whether the runs of two encoders on a task had the same files, labels, metric and training rows."""
    one, other = (encoders[name][task].rows[0] for name in (first, second))
    return one["data"] == other["data"] and one.get("max_train_examples") == other.get("max_train_examples")


def unlike(encoders: dict[str, Cells], tasks: list[str]) -> list[str]:
    """Return one sentence per task and way in which the runs of encoders differ from those of the first encoder.

    Another one counts the runs that the tables leave out.
    """
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
        left = [f"{encoders[name][task].left_out} of {name}" for name in rows if encoders[name][task].left_out]
        if left:
            found.append(f"{task}: runs on other files, row lengths or row counts are left out: {', '.join(left)}")
    return found


def _by_seed(cells: Cells, tasks: list[str]) -> dict[int, float]:
    """Return seed → mean over `tasks`, for the seeds that all tasks share."""
    scores = {task: {row["seed"]: row["score"] for row in cells[task].rows} for task in tasks}
    seeds = set.intersection(*(set(by_seed) for by_seed in scores.values())) if scores else set()
    return {seed: statistics.fmean(scores[task][seed] for task in tasks) for seed in seeds}


def _runs(cells: Cells, tasks: list[str], seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Return the lines of the runs on some tasks with some seeds, in this order."""
    return [next(row for row in cells[task].rows if row["seed"] == seed) for task in tasks for seed in seeds]


def gains(encoders: dict[str, Cells]) -> list[tuple[str, Cell, Cell, float | None]]:
    """Return encoder, its result on a task, the same encoder's with random weights, and the difference of the medians.

    Only results with all else equal are paired; the difference is None if any score is undefined.
    """
    return [
        (name, cell, twin, None if cell.undefined or twin.undefined else cell.median - twin.median)
        for name, cells in encoders.items()
        for task, cell in cells.items()
        for twin in [encoders.get(with_random_weights(name), {}).get(task)]
        if twin is not None and twin.conditions == cell.conditions
    ]


LEAST_WIDTH, ENDS = 6.5, 1.3
"""Smallest width of a figure, and width of the parts beside its axes, in inches."""
BOTTOM = 0.04
"""Height of undefined scores, as a share of the axes."""
CROSS = {"marker": "x", "markersize": 8, "markeredgewidth": 2}


def write_report(
    runs: Mapping[Path, Iterable[dict[str, Any]]],
    folder: Path,
    suite: Suite,
    damage: Sequence[str] = (),
    asked: Iterable[TuningRun] = (),
) -> str:
    """Write table.md, table.json, tables/ and, with matplotlib, figures into `folder`; return the text to show.

    `runs` has the lines of runs.jsonl by output folder. `damage` has sentences about damaged lines; table.md ends with
    them. `asked` are the runs of this command: an encoder's score on a task
    comes from them alone if there are any.
    """
    rows = (row | {"folder": str(place)} for place, of_folder in runs.items() for row in of_folder)
    encoders, items = best_cells(rows, suite.order, asked), Items(suite)
    tables, tasks = all_tables(encoders, suite, items), task_order(encoders, suite.order)
    text = page(encoders, suite, tables, damage)
    texts = {"table.md": text, "table.json": json.dumps(summary(encoders, suite, items), indent=2) + "\n"}
    panels: dict[str, dict[str, Score]] = {task: {} for task in tasks}
    for name, cells in encoders.items():
        for task, cell in cells.items():
            panels[task][name] = Score(cell.median, min(cell.scores), max(cell.scores))
    figures = {
        "table.png": partial(draw, encoders, tasks, suite.title),
        CURVES: partial(draw_learning_curves, panels.items(), "lowest to highest seed"),
    }
    return f"\n{text}\n{write_page(folder, texts, tables, figures)}"


def report_only(folders: Sequence[Path], output: Path, suite: Suite) -> int:
    """Write one table over several output folders; return 1 if it leaves damaged lines out."""
    runs: dict[Path, list[Row]] = {}
    left_out, cut_off = list[str](), list[str]()
    for folder in folders:
        if not (folder / RUNS).is_file():
            raise UserError(f"--report {folder}: no runs.jsonl in it; expected the --output-dir of an earlier command")
        damaged = len(left_out)
        store = RunStore(folder / RUNS, lambda told: left_out.append(f"{told}; the line is left out"), suite.known)
        runs[folder] = list(store)
        if not runs[folder] and len(left_out) == damaged:
            raise UserError(f"--report {folder}: no finished run in its runs.jsonl; finish a run, or copy it again")
        if store.ends_in_half_a_line:
            cut_off.append(f"{store.path}: its last line is cut off and counts as no run")
    print(write_report(runs, output, suite, [*left_out, *cut_off]))
    sys.stdout.flush()
    for sentence in [*left_out, *cut_off]:
        print(f"{suite.program}: warning: {sentence}", file=sys.stderr)
    return FAILURE if left_out else 0


def summary(encoders: dict[str, Cells], suite: Suite, items: Items) -> dict[str, Any]:
    """Return the content of table.json: the table's numbers as fractions; an average is null if a task is missing."""
    result: dict[str, Any] = {"encoders": {}}
    for name, cells in encoders.items():
        tasks = {task: _cell(cell, items) for task, cell in cells.items()}
        result["encoders"][name] = {"tasks": tasks, **suite.means(cells)}
    result["gains"] = [
        {
            "encoder": name,
            "task": cell.task,
            "metric": cell.metric,
            "pretrained": cell.median,
            "random": twin.median,
            "difference": difference,
        }
        for name, cell, twin, difference in gains(encoders)
    ]
    result["differences"] = [
        {"tasks": gain.tasks, "file": gain.text or None} | gain.as_json() for gain in differences(encoders, items)
    ]
    return result


def _cell(cell: Cell, items: Items) -> dict[str, Any]:
    return {
        "metric": cell.metric,
        "median": cell.median,
        "over_items": items.of_cell(cell),
        "constant_guess": items.guess(cell),
        "scores": cell.scores,
        "undefined": cell.undefined,
        "seeds": [row["seed"] for row in cell.rows],
        "best_epoch_median": statistics.median(row["best_epoch_score"] for row in cell.rows),
        "other_medians": {file: other.median for file, other in cell.others.items()},
        "others_over_items": {file: items.of_cell(other) for file, other in cell.others.items()},
        "beside_medians": {metric: statistics.median(scores) for metric, scores in cell.beside.items()},
        "point": {key: cell.rows[0][key] for key in ("batch_size", "lr", "epochs")},
        "dev_examples": cell.rows[0]["dev_examples"],
    }


def page(encoders: dict[str, Cells], suite: Suite, tables: dict[str, Table | None], damage: Sequence[str] = ()) -> str:
    """Return the text of table.md."""
    told = unlike(encoders, task_order(encoders, suite.order))
    return render_page("scores.md.jinja", title=suite.title, about=suite.about, unlike=told, damage=damage, **tables)


def draw(encoders: dict[str, Cells], tasks: list[str], title: str) -> Any:
    """Draw the result of `best_cells`, with the tasks in this order.

    An undefined score stands at the lower edge as a cross, so that it does not stretch the axis to 0, or to the -1 of a
    plug-in's metric.
    """
    width = max(LEAST_WIDTH, ENDS + len(tasks) * max(1.15, 0.3 * len(encoders)))
    figure, axes = figure_tools().subplots(figsize=(width, 4.4))
    slot = 0.8 / len(encoders)
    legend: dict[str, dict[str, Any]] = {}
    styles = run_styles(short_names(list(encoders)))
    for number, (cells, (name, style)) in enumerate(zip(encoders.values(), styles.items(), strict=True)):
        legend[name] = {key: style[key] for key in ("color", "marker", "markersize")} | {"linestyle": ""}
        for task, cell in cells.items():
            place = tasks.index(task) + (number - (len(encoders) - 1) / 2) * slot
            _draw_cell(axes, cell, place, min(slot, 0.3), legend[name])
    grey = {"color": GREY, "linestyle": ""}
    legend["seed"] = grey | {"marker": "o", "alpha": 0.5}
    legend["median"] = grey | {"marker": "_", "markersize": 16, "markeredgewidth": 3}
    rows = [row for cells in encoders.values() for cell in cells.values() for row in cell.rows]
    if counts := sorted({row["score"] for row in rows if row["undefined"]}):
        label = f"undefined, counts as {' or '.join(f'{100 * score:g}' for score in counts)}"
        legend[label] = grey | CROSS
    axes.set_xticks(range(len(tasks)), tasks)
    axes.set_xlim(-0.5, len(tasks) - 0.5)
    axes.margins(y=0.1)
    axes.set_ylabel("development score × 100")
    axes.set_title(wrap_title(title, width))
    axes.grid(axis="y", alpha=0.3)
    legend_below(figure, legend)
    return figure


def _draw_cell(axes: Any, cell: Cell, place: float, width: float, style: dict[str, Any]) -> None:
    """Draw the seeds and the median of one encoder on one task around x = `place`."""
    scores = [100 * row["score"] for row in cell.rows if not row["undefined"]]
    axes.plot([place] * len(scores), scores, **style | {"markersize": 6, "alpha": 0.5})
    axes.hlines(100 * cell.median, place - 0.4 * width, place + 0.4 * width, color=style["color"], linewidth=3)
    if cell.undefined:
        edge = axes.get_xaxis_transform()
        axes.plot([place], [BOTTOM], transform=edge, **style | CROSS)
        if cell.undefined > 1:
            axes.annotate(f"{cell.undefined}", (place, BOTTOM), (6, 0), xycoords=edge, textcoords="offset points")
