"""Report of an output folder: results.json, table.md, tables/ and heatmap.png.

Figure heatmap.png: accuracies of encoders, piece counts and published models on every paradigm.
"""

from __future__ import annotations

import functools
import json
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ddrp.data.atomic import write_text
from megatron_ddrp.pages.markdown import Table, percent
from megatron_ddrp.pages.plotting import draw_cells, figure_tools, save_figure, short_names
from megatron_ddrp.pages.rendering import render
from megatron_ddrp.pages.tables import write_tables
from megatron_ddrp.tasks.learning_curves import Score, draw_learning_curves
from megatron_ddrp.tasks.measures import MINIMAL_PAIRS, format_value
from megatron_ddrp.tasks.minimal_pairs.pairs import Paradigm
from megatron_ddrp.tasks.minimal_pairs.results import (
    PairDifference,
    PairJob,
    PairStore,
    ParadigmScore,
    Result,
    cell,
    difference,
)
from megatron_ddrp.tasks.minimal_pairs.rows import SCORES

PIECE_COUNTS = "piece counts alone"
Levels = dict[str, dict[str, float]]
"""Name → UID → accuracy."""


@dataclass(frozen=True)
class Report:
    """Content of the page."""

    paradigms: Mapping[str, Paradigm]
    results: list[Result]
    published: Levels
    score: str

    @property
    def differences(self) -> list[PairDifference]:
        """Differences between every two encoders."""
        return [difference(first, second) for first, second in combinations(self.results, 2)]

    def groups(self, key: str) -> dict[str, list[str]]:
        """Group the UIDs by `key`, which is `field` or `term`; return name → UIDs, sorted by name.

        Paradigms without a name are left out.
        """
        names = sorted({getattr(paradigm, key) for paradigm in self.paradigms.values()} - {""})
        return {name: [uid for uid, p in self.paradigms.items() if getattr(p, key) == name] for name in names}

    def in_order(self) -> list[str]:
        """Return the UIDs sorted by field, term and UID."""
        return sorted(self.paradigms, key=lambda uid: (self.paradigms[uid].field, self.paradigms[uid].term, uid))

    def piece_counts(self) -> Levels:
        """Return accuracies from piece counts alone: once if they are equal for all encoders, else per encoder."""
        levels = {r.name: {uid: cell.piece_counts for uid, cell in r.cells.items()} for r in self.results}
        first, *others = levels.values()
        if all(level == first for level in others):
            return {PIECE_COUNTS: first}
        return {f"{PIECE_COUNTS}, {name}": level for name, level in levels.items()}


def report_of(
    subjects: Mapping[tuple[str, int | None], str],
    paradigms: Mapping[str, Paradigm],
    jobs: list[PairJob],
    store: PairStore,
    published: Levels,
) -> Report:
    """Return the report on finished jobs; `subjects` maps (fingerprint, seed) to the name of an encoder."""
    rows = {PairJob.of_row(row).name: row for row in store}
    cells: dict[tuple[str, int | None], dict[str, ParadigmScore]] = {key: {} for key in subjects}
    for job in jobs:
        cells[job.encoder, job.seed][job.paradigm] = cell(rows[job.name])
    results = [Result(name, cells[key]) for key, name in subjects.items()]
    return Report(paradigms, results, published, jobs[0].score)


def write_report(report: Report, folder: Path) -> str:
    """Write results.json, table.md, tables/ and, with matplotlib, heatmap.png into `folder`; return a text to show."""
    differences = report.differences
    folder.mkdir(parents=True, exist_ok=True)
    tables = all_tables(report, differences)
    text = page(report, tables)
    write_text(folder / "table.md", text)
    write_tables(folder / "tables", tables)
    write_text(folder / "results.json", json.dumps(summary(report, differences), indent=2) + "\n")
    shown = text.split("\n## By paradigm")[0].strip()
    if find_spec("matplotlib") is None:
        return f"\n{shown}\n\nwritten to {folder / 'table.md'}, tables/ and results.json; the heat map needs matplotlib"
    fields = {uid: report.paradigms[uid].field for uid in report.in_order()}
    draw_heat_map(_levels(report), len(report.results), fields, folder / "heatmap.png")
    curves = draw_learning_curves(_panels(report), "standard error over pairs", folder)
    figures = f", heatmap.png and {curves}" if curves else " and heatmap.png"
    return f"\n{shown}\n\nwritten to {folder / 'table.md'}, tables/, results.json{figures}"


def _panels(report: Report) -> list[tuple[str, dict[str, Score]]]:
    """Return the panels of the learning curves: the macro average and, if there are several fields, each field."""
    fields = report.groups("field")
    parts = {"macro average": list(report.paradigms), **(fields if len(fields) > 1 else {})}
    return [(title, {each.name: _score(each.only(uids)) for each in report.results}) for title, uids in parts.items()]


def _score(result: Result) -> Score:
    error = result.standard_error or 0.0
    return Score(result.macro_average, result.macro_average - error, result.macro_average + error)


def summary(report: Report, differences: list[PairDifference]) -> dict[str, Any]:
    """Return the content of results.json: the numbers of the tables as fractions."""
    return {
        "score": report.score,
        "encoders": [_encoder(report, result) for result in report.results],
        "differences": [asdict(pair) for pair in differences],
        "published": report.published,
    }


def _encoder(report: Report, result: Result) -> dict[str, Any]:
    return {
        "load": result.name,
        "macro_average": result.macro_average,
        "standard_error": result.standard_error,
        "standard_error_over_paradigms": result.paradigm_error,
        "piece_counts": result.piece_counts,
        "fields": {name: result.average(uids) for name, uids in report.groups("field").items()},
        "linguistics_terms": {name: result.average(uids) for name, uids in report.groups("term").items()},
        "paradigms": {
            uid: {
                "accuracy": cell.accuracy,
                "pairs": len(cell.right),
                "standard_error": cell.standard_error,
                "ties": cell.ties,
                "undefined": cell.undefined,
                "piece_counts": cell.piece_counts,
            }
            for uid, cell in result.cells.items()
        },
    }


def all_tables(report: Report, differences: list[PairDifference]) -> dict[str, Table]:
    """Return the tables of the page by name."""
    return {
        "scores": _scores(report),
        "differences": _differences(differences),
        "terms": _by_group(report, "term"),
        "paradigms": _by_paradigm(report),
    }


def page(report: Report, tables: dict[str, Table]) -> str:
    """Return the text of table.md."""
    return render(
        "minimal_pairs.md.jinja",
        score=report.score,
        meaning=SCORES[report.score],
        pairs=sum(map(len, report.paradigms.values())),
        num_paradigms=len(report.paradigms),
        **tables,
    )


def _scores(report: Report) -> Table:
    """Return the table of macro averages: the encoders, then the published levels."""
    fields = report.groups("field")
    header = ["encoder", "macro average", "± pairs", "± paradigms", *fields, PIECE_COUNTS, "ties", "undefined"]
    rows = [
        [result.name, percent(result.macro_average), percent(result.standard_error), percent(result.paradigm_error)]
        + [percent(result.average(uids)) for uids in fields.values()]
        + [percent(result.piece_counts)]
        + [f"{sum(getattr(cell, key) for cell in result.cells.values()):,}" for key in ("ties", "undefined")]
        for result in report.results
    ]
    for name, level in report.published.items():
        averages = [percent(statistics.fmean(level[uid] for uid in uids)) for uids in fields.values()]
        rows.append([f"{name} (published)", percent(statistics.fmean(level.values())), "", "", *averages, "", "", ""])
    return Table(header, rows)


def _differences(differences: list[PairDifference]) -> Table:
    shown = functools.partial(format_value, MINIMAL_PAIRS, sign="+")
    rows = [
        [pair.first, pair.second, shown(pair.difference), " to ".join(map(shown, pair.interval or ()))]
        for pair in differences
    ]
    return Table(["encoder", "minus", "difference", "95 % interval"], rows)


def _by_group(report: Report, key: str) -> Table:
    levels = _levels(report)
    rows = [
        [name, str(len(uids)), *(percent(statistics.fmean(level[uid] for uid in uids)) for level in levels.values())]
        for name, uids in report.groups(key).items()
    ]
    return Table(["linguistics term", "paradigms", *levels], rows)


def _by_paradigm(report: Report) -> Table:
    levels = _levels(report)
    fields = [uid for uids in report.groups("field").values() for uid in uids]  # empty if no file names a field
    rows = [
        [uid, *[report.paradigms[uid].field] * bool(fields), str(len(report.paradigms[uid]))]
        + [percent(level[uid]) for level in levels.values()]
        for uid in report.in_order()
    ]
    return Table(["paradigm", *["field"] * bool(fields), "pairs", *levels], rows, wordy=[1] * bool(fields))


def _levels(report: Report) -> Levels:
    """Return the accuracies per paradigm of encoders, piece counts and published models."""
    own = {result.name: {uid: cell.accuracy for uid, cell in result.cells.items()} for result in report.results}
    return {**own, **report.piece_counts(), **{f"{name} (published)": v for name, v in report.published.items()}}


MOST_WITH_NUMBERS = 24
"""Largest number of columns at which the cells show their numbers."""
ROW, COLUMN = 0.19, 0.42
"""Height of a row and width of a column in inches."""


def draw_heat_map(
    levels: Mapping[str, Mapping[str, float]], num_own: int, fields: Mapping[str, str], path: Path
) -> None:
    """Draw accuracies: blue is 100 %, white 50 % (chance), red 0 %.

    `levels` has a column each: name → paradigm → accuracy; the first `num_own` are encoders, and a line follows them.
    `fields` has the paradigms' fields, in the order of the rows.
    """
    plt = figure_tools()
    uids = list(fields)
    accuracies = np.array([[100 * level[uid] for level in levels.values()] for uid in uids])  # [paradigms, columns]
    names = short_names(list(levels))
    labels = max(map(len, uids)) * 0.075, max(map(len, names)) * 0.085
    size = (labels[0] + COLUMN * len(names) + 1.6, labels[1] + max(1.6, ROW * len(uids)) + 0.8)
    figure, axes = plt.subplots(figsize=size, layout="constrained")
    image = draw_cells(axes, accuracies, 50, 6.5 if len(names) <= MOST_WITH_NUMBERS else None)
    axes.set_xticks(range(len(names)), names, rotation=90, fontsize=8)
    axes.set_yticks(range(len(uids)), uids, fontsize=7)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    names_of_fields = list(dict.fromkeys(fields.values()))
    groups = [[row for row, uid in enumerate(uids) if fields[uid] == name] for name in names_of_fields]
    right = axes.secondary_yaxis("right")
    right.set_yticks([sum(rows) / len(rows) for rows in groups], names_of_fields, rotation=90, va="center")
    right.tick_params(length=0, labelsize=8)
    for rows in groups[1:]:
        axes.axhline(rows[0] - 0.5, color="black", linewidth=1.2)
    axes.axvline(num_own - 0.5, color="black", linewidth=1.2)
    bar = figure.colorbar(image, ax=axes, fraction=0.03, pad=0.01, aspect=40)
    bar.set_label("accuracy [%] (white: chance)", fontsize=8)
    bar.ax.tick_params(labelsize=8)
    save_figure(figure, path)
