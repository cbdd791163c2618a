"""Pages: names in Markdown, tables as files, figures, and the machine as pages and rows describe it.

A renderer shows names as they stand, and never as markup or a column. What other programs and LaTeX read in a table's
file is what the page shows. Names and numbers in figures are short, told apart, and right.
"""

import csv
import html
import re
from pathlib import Path

import pytest
import torch

from megatron_ddrp.pages import markdown, plotting
from megatron_ddrp.pages.markdown import Table, as_csv, as_latex, code, escape, latex, write_page, write_tables
from megatron_ddrp.pages.plotting import Line, Panel, draw_curves, run_style, short_names, thousands
from tests.refusals import refused

NAMES = ["runs/a_b-c.1", "<script>alert(1)</script>", "a|b", "`x`", r"c:\d\|e", "*x* & [y](javascript:z)", "&lt;b&gt;"]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_shown_as_it_stands(name):
    escaped = escape(name)
    assert not re.search(r"[<>]", escaped)
    assert not re.search(r"(?<!\\)(\\\\)*[`*|\[\]]", re.sub(r"\\[`*|\[\]]", "", escaped)), "one is left unescaped"
    assert html.unescape(re.sub(r"\\([\\`*\[\]|])", r"\1", escaped)) == name
    assert escape(f"{name}\n# b\r\u2028c\x00") == f"{escaped} # b c "


TABLE = Table(["model", "gain ± error", "verdict"], [["runs/a_b", "−1.20", "50 % & more"], ["[x]", "", ""]], wordy=[2])
LATEX = r"""% needs \usepackage{booktabs}
\begin{tabular}{lrl}
\toprule
model & gain $\pm$ error & verdict \\
\midrule
runs/a\_b & $-$1.20 & 50 \% \& more \\
{[}x] &  &  \\
\bottomrule
\end{tabular}"""
CELLS = {
    "-0.24…5.16": r"$-$0.24\dots{}5.16",
    "(−3.87 to +3.63)": "($-$3.87 to +3.63)",
    "a–b": r"a\textendash{}b",
    "--kind bert-r 1e-05": "{-}-kind bert-r 1e-05",
    r"c:\d^~{x}$#": r"c:\textbackslash{}d\textasciicircum{}\textasciitilde{}\{x\}\$\#",
    "2 < 3 | *": "2 $<$ 3 $|$ *",
    "*bold*\n\x1b": "{*}bold* ",
}


def test_tables_and_code_in_markdown_latex_and_csv():
    """A paper's numbers are in italics; a LaTeX caption is a comment; a CSV's numbers are numbers."""
    text = "of *b*\n\n| a | b | c |\n| --- | ---: | --- |\n| *1* | *2* |  |"
    assert str(Table(["a", "b", "c"], [["1", "2", ""]], "of *b*", is_paper=True, wordy=(2,))) == text
    assert code(["a", "```", "<b>"]) == "````\na\n```\n<b>\n````"
    assert as_latex(TABLE).splitlines() == LATEX.splitlines() and {cell: latex(cell) for cell in CELLS} == CELLS
    lines = as_latex(Table(["a", "b"], [["1", ""]], "of 3\nseeds", is_paper=True)).splitlines()
    assert (lines[1], lines[6]) == ("% of 3 seeds", r"\emph{1} &  \\")
    table = Table(["a,b", 'say "x"'], [["−1.5", "bert-r"], ["", "two\nlines"]])
    assert list(csv.reader(as_csv(table).splitlines())) == [["a,b", 'say "x"'], ["-1.5", "bert-r"], ["", "two lines"]]


def test_files_of_tables_that_are_empty_or_of_an_earlier_page_go_and_others_stay(tmp_path: Path) -> None:
    write_tables(tmp_path, {"scores": TABLE, "gains": TABLE, "paper": None})
    write_tables(tmp_path, {"scores": TABLE, "gains": Table(["a"], []), "paper": None})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["scores.csv", "scores.tex"]
    assert (tmp_path / "scores.tex").read_text(encoding="utf-8") == as_latex(TABLE)
    write_tables(tmp_path, {"scores-1": TABLE, "scores-2": TABLE, "mine": TABLE})
    (tmp_path / "other-1.csv").write_text("of somebody else")
    write_tables(tmp_path, {"scores": None, "scores-1": TABLE})
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"scores-1.csv", "scores-1.tex", "mine.csv", "mine.tex", "other-1.csv"}


def test_a_page_without_matplotlib_lacks_only_its_figures(tmp_path, monkeypatch):
    monkeypatch.setattr(markdown, "find_spec", lambda name: None)
    written = write_page(tmp_path / "out", {"table.md": "text"}, {"scores": TABLE}, {"table.png": pytest.fail})
    assert written == f"written to {tmp_path / 'out'}: table.md, tables/; figures need matplotlib"
    assert sorted(path.name for path in (tmp_path / "out").rglob("*.*")) == ["scores.csv", "scores.tex", "table.md"]


@pytest.fixture(autouse=True)
def coarse_figures() -> None:
    """Take the place of the fixture of this name: figures here are written in full."""


FOLDERS = {
    ("runs/a", "runs/b"): ["a", "b"],
    ("/data/a/hf/", "/data/b/hf"): ["a", "b"],
    ("/data/a/b/m", "/data/a/c/n"): ["b/m", "c/n"],
    ("/data/x", "/data/x/y"): ["x", "x/y"],
    ("runs/ddrp/checkpoint",): ["ddrp/checkpoint"],
    ("bert", "counts alone"): ["bert", "counts alone"],
    ("a", "runs/a", "runs/b"): ["a", "runs/a", "runs/b"],  # else two would be called a
    (): [],
}


def test_folders_runs_numbers_and_titles_are_told_apart_and_whole() -> None:
    """Forty-nine runs look different without lines."""
    assert {names: short_names(list(names)) for names in FOLDERS} == FOLDERS
    assert len({(style["color"], style["marker"]) for style in map(run_style, range(49))}) == 49
    assert [thousands(x) for x in (65_000.0, 312.0, 62.5, 5.75, -0.003)] == ["65,000", "312", "62.5", "5.75", "−0.003"]
    title = "Development scores of eleven encoders on all of the tasks of GLUE at the best grid point"
    lines = plotting.wrap_title(title, 4.0).split("\n")
    assert " ".join(lines) == title and max(map(len, lines)) <= 36


def save(path: Path) -> dict[str, bytes]:
    """Save one figure, and return the content of its files by ending."""
    figure, axis = plotting.figure_tools().subplots(figsize=(3, 2))
    axis.plot([0, 1], [0, -1], label="ddrp & mth")
    axis.set(title="σ of 3 seeds", xlabel="tokens")
    axis.legend()
    plotting.save_figure(figure, path)
    return {file.suffix: file.read_bytes() for file in path.parent.iterdir() if file.stem == path.stem}


def test_a_figure_has_a_png_a_pdf_and_an_svg_whose_text_stays_text_the_same_another_day(tmp_path, monkeypatch):
    files = save(tmp_path / "losses.png")
    assert files.keys() == plotting.FORMATS.keys()
    assert files[".png"].startswith(b"\x89PNG")
    assert files[".pdf"].startswith(b"%PDF") and b"/FontFile2" in files[".pdf"] and b"/Type3" not in files[".pdf"]
    assert all(f">{text}</text>".encode() in files[".svg"] for text in ("ddrp &amp; mth", "σ of 3 seeds", "tokens"))
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")
    assert save(tmp_path / "b.png") == files


def test_pyplot_and_its_figures_stay_the_users(tmp_path: Path) -> None:
    import matplotlib
    from matplotlib import pyplot as users

    before = matplotlib.get_backend()
    users.switch_backend("svg")
    drawn = users.figure()
    try:
        save(tmp_path / "a.png")
        assert matplotlib.get_backend() == "svg" and users.get_fignums() == [drawn.number]
    finally:
        users.close(drawn)
        users.switch_backend(before)


def test_a_figure_without_data_or_that_cannot_be_written_leaves_no_file_and_others_alone(tmp_path: Path) -> None:
    save(tmp_path / "speed.png")
    (tmp_path / "speed.json").write_text("{}")
    for _ in range(2):
        assert plotting.save_figures(tmp_path, {"speed.png": lambda: None}) == []
    assert [path.name for path in tmp_path.iterdir()] == ["speed.json"]
    (tmp_path / "losses.pdf").mkdir()
    refused("losses.pdf: cannot be written: it is a folder", save, tmp_path / "losses.png")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["losses.pdf", "speed.json"]


def test_the_names_of_lines_stand_in_the_order_of_their_ends_and_a_curve_has_a_band_and_no_points_without_value():
    ends = {"low": 1.0, "high": 3.0, "mid": 2.0}
    lines = [Line([(1, 5.0), (2, end)], run_style(0), name) for name, end in ends.items()]
    first, second = draw_curves([Panel(lines, levels=[2.5]), Panel([Line([(0, 1.0)], run_style(0))])]).axes
    assert [text.get_text() for text in first.get_legend().get_texts()] == ["high", "mid", "low"]
    assert list(first.lines[-1].get_ydata()) == [2.5, 2.5] and second.get_legend() is None
    points = [(1, 2.0, 1.0, 3.0), (2, None, None, None), (3, 4.0, 3.0, 6.0)]
    (axis,) = draw_curves([Panel([Line(points, run_style(0))])]).axes
    assert [list(values) for values in axis.lines[0].get_data()] == [[1, 3], [2, 4]]
    assert {tuple(at) for at in axis.collections[0].get_paths()[0].vertices} == {(1, 1), (1, 3), (3, 3), (3, 6)}


@pytest.mark.parametrize(("found", "end"), [("AVX2", "Some CPU with AVX2"), ("DEFAULT", "Some CPU")])
def test_the_hardware_has_the_vector_instructions_of_a_cpu(found, end, monkeypatch):
    monkeypatch.setattr(markdown, "_cpu_name", lambda: "Some CPU")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: found)
    assert markdown.hardware.__wrapped__().endswith(end)
