"""Figures of the page: curves with a band from the lowest to the highest seed, and differences to the baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ddrp.pages.plotting import (
    COLORS,
    draw_band,
    handles_by_label,
    hide_rest,
    pyplot,
    remove_figure,
    run_style,
    save_figure,
)
from megatron_ddrp.tasks.compare.comparison import Compared, measures
from megatron_ddrp.tasks.compare.results import Curve, Results
from megatron_ddrp.tasks.ladder.measures import GLUE, LOSS, STEP_SECONDS
from megatron_ddrp.tasks.ladder.rows import Arm
from megatron_ddrp.tasks.statistics import mean_and_band

Curves = Mapping[Arm, Sequence[Curve]]
STEPS = "training step"


def draw_all(results: Results, compared: Mapping[str, Sequence[Compared]], folder: Path) -> dict[str, Path]:
    """Draw the figures that have data; return name → file. `compared` maps each measure to its models."""
    loss = "validation masked-LM loss [nats]"
    wanted = {
        "loss-steps": (_curves(results, LOSS), STEPS, loss),
        "loss-seconds": (_curves(results, LOSS, over_seconds=True), "training time [s]", loss),
        "glue-curve": (_curves(results, GLUE, factor=100.0), STEPS, "GLUE average × 100"),
    }
    drawn = {}
    for name, (curves, x_label, y_label) in wanted.items():
        path = folder / f"{name}.png"
        remove_figure(path)
        if any(curves.values()):
            draw_bands(curves, x_label, y_label, path)
            drawn[name] = path
    path = folder / "measures.png"
    remove_figure(path)
    if panels := compared_panels(results, compared):
        draw_differences(panels, path)
        drawn[path.stem] = path
    return drawn


def compared_panels(results: Results, compared: Mapping[str, Sequence[Compared]]) -> dict[str, list[Compared]]:
    """Return measure → models with a difference to the baseline; empty if no model has an interval over items."""
    panels = {measure: [row for row in compared[measure] if row.difference] for measure in measures(results)}
    has_items = any(row.over_items for rows in panels.values() for row in rows)
    return {measure: rows for measure, rows in panels.items() if rows} if has_items else {}


def draw_differences(panels: Mapping[str, Sequence[Compared]], path: Path) -> None:
    """Draw one panel per measure with the differences to the baseline and their intervals over seeds and items."""
    plt = pyplot()
    arms = list(dict.fromkeys(row.arm for rows in panels.values() for row in rows))
    columns = min(len(panels), 2 if len(panels) == 4 else 3)
    lines = -(-len(panels) // columns)
    size = (2.6 + 3.0 * columns, 0.5 + lines * (1.4 + 0.55 * len(arms)))
    figure, axes = plt.subplots(lines, columns, squeeze=False, sharey=True, figsize=size, layout="constrained")
    hide_rest(axes, len(panels))
    for axis, (measure, rows) in zip(axes.flat, panels.items(), strict=False):
        is_loss = measure == LOSS
        for row in rows:
            _draw_difference(axis, row, arms.index(row.arm), 1 if is_loss else 100)
        axis.axvline(0, color="grey", linestyle=":", linewidth=1.5)
        axis.set_title("validation loss" if is_loss else measure)
        axis.set_xlabel("nats, less is better" if is_loss else "points, more is better")
        axis.grid(axis="x", alpha=0.3)
    axes[0, 0].set_yticks(range(len(arms)), [arm.label for arm in arms])
    axes[0, 0].set_ylim(len(arms) - 0.5, -0.5)
    found = handles_by_label(*axes.flat)
    figure.legend(found.values(), found.keys(), loc="outside upper right", ncols=2, fontsize="small")
    save_figure(plt, figure, path)


def _draw_difference(axis: Any, row: Compared, place: int, factor: int) -> None:
    """Draw a model's difference times `factor`, at height `place`."""
    assert row.difference is not None
    for interval, shift, color, label in (
        (row.difference.interval, -0.13, COLORS[0], "over seeds"),
        (row.over_items, 0.13, COLORS[1], "over items"),
    ):
        if interval:
            axis.plot(np.multiply(interval, factor), [place + shift] * 2, color=color, linewidth=4, label=label)
    axis.plot([factor * row.difference.mean] * 2, [place - 0.28, place + 0.28], color="black", linewidth=2)


def draw_bands(curves: Curves, x_label: str, y_label: str, path: Path) -> None:
    """Draw one line per arm, the mean over seeds, with a band from the lowest to the highest seed."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(8, 5.4), layout="constrained")
    for arm, style in styles(list(curves)).items():
        draw_band(axis, mean_and_band(curves[arm]), style | {"label": arm.label})
    axis.set(xlabel=x_label, ylabel=y_label)
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small", handlelength=3)
    save_figure(plt, figure, path)


def styles(arms: list[Arm]) -> dict[Arm, dict[str, Any]]:
    """Return arm → style: colour and marker by encoding, line by objective, or all by number if two would be equal."""
    kinds = [(arm.encoding, arm.objective) for arm in arms]
    if len(set(kinds)) < len(kinds):
        return {arm: run_style(number) for number, arm in enumerate(arms)}
    encodings = list(dict.fromkeys(encoding for encoding, _ in kinds))
    lines = {"mlm": "-", "mth": "--", "electra": ":"}
    fills = {"mlm": "full", "mth": "none", "electra": "bottom"}
    return {
        arm: run_style(encodings.index(arm.encoding))
        | {"linestyle": lines.get(arm.objective, "-."), "fillstyle": fills.get(arm.objective, "full")}
        for arm in arms
    }


def _curves(results: Results, measure: str, factor: float = 1.0, over_seconds: bool = False) -> Curves:
    """Return the curves of a measure times `factor`, without the arms at half the budget, which end earlier.

    With `over_seconds` x is the training time, the step times the median seconds per step of the run.
    """
    found: dict[Arm, list[Curve]] = {}
    for arm, by_seed in results.curves.get(measure, {}).items():
        units = results.of(STEP_SECONDS, arm) if over_seconds else dict.fromkeys(by_seed, 1.0)
        if not arm.half:
            common = by_seed.keys() & units.keys()
            found[arm] = [[(x * units[seed], factor * y) for x, y in by_seed[seed]] for seed in sorted(common)]
    return found
