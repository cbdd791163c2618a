"""Tables as files: what other programs and LaTeX read is what the page shows."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from megatron_ddrp.pages.markdown import Table, as_csv, as_latex, latex, write_tables

TABLE = Table(["model", "gain ± error", "verdict"], [["runs/a_b", "−1.20", "50 % & more"], ["[x]", "", ""]], wordy=[2])


def test_latex_is_a_tabular_with_the_alignment_of_the_page() -> None:
    assert as_latex(TABLE).splitlines() == [
        r"% needs \usepackage{booktabs}",
        r"\begin{tabular}{lrl}",
        r"\toprule",
        r"model & gain $\pm$ error & verdict \\",
        r"\midrule",
        r"runs/a\_b & $-$1.20 & 50 \% \& more \\",
        r"{[}x] &  &  \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]


def test_a_papers_numbers_are_in_italics_and_a_caption_is_a_comment() -> None:
    lines = as_latex(Table(["a", "b"], [["1", ""]], "of 3\nseeds", is_paper=True)).splitlines()
    assert lines[1] == "% of 3 seeds" and lines[6] == r"\emph{1} &  \\"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("-0.24…5.16", r"$-$0.24\dots{}5.16"),
        ("(−3.87 to +3.63)", "($-$3.87 to +3.63)"),
        ("a–b", r"a\textendash{}b"),
        ("--kind bert-r 1e-05", "{-}-kind bert-r 1e-05"),
        (r"c:\d^~{x}$#", r"c:\textbackslash{}d\textasciicircum{}\textasciitilde{}\{x\}\$\#"),
        ("2 < 3 | *", "2 $<$ 3 $|$ *"),
        ("*bold*\n\x1b", "{*}bold* "),
        ("naïve", "naïve"),
    ],
)
def test_latex_prints_what_the_cell_says(text: str, expected: str) -> None:
    assert latex(text) == expected


def test_csv_is_read_back_and_its_numbers_are_numbers() -> None:
    table = Table(["a,b", 'say "x"'], [["−1.5", "bert-r"], ["", "two\nlines"]])
    assert list(csv.reader(as_csv(table).splitlines())) == [["a,b", 'say "x"'], ["-1.5", "bert-r"], ["", "two lines"]]


def test_a_table_without_rows_has_no_files_and_loses_its_old_ones(tmp_path: Path) -> None:
    write_tables(tmp_path / "tables", {"scores": TABLE, "gains": TABLE, "paper": None})
    write_tables(tmp_path / "tables", {"scores": TABLE, "gains": Table(["a"], []), "paper": None})
    assert sorted(path.name for path in (tmp_path / "tables").iterdir()) == ["scores.csv", "scores.tex"]
    assert (tmp_path / "tables" / "scores.tex").read_text(encoding="utf-8") == as_latex(TABLE)


def test_the_numbered_files_of_an_earlier_page_go(tmp_path: Path) -> None:
    write_tables(tmp_path / "tables", {"scores-1": TABLE, "scores-2": TABLE, "mine": TABLE})
    (tmp_path / "tables" / "other-1.csv").write_text("of somebody else")
    write_tables(tmp_path / "tables", {"scores": None, "scores-1": TABLE})
    names = {path.name for path in (tmp_path / "tables").iterdir()}
    assert names == {"scores-1.csv", "scores-1.tex", "mine.csv", "mine.tex", "other-1.csv"}
