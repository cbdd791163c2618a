"""Pages as Markdown and HTML: text, tables, templates, figures, and the machine that made them.

Markdown for our pages. Names (folders, models, log lines) are escaped, so that they appear unchanged.

Generated blocks of Markdown files. Each stands between lines `<!-- NAME -->` and `<!-- end of NAME -->`.

Tables of a page as files: .csv for other programs, .tex for papers (LaTeX with the package booktabs).

Pages from templates: Markdown, and the same page as one self-contained HTML file.

The templates are the files in `templates/`. They only show values; Python computes them.

Hardware and package versions, as recorded in pages and in finished jobs.

Common style of all figures: labels stay readable at half size, and not only colours distinguish the runs.
"""

from __future__ import annotations

import base64
import csv
import io
import json
import math
import os
import platform
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_ddrp.data.atomic import write_bytes, write_text
from megatron_ddrp.errors import UserError, need_packages
from megatron_ddrp.foreign import read_text

_ENTITIES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})
_MARKUP = re.compile(r"(`[^`]+`)|(?<![\w*])\*([^*\s][^*]*)\*(?![\w*])")
"""Pattern of `code` (group 1) or *emphasised text* (group 2)."""


def escape(name: str) -> str:
    """Return Markdown that shows a name unchanged on one line of a paragraph or of a table cell."""
    return re.sub(r"([\\`*\[\]|])", r"\\\1", one_line(name).translate(_ENTITIES))


def one_line(text: str) -> str:
    """Return a text with a blank for each group of line breaks and control characters."""
    return re.sub(r"[\x00-\x1f\x7f\u2028\u2029]+", " ", text)


def paragraph(text: str) -> str:
    """Return a paragraph as Markdown; keep *emphasis* and `code`, escape everything else."""
    done, at = "", 0
    for found in _MARKUP.finditer(text):
        done += escape(text[at : found.start()]) + (found[1] or f"*{escape(found[2])}*")
        at = found.end()
    return done + escape(text[at:])


def code(lines: Sequence[str], language: str = "") -> str:
    """Return lines as a fenced code block; the lines may contain backticks."""
    longest = max((len(run) for line in lines for run in re.findall("`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    return "\n".join([fence + language, *lines, fence])


@dataclass(frozen=True)
class Table:
    """Table of escaped cells below an optional caption, which may have markup."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    is_paper: bool = False
    """True if the numbers are the paper's, which are shown in italics."""
    wordy: Sequence[int] = ()
    """Numbers of the columns with sentences. These and the first column are aligned to the left."""

    def is_left(self, column: int) -> bool:
        """Return whether a column, counted from 0, is aligned to the left."""
        return column in (0, *self.wordy)

    def __str__(self) -> str:
        star = "*" if self.is_paper else ""
        dashes = ["---" if self.is_left(number) else "---:" for number in range(len(self.header))]
        cells = [[f"{star}{escape(cell)}{star}" if cell else "" for cell in row] for row in self.rows]
        lines = [f"| {' | '.join(row)} |" for row in ([escape(name) for name in self.header], dashes, *cells)]
        return "\n".join([paragraph(self.caption), ""] * bool(self.caption) + lines)


def percent(share: float | None) -> str:
    """Return a share times 100 with two decimals; empty for None."""
    return "" if share is None else f"{100 * share:.2f}"


def block_names(text: str, prefix: str) -> list[str]:
    """Return the names of the blocks that begin with `prefix`, in the order of the text, each once."""
    found = re.findall(rf"^<!-- ({re.escape(prefix)}.+?) -->$", text, re.MULTILINE)
    return list(dict.fromkeys(found))


def read_block(text: str, name: str) -> str:
    """Return the content of the first block of a name. Raises `UserError` for a block without an end, or for none."""
    lines = text.split("\n")
    first, last = _places(lines, name)[0]
    return "\n".join(lines[first + 1 : last])


def replace_blocks(text: str, name: str, content: str) -> str:
    """Return a text with a new content of every block of a name. Raises `UserError` as `read_block` does."""
    lines = text.split("\n")
    for first, last in reversed(_places(lines, name)):
        lines[first + 1 : last] = content.split("\n")
    return "\n".join(lines)


def write_blocks(path: Path, prefix: str, contents: Mapping[str, str]) -> list[str]:
    """Replace the blocks `prefix NAME` of a Markdown file by the contents of these names; return those that it has.

    Raises:
        UserError: the file is missing or not UTF-8, has no block, an unknown one, or one without an end.
    """
    text = read_text(path)
    names = [name.removeprefix(prefix) for name in block_names(text, prefix)]
    unknown = [name for name in names if name not in contents]
    if unknown or not names:
        got = f"unknown table {unknown[0]!r}" if unknown else f"no line <!-- {prefix}NAME -->"
        raise UserError(f"{path}: {got}; expected one of {', '.join(contents)}")
    for name in names:
        try:
            text = replace_blocks(text, prefix + name, contents[name])
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
    write_text(path, text)
    return names


def _places(lines: list[str], name: str) -> list[tuple[int, int]]:
    """Return the numbers of the first and last line of every block of a name, markers included."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    markers = [(number, line) for number, line in enumerate(lines) if line in (begin, end)]
    if not markers or [line for _, line in markers] != [begin, end] * (len(markers) // 2):
        raise UserError(f"expected a line {begin} before every line {end}, and one {end} after every {begin}")
    numbers = [number for number, _ in markers]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


_LATEX = str.maketrans(
    {
        **{character: "\\" + character for character in "&%$#_{}"},
        **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "`": r"\textasciigrave{}"},
        **{"–": r"\textendash{}", "—": r"\textemdash{}", "…": r"\dots{}", "²": r"\textsuperscript{2}"},
        **{"<": "$<$", ">": "$>$", "|": "$|$", "±": r"$\pm$", "−": "$-$", "×": r"$\times$", "÷": r"$\div$"},
        **{"·": r"$\cdot$", "→": r"$\to$", "≤": r"$\leq$", "≥": r"$\geq$", "√": r"$\surd$"},
        **{"α": r"$\alpha$", "β": r"$\beta$", "μ": r"$\mu$", "σ": r"$\sigma$", "Σ": r"$\Sigma$"},
    }
)
"""Character → LaTeX that prints it."""
_MINUS = re.compile(r"(?<![\w.)\-−])[-−](?=\d)")
"""Sign of a negative number."""
_COMMANDS = re.compile(r"^[\[*]|-(?=-)")
"""Text that LaTeX reads as a command: [ or * after the end of a row, and two hyphens, which become a dash."""


def latex(text: str) -> str:
    """Return LaTeX that prints a text on one line of a table's cell."""
    return _COMMANDS.sub(r"{\g<0>}", _MINUS.sub("−", one_line(text)).translate(_LATEX))


def as_latex(table: Table) -> str:
    r"""Return a table as a `tabular`, for `\input` in the table of a paper. Its caption is a comment."""

    def row(cells: Sequence[str], is_paper: bool = False) -> str:
        return " & ".join(rf"\emph{{{latex(cell)}}}" if cell and is_paper else latex(cell) for cell in cells) + r" \\"

    columns = "".join("l" if table.is_left(number) else "r" for number in range(len(table.header)))
    lines = [
        r"% needs \usepackage{booktabs}",
        *[f"% {one_line(table.caption)}"] * bool(table.caption),
        rf"\begin{{tabular}}{{{columns}}}",
        r"\toprule",
        row(table.header),
        r"\midrule",
        *(row(cells, table.is_paper) for cells in table.rows),
        r"\bottomrule",
        r"\end{tabular}",
    ]
    return "\n".join(lines) + "\n"


def as_csv(table: Table) -> str:
    """Return a table's header and rows as comma-separated values, with the hyphen as the sign of negative numbers."""
    stream = io.StringIO()
    rows = ([_MINUS.sub("-", one_line(cell)) for cell in row] for row in (table.header, *table.rows))
    csv.writer(stream, lineterminator="\n").writerows(rows)
    return stream.getvalue()


def write_tables(folder: Path, tables: Mapping[str, Table | None]) -> None:
    """Write each table with rows as NAME.csv and NAME.tex into a folder; remove the files of one without rows.

    Files NAME-1, NAME-2, … of these names that are no table any more are removed too.
    """
    for path in folder.glob("*-*"):
        if path.stem not in tables and path.suffix in (".csv", ".tex") and re.sub(r"-\d+$", "", path.stem) in tables:
            path.unlink()
    for name, table in tables.items():
        for ending, text in ((".csv", as_csv), (".tex", as_latex)):
            path = folder / f"{name}{ending}"
            if table is not None and table.rows:
                write_text(path, text(table))
            else:
                path.unlink(missing_ok=True)


_FILTERS = {"name": escape, "marked": paragraph, "code": code}


def render_page(template: str, **values: Any) -> str:
    """Return a template's text with these values and one final line break."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("megatron_ddrp.pages"), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= _FILTERS
    return environment.get_template(template).render(values).strip() + "\n"


def write_page(folder: Path, text: str, title: str, numbers: dict[str, Any]) -> None:
    """Write page.md, the same page as page.html, and its numbers as results.json; the figures are there already."""
    texts = {
        "page.md": text,
        "page.html": to_html(text, title, folder),
        "results.json": json.dumps(numbers, indent=1) + "\n",
    }
    for name, content in texts.items():
        write_text(folder / name, content)


def to_html(text: str, title: str, folder: Path) -> str:
    """Return a page of Markdown as one HTML file that contains its figures, which are files below `folder`."""
    from markdown import Markdown
    from markdown.inlinepatterns import SimpleTextInlineProcessor
    from markdown.treeprocessors import Treeprocessor

    class Finish(Treeprocessor):
        """Step that puts the figures into the page and lets wide tables scroll."""

        def run(self, root: Any) -> None:
            for image in root.iter("img"):
                data = base64.b64encode((folder / image.get("src")).read_bytes()).decode()
                image.set("src", f"data:image/png;base64,{data}")
            for table in root.findall("table"):
                scroll = root.makeelement("div", {"class": "scroll", "tabindex": "0"})
                root[list(root).index(table)] = scroll
                scroll.append(table)

    converter = Markdown(extensions=["fenced_code", "tables"], output_format="html")
    underscores = SimpleTextInlineProcessor("(_+)")  # names may contain underscores, which mean no emphasis here
    converter.inlinePatterns.register(underscores, "underscores", 75)
    converter.treeprocessors.register(Finish(converter), "finish", 0)
    return render_page("page.html.jinja", title=title, body=converter.convert(text))


PACKAGES = ("megatron-ddrp", "torch", "deepspeed", "numpy", "tokenizers", "transformers", "scipy")


@lru_cache(maxsize=1)
def gpu_names() -> tuple[str, ...]:
    """Return the names of the GPUs that torch sees."""
    import torch

    return tuple(torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count()))


@lru_cache(maxsize=1)
def hardware() -> str:
    """Return a description of this machine, such as `2 x Some GPU, 16 cores of Some CPU with AVX512`.

    The vector instructions of a CPU change its speed and the last bits of its results.
    """
    import torch

    gpus = gpu_names()
    counted = [f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)]
    vectors = torch.backends.cpu.get_cpu_capability()
    with_vectors = "" if vectors == "DEFAULT" else f" with {vectors}"
    return ", ".join([*counted, f"{os.cpu_count()} cores of {_cpu_name()}{with_vectors}"])


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


@lru_cache(maxsize=1)
def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that affect results."""
    found = {"Python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


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
