"""Names and numbers in figures: short, told apart, and right."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_ddrp.errors import UserError
from megatron_ddrp.pages.markdown import (
    FORMATS,
    figure_tools,
    remove_figure,
    run_style,
    save_figure,
    short_names,
    thousands,
    wrap_title,
)


@pytest.fixture(autouse=True)
def coarse_figures() -> None:
    """Take the place of the fixture of this name: figures here are written in full."""


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["runs/a", "runs/b"], ["a", "b"]),
        (["/data/a/hf/", "/data/b/hf"], ["a", "b"]),
        (["/data/a/b/m", "/data/a/c/n"], ["b/m", "c/n"]),
        (["/data/x", "/data/x/y"], ["x", "x/y"]),
        (["runs/ddrp/checkpoint"], ["ddrp/checkpoint"]),
        (["bert", "counts alone"], ["bert", "counts alone"]),
        (["a", "runs/a", "runs/b"], ["a", "runs/a", "runs/b"]),  # else two would be called a
        ([], []),
    ],
)
def test_folders_are_named_by_what_tells_them_apart(names: list[str], short: list[str]) -> None:
    assert short_names(names) == short


def test_forty_nine_runs_look_different_without_lines() -> None:
    looks = {(style["color"], style["marker"]) for style in map(run_style, range(49))}
    assert len(looks) == 49


def test_an_axis_has_the_number_that_is_there() -> None:
    assert [thousands(x) for x in (65_000.0, 312.0, 62.5, 5.75, -0.003)] == ["65,000", "312", "62.5", "5.75", "−0.003"]


def test_a_long_title_keeps_all_its_words() -> None:
    title = "Development scores of eleven encoders on all of the tasks of GLUE at the best grid point"
    lines = wrap_title(title, 4.0).split("\n")
    assert " ".join(lines) == title and max(map(len, lines)) <= 36


def save(path: Path) -> dict[str, bytes]:
    """Save one figure, and return the content of its files by ending."""
    plt = figure_tools()
    figure, axis = plt.subplots(figsize=(3, 2), layout="constrained")
    axis.plot([0, 1], [0, -1], label="ddrp & mth")
    axis.set(title="σ of 3 seeds", xlabel="tokens")
    axis.legend()
    save_figure(figure, path)
    return {file.suffix: file.read_bytes() for file in path.parent.iterdir() if file.stem == path.stem}


def test_a_figure_has_a_png_a_pdf_and_an_svg_whose_text_stays_text(tmp_path: Path) -> None:
    files = save(tmp_path / "losses.png")
    assert files.keys() == FORMATS.keys()
    assert files[".png"].startswith(b"\x89PNG")
    assert files[".pdf"].startswith(b"%PDF") and b"/FontFile2" in files[".pdf"] and b"/Type3" not in files[".pdf"]
    assert all(f">{text}</text>".encode() in files[".svg"] for text in ("ddrp &amp; mth", "σ of 3 seeds", "tokens"))


def test_the_same_figure_has_the_same_bytes_another_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = save(tmp_path / "a.png")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")
    assert save(tmp_path / "b.png") == first


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


def test_a_removed_figure_leaves_no_file_and_others_alone(tmp_path: Path) -> None:
    save(tmp_path / "speed.png")
    (tmp_path / "speed.json").write_text("{}")
    remove_figure(tmp_path / "speed.png")
    remove_figure(tmp_path / "speed.png")
    assert [path.name for path in tmp_path.iterdir()] == ["speed.json"]


def test_a_figure_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "losses.pdf").mkdir()
    with pytest.raises(UserError, match="losses.pdf: cannot be written: it is a folder"):
        save(tmp_path / "losses.png")
    assert [path.name for path in tmp_path.iterdir()] == ["losses.pdf"]
