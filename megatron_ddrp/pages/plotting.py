"""Figures in one common style, and the curves of all commands.

Labels stay readable at half size, and not only colours distinguish the runs. Figures are written as .png, .pdf and
.svg.
"""

from __future__ import annotations

import io
import os
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

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

    def subplots(rows: int = 1, columns: int = 1, figsize: Any = None, **settings: Any) -> Any:
        figure = Figure(figsize=figsize, layout="constrained")
        return figure, figure.subplots(rows, columns, **settings)

    matplotlib.rcParams.update(SETTINGS)
    return SimpleNamespace(subplots=subplots, Line2D=Line2D, LogLocator=LogLocator, MaxNLocator=MaxNLocator)


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


def run_style(number: int) -> dict[str, Any]:
    """Return the style of run `number`, counted from 0. No two of 49 runs share both colour and marker."""
    return {
        "color": COLORS[number % len(COLORS)],
        "marker": MARKERS[(number + number // len(COLORS)) % len(MARKERS)],
        "linestyle": LINES[number % len(LINES)],
        "linewidth": 2,
        "markersize": 7,
    }


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


def run_styles(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return name → `run_style` of some runs, in their order."""
    return {name: run_style(number) for number, name in enumerate(names)}


def legend_below(figure: Any, styles: Mapping[str, Mapping[str, Any]]) -> None:
    """Put a legend below all panels and enlarge the figure by its height. `styles` maps labels to styles of lines."""
    width, height = figure.get_size_inches()
    longest = max(map(len, styles)) + 8  # the line before the label
    columns = min(len(styles), max(1, int(width * CHARACTERS_PER_INCH / longest)))
    rows = -(-len(styles) // columns)
    figure.set_size_inches(width, height + LEGEND_LINE * rows + 0.2)
    lines = [figure_tools().Line2D([], [], **style) for style in styles.values()]
    figure.legend(lines, styles.keys(), loc="outside lower center", ncols=columns)


def panel_grid(count: int, columns: int, size: tuple[float, float]) -> tuple[Any, list[Any]]:
    """Return a figure and the axes of `count` panels, row by row; `size` is a panel's width and height in inches.

    There are at most `columns`, and no more than the rows need: four panels in three columns are two rows of two.
    """
    rows = -(-count // columns)
    columns = -(-count // rows)
    figure, axes = figure_tools().subplots(rows, columns, (size[0] * columns, size[1] * rows), squeeze=False)
    for axis in list(axes.flat)[count:]:
        axis.set_axis_off()
    return figure, list(axes.flat)[:count]


class Line(NamedTuple):
    """Line of a panel of curves."""

    points: Sequence[Sequence[float | None]]
    """Points (x, value) or (x, mean, lowest, highest); the latter have a band. Points without a value are left out."""
    style: Mapping[str, Any]
    name: str = ""
    """Text beside the panel."""


class Panel(NamedTuple):
    """Axes with curves."""

    lines: Sequence[Line]
    title: str = ""
    x: str = ""
    """Label of the horizontal axis, whose values are whole numbers."""
    y: str = ""
    unit: float = 1.0
    """Value that the horizontal axis shows as 1."""
    levels: Sequence[float] = ()
    """Heights of horizontal lines in the style `LEVEL`."""


LEVEL = {"color": GREY, "linestyle": ":", "linewidth": 2}
"""Style of a horizontal line to compare curves with."""
BAND = {"color": GREY, "alpha": 0.4, "linewidth": 8}
"""Style of all bands in a legend."""
FEW_POINTS = 3
"""Most points of a curve that are drawn as points too: their line is short, or none."""


def draw_curves(
    panels: Sequence[Panel],
    columns: int = 3,
    size: tuple[float, float] = (5.5, 4.2),
    legend: Mapping[str, Mapping[str, Any]] | None = None,
) -> Any:
    """Return a figure with panels of curves, each of a size in inches, above a legend of styles.

    The names of lines stand beside their panel in the order of the lines' ends.
    """
    figure, axes = panel_grid(len(panels), columns, size)
    for axis, panel in zip(axes, panels, strict=True):
        for line in sorted(panel.lines, key=lambda line: -(line.points[-1][1] or 0.0) if line.name else 0.0):
            draw_line(axis, line)
        for level in panel.levels:
            axis.axhline(level, **LEVEL)
        if any(line.name for line in panel.lines):
            axis.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=SMALL, frameon=False)
        axis.set_title(wrap_title(panel.title, 0.9 * size[0]), fontsize="small")
        axis.set(xlabel=panel.x, ylabel=panel.y)
        axis.grid(alpha=0.3)
        axis.xaxis.set_major_locator(figure_tools().MaxNLocator(5, integer=True))
        axis.xaxis.set_major_formatter(lambda value, _, unit=panel.unit: thousands(value / unit))
    if legend:
        legend_below(figure, legend)
    return figure


def draw_line(axis: Any, line: Line) -> None:
    """Draw a curve with its band or, if an x is unknown, a horizontal line at the last value."""
    known = [point for point in line.points if point[1] is not None]
    if not known:
        return
    if any(point[0] is None for point in known):
        axis.axhline(known[-1][1], **{key: line.style[key] for key in ("color", "linestyle", "linewidth")})
        return
    x, values, *ends = zip(*known, strict=True)
    marker = {"marker": "."} if len(known) <= FEW_POINTS else {}
    axis.plot(x, values, **marker | dict(line.style), label=line.name or None, markevery=max(1, len(known) // 8))
    if ends:
        axis.fill_between(x, *ends, color=line.style["color"], alpha=0.18, linewidth=0)


def save_figures(folder: Path, figures: Mapping[str, Callable[[], Any]]) -> list[str]:
    """Write each NAME.png with its .pdf and .svg into a folder; return the names of those with data.

    `figures` maps names to functions that return a figure, or None without data. The files of such a one are removed:
    they may show data that no longer exist.
    """
    drawn = []
    for name, draw in figures.items():
        if figure := draw():
            folder.mkdir(parents=True, exist_ok=True)
            save_figure(figure, folder / name)
            drawn.append(name)
        else:
            for ending in FORMATS:
                (folder / name).with_suffix(ending).unlink(missing_ok=True)
    return drawn
