"""Names and numbers in figures: short, told apart, and right."""

from __future__ import annotations

import pytest

from megatron_ddrp.pages.plotting import run_style, short_names, thousands, wrapped


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
    lines = wrapped(title, 4.0).split("\n")
    assert " ".join(lines) == title and max(map(len, lines)) <= 36
