"""Report of a sweep: table.md, table.json, tables/ and table.png with the medians over seeds, one row per encoder.

Each median is at a task's best grid point. The table marks undefined scores (`Metric.undefined`). It shows an average
only if all of its tasks are there.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_ddrp.data.atomic import write_text
from megatron_ddrp.errors import FAILURE, UserError
from megatron_ddrp.pages.markdown import Table
from megatron_ddrp.pages.plotting import (
    GREY,
    figure_tools,
    legend_below,
    run_style,
    save_figure,
    short_names,
    wrap_title,
)
from megatron_ddrp.pages.rendering import render
from megatron_ddrp.pages.tables import write_tables
from megatron_ddrp.tasks.finetune.cells import Cell, Cells, best_cells, task_order
from megatron_ddrp.tasks.finetune.predictions import Items
from megatron_ddrp.tasks.finetune.runs import RUNS, Run, RunStore
from megatron_ddrp.tasks.finetune.suite import Suite
from megatron_ddrp.tasks.finetune.tables import Pair, all_tables, differences, gains, unlike
from megatron_ddrp.tasks.jobs.store import Row
from megatron_ddrp.tasks.learning_curves import Score, draw_learning_curves

LEAST_WIDTH, ENDS = 6.5, 1.3
"""Smallest width of a figure, and width of the parts beside its axes, in inches."""
BOTTOM = 0.04
"""Height of undefined scores, as a share of the axes."""


def write_report(
    runs: Mapping[Path, Iterable[dict[str, Any]]],
    folder: Path,
    suite: Suite,
    damage: Sequence[str] = (),
    asked: Iterable[Run] = (),
) -> str:
    """Write table.md, table.json, tables/ and, with matplotlib, table.png into `folder`; return the text to show.

    `runs` has the lines of runs.jsonl by output folder. `damage` has sentences about damaged lines; table.md ends with
    them. `asked` are the runs of this command: an encoder's score on a task
    comes from them alone if there are any.
    """
    rows = (row | {"folder": str(place)} for place, of_folder in runs.items() for row in of_folder)
    encoders, items = best_cells(rows, suite.order, asked), Items(suite)
    folder.mkdir(parents=True, exist_ok=True)
    tables = all_tables(encoders, suite, items)
    text = page(encoders, suite, tables, damage)
    write_text(folder / "table.md", text)
    write_tables(folder / "tables", tables)
    write_text(folder / "table.json", json.dumps(summary(encoders, suite, items), indent=2) + "\n")
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


def _spread(cell: Cell) -> Score:
    """Return a cell's median, lowest and highest score."""
    return Score(cell.median, min(cell.scores), max(cell.scores))


def summary(encoders: dict[str, Cells], suite: Suite, items: Items) -> dict[str, Any]:
    """Return the content of table.json: the table's numbers as fractions; an average is null if a task is missing."""
    result: dict[str, Any] = {"encoders": {}}
    for name, cells in encoders.items():
        tasks = {task: _cell(cell, items) for task, cell in cells.items()}
        result["encoders"][name] = {"tasks": tasks, **suite.means(cells)}
    result["gains"] = [
        {
            "encoder": gain.encoder,
            "task": gain.pretrained.task,
            "metric": gain.pretrained.metric,
            "pretrained": gain.pretrained.median,
            "random": gain.random.median,
            "difference": gain.difference,
        }
        for gain in gains(encoders)
    ]
    result["differences"] = [_pair(pair) for pair in differences(encoders, items)]
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
        "other_medians": {file: statistics.median(scores) for file, scores in cell.others.items()},
        "beside_medians": {metric: statistics.median(scores) for metric, scores in cell.beside.items()},
        "point": {key: cell.rows[0][key] for key in ("batch_size", "lr", "epochs")},
        "dev_examples": cell.rows[0]["dev_examples"],
    }


def _pair(pair: Pair) -> dict[str, Any]:
    low, high = pair.difference.interval or (None, None)
    return {
        "first": pair.first,
        "second": pair.second,
        "tasks": pair.tasks,
        "by_seed": list(pair.difference.values),
        "low": low,
        "high": high,
        "mean": pair.difference.mean,
        "over_items": pair.over_items,
        "word": pair.word,
    }


def page(encoders: dict[str, Cells], suite: Suite, tables: dict[str, Table | None], damage: Sequence[str] = ()) -> str:
    """Return the text of table.md."""
    sentences = unlike(encoders, task_order(encoders, suite.order))
    return render("scores.md.jinja", title=suite.title, about=suite.about, unlike=sentences, damage=damage, **tables)


def draw(encoders: dict[str, Cells], tasks: list[str], title: str, path: Path) -> None:
    """Draw the result of `best_cells`, with the tasks in this order.

    An undefined score stands at the lower edge as a cross, so that it does not stretch the axis to 0, or to the -1 of a
    plug-in's metric.
    """
    plt = figure_tools()
    width = max(LEAST_WIDTH, ENDS + len(tasks) * max(1.15, 0.3 * len(encoders)))
    figure, axes = plt.subplots(figsize=(width, 4.4), layout="constrained")
    slot = 0.8 / len(encoders)
    handles: dict[str, Any] = {}
    for number, (name, cells) in enumerate(zip(short_names(list(encoders)), encoders.values(), strict=True)):
        style = {key: value for key, value in run_style(number).items() if key in ("color", "marker")}
        for task, cell in cells.items():
            place = tasks.index(task) + (number - (len(encoders) - 1) / 2) * slot
            _draw_cell(axes, cell, place, min(slot, 0.3), style)
        handles[name] = plt.Line2D([], [], linestyle="", markersize=7, **style)
    grey = {"color": GREY, "linestyle": ""}
    handles["seed"] = plt.Line2D([], [], marker="o", alpha=0.5, **grey)
    handles["median"] = plt.Line2D([], [], marker="_", markersize=16, markeredgewidth=3, **grey)
    rows = [row for cells in encoders.values() for cell in cells.values() for row in cell.rows]
    if counts := sorted({row["score"] for row in rows if row["undefined"]}):
        label = f"undefined, counts as {' or '.join(f'{100 * score:g}' for score in counts)}"
        handles[label] = plt.Line2D([], [], marker="x", markersize=8, markeredgewidth=2, **grey)
    axes.set_xticks(range(len(tasks)), tasks)
    axes.set_xlim(-0.5, len(tasks) - 0.5)
    axes.margins(y=0.1)
    axes.set_ylabel("development score × 100")
    axes.set_title(wrap_title(title, width))
    axes.grid(axis="y", alpha=0.3)
    legend_below(figure, handles)
    save_figure(figure, path)


def _draw_cell(axes: Any, cell: Cell, place: float, width: float, style: dict[str, Any]) -> None:
    """Draw the seeds and the median of one encoder on one task around x = `place`."""
    scores = [100 * row["score"] for row in cell.rows if not row["undefined"]]
    axes.plot([place] * len(scores), scores, linestyle="", markersize=6, alpha=0.5, **style)
    axes.hlines(100 * cell.median, place - 0.4 * width, place + 0.4 * width, color=style["color"], linewidth=3)
    if cell.undefined:
        edge = axes.get_xaxis_transform()
        cross = {"marker": "x", "markersize": 8, "markeredgewidth": 2, "color": style["color"]}
        axes.plot([place], [BOTTOM], linestyle="", transform=edge, **cross)
        if cell.undefined > 1:
            axes.annotate(f"{cell.undefined}", (place, BOTTOM), (6, 0), xycoords=edge, textcoords="offset points")
