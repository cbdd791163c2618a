"""Pages as Markdown and HTML: text, tables, generated blocks, templates, and the machine that made them.

Names (folders, models, log lines) are escaped, so that they appear unchanged. A generated block of a Markdown file
stands between lines `<!-- NAME -->` and `<!-- end of NAME -->`. Tables also become files: .csv for other programs, .tex
for papers (LaTeX with the package booktabs). The templates are the files in `templates/`; they only show values, Python
computes them. A page becomes Markdown and one self-contained HTML file.
"""

from __future__ import annotations

import base64
import csv
import io
import os
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ddrp.data.atomic import write_text
from megatron_ddrp.errors import UserError
from megatron_ddrp.foreign import read_text
from megatron_ddrp.pages.plotting import save_figures

if TYPE_CHECKING:
    from jinja2 import Environment

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
    return _environment().get_template(template).render(values).strip() + "\n"


@lru_cache
def _environment() -> Environment:
    """Return the environment of the templates, which compiles each of them once per process."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("megatron_ddrp.pages"), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= _FILTERS
    return environment


def write_page(
    folder: Path,
    texts: Mapping[str, str],
    tables: Mapping[str, Table | None],
    figures: Mapping[str, Callable[[], Any]],
) -> str:
    """Write texts by file name, `write_tables` into tables/ and, with matplotlib, figures; return a line about them."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tables(folder / "tables", tables)
    for name, text in texts.items():
        write_text(folder / name, text)
    draws = find_spec("matplotlib") is not None
    drawn = save_figures(folder, figures) if draws else []
    return (
        f"written to {folder}: {', '.join([*texts, 'tables/', *drawn])}{'' if draws else '; figures need matplotlib'}"
    )


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
def hardware() -> str:
    """Return a description of this machine, such as `2 x Some GPU, 16 cores of Some CPU with AVX512`.

    The vector instructions of a CPU change its speed and the last bits of its results.
    """
    import torch

    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
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
