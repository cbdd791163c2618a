"""Tables of a page as files: .csv for other programs, .tex for papers (LaTeX with the package booktabs)."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_ddrp.data.atomic import write_text
from megatron_ddrp.pages.markdown import Table, one_line

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
