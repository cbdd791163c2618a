"""Common style of all figures: labels stay readable at half size, and not only colours distinguish the runs."""

from __future__ import annotations

import io
import math
import os
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_ddrp.data.atomic import write_bytes
from megatron_ddrp.errors import need_packages

# Okabe and Ito's palette, which colour-blind readers can distinguish.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES = ("-", "--", "-.", ":")
GREY = "#555555"
FONT_SIZE, DPI = 13, 150
SMALL = 10
CHARACTERS_PER_INCH = 9
"""Number of characters of size `FONT_SIZE` per inch."""
LEGEND_LINE = 0.27
"""Height of a line of a legend in inches."""
FORMATS = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}, ".png": {}}
"""Ending of a figure's file → metadata without a date, so that the same figure has the same bytes."""
SETTINGS: dict[Any, Any] = {
    "font.size": FONT_SIZE,
    "figure.dpi": DPI,
    "pdf.fonttype": 42,
    "svg.fonttype": "none",
    "svg.hashsalt": "megatron-ddrp",
}
"""Text stays text: a PDF carries its fonts as TrueType, an SVG names them and can be edited."""


def figure_tools() -> Any:
    """Return what our figures need of pyplot, and set `SETTINGS`, which `run.guest` sets back.

    Figures are only written into files, so pyplot itself is not imported: its backend and its list of figures are the
    user's. Raises `UserError` if matplotlib is not installed.
    """
    need_packages("a figure", "matplotlib")
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import LogLocator, MaxNLocator

    def subplots(rows: int = 1, columns: int = 1, figsize: Any = None, layout: Any = None, **settings: Any) -> Any:
        figure = Figure(figsize=figsize, layout=layout)
        return figure, figure.subplots(rows, columns, **settings)

    matplotlib.rcParams.update(SETTINGS)
    return SimpleNamespace(
        figure=Figure, subplots=subplots, Line2D=Line2D, LogLocator=LogLocator, MaxNLocator=MaxNLocator
    )


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure as `path`, its .png, and as .pdf and .svg beside it. A failure leaves no half a file."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # the layout is computed once, for all files
    contents = {path.with_suffix(ending): render(figure, ending) for ending in FORMATS}
    for file, content in contents.items():
        write_bytes(file, content)


def render(figure: Any, ending: str, dpi: int = DPI) -> bytes:
    """Return a figure as the content of a file of one of the `FORMATS`."""
    stream = io.BytesIO()
    figure.savefig(stream, format=ending[1:], dpi=dpi, metadata=FORMATS[ending])
    return stream.getvalue()


def remove_figure(path: Path) -> None:
    """Remove all files of a figure, which may show data that no longer exist. `path` is its .png."""
    for ending in FORMATS:
        path.with_suffix(ending).unlink(missing_ok=True)


def run_style(number: int) -> dict[str, Any]:
    """Return the style of run `number`, counted from 0. No two of 49 runs share both colour and marker."""
    return {
        "color": COLORS[number % len(COLORS)],
        "marker": MARKERS[(number + number // len(COLORS)) % len(MARKERS)],
        "linestyle": LINES[number % len(LINES)],
        "linewidth": 2,
        "markersize": 7,
    }


def legend_below(figure: Any, handles: Mapping[str, Any]) -> None:
    """Put a legend below all panels and enlarge the figure by its height. `handles` maps labels to lines."""
    width, height = figure.get_size_inches()
    longest = max(map(len, handles)) + 8  # the line before the label
    columns = min(len(handles), max(1, int(width * CHARACTERS_PER_INCH / longest)))
    rows = -(-len(handles) // columns)
    figure.set_size_inches(width, height + LEGEND_LINE * rows + 0.2)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=columns)


def run_handles(labels: Iterable[str]) -> dict[str, Any]:
    """Return label → line for the legend of some runs, in their order, each in its `run_style`."""
    return {label: figure_tools().Line2D([], [], **run_style(number)) for number, label in enumerate(labels)}


def draw_band(axis: Any, points: Sequence[tuple[float, float, float, float]], style: Mapping[str, Any]) -> None:
    """Draw a line through points (x, mean, lowest, highest) and a band from lowest to highest; nothing without points.

    `style` has at least the `color`.
    """
    if points:
        x, mean, lowest, highest = zip(*points, strict=True)
        axis.plot(x, mean, **style)
        axis.fill_between(x, lowest, highest, color=style["color"], alpha=0.18, linewidth=0)


def draw_cells(axis: Any, shares: Any, reach: float, size: float | str | None = "small") -> Any:
    """Draw percentages `[rows, columns]` as coloured cells with numbers; return the image.

    White is 50 %, chance; the colours end at 50 ± `reach`. A cell of nan stays empty. `size` is the numbers' font size;
    with None there are no numbers.
    """
    image = axis.imshow(shares, cmap="RdBu", vmin=50 - reach, vmax=50 + reach, aspect="auto")
    for row, values in enumerate(shares if size else ()):
        for column, value in enumerate(values):
            if not math.isnan(value):
                color = "white" if abs(value - 50) > 0.65 * reach else "black"
                axis.text(column, row, f"{value:.0f}", ha="center", va="center", color=color, fontsize=size)
    return image


def panel_grid(
    count: int, columns: int, width: float, height: float, margins: tuple[float, float] = (0, 0), **settings: Any
) -> tuple[Any, Any]:
    """Return a figure and the axes `[rows, columns]` of `count` panels of a width and height in inches.

    There are at most `columns`, and no more than the rows need: four panels in three columns are two rows of two. Axes
    after the last panel are hidden. `margins` are the width and height of what stands beside the panels.
    """
    rows = -(-count // columns)
    columns = -(-count // rows)
    size = (width * columns + margins[0], height * rows + margins[1])
    figure, axes = figure_tools().subplots(rows, columns, squeeze=False, figsize=size, layout="constrained", **settings)
    for axis in list(axes.flat)[count:]:
        axis.set_axis_off()
    return figure, axes


def wrap_title(title: str, inches: float) -> str:
    """Return a title broken into lines that fit into a width in inches."""
    return textwrap.fill(title, max(10, int(inches * CHARACTERS_PER_INCH)))


def short_names(names: Sequence[str]) -> list[str]:
    """Return folders without the leading and trailing parts that all of them share; keep names without a `/`.

    A single folder keeps its last two parts, because the last one alone may be meaningless, such as `checkpoint`.
    """
    folders = {name: name.rstrip("/").split("/") for name in names if "/" in name}
    first, end = -2, 0
    if len(folders) > 1:
        first = min(len(os.path.commonprefix(list(folders.values()))), min(map(len, folders.values())) - 1)
        end = len(os.path.commonprefix([parts[:first:-1] for parts in folders.values()]))
    short = {name: "/".join(parts[first : len(parts) - end]) for name, parts in folders.items()}
    found = [short.get(name, name) for name in names]
    return found if len(set(found)) == len(set(names)) else list(names)


def thousands(value: float) -> str:
    """Return a number as text for an axis: 65,000, 312, 5.75, −0.003."""
    return (f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}").replace("-", "−")


def label_lines(axis: Any, ends: Mapping[str, tuple[float, float, str]]) -> None:
    """Write the names of lines beside their ends, moved apart where they would overlap.

    `ends` maps each name to the end's x and y, in the axis's units, and its colour.
    """
    axis.margins(x=0.02)
    figure = axis.get_figure()
    low, high = axis.get_ylim()
    rows = axis.get_subplotspec().get_gridspec().nrows
    gap = (high - low) * 1.3 * SMALL / 72 / (figure.get_size_inches()[1] / rows * 0.75)
    ordered = sorted(ends, key=lambda name: ends[name][1])
    heights = [ends[name][1] for name in ordered]
    for _ in range(200):  # push neighbours apart until none overlap
        for place in range(1, len(heights)):
            if (short := gap - (heights[place] - heights[place - 1])) > 1e-9 * gap:
                heights[place - 1] -= short / 2
                heights[place] += short / 2
    for name, height in zip(ordered, heights, strict=True):
        x, y, color = ends[name]
        at = (1.03, height)
        line = {"arrowstyle": "-", "color": color, "linewidth": 0.8, "shrinkA": 0, "shrinkB": 2}
        style = {"color": color, "fontsize": SMALL, "va": "center", "annotation_clip": False, "arrowprops": line}
        axis.annotate(name, (x, y), at, "data", axis.get_yaxis_transform(), **style)
