"""Curves of runs, and figures of a report: which numbers of metrics.jsonl stand in which panel, losses and speed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ddrp.pages.plotting import (
    COLORS,
    GREY,
    figure_tools,
    legend_below,
    panel_grid,
    remove_figure,
    run_style,
    save_figure,
    short_names,
    thousands,
)
from megatron_ddrp.run.metrics import MetricsRow

MetricsRows = list[MetricsRow]
"""Rows of one run's metrics.jsonl."""

Series = list[tuple[int, float]]
"""(iteration, value) pairs."""


@dataclass(frozen=True)
class Panel:
    """One axis of a figure and the numbers on it."""

    label: str
    training: str | None
    """Key of the numbers that training logs."""
    validation: str | None = None
    """Key of the numbers that validations log."""
    factor: float = 1.0
    is_noisy: bool = False
    """True if single steps vary so much that the training curve gets a running mean."""

    def training_curve(self, rows: MetricsRows) -> Series:
        """Return the training curve; empty where nothing was logged."""
        return self._curve(rows, self.training)

    def validation_curve(self, rows: MetricsRows) -> Series:
        """Return the validation curve; empty where nothing was logged."""
        return self._curve(rows, self.validation)

    def _curve(self, rows: MetricsRows, key: str | None) -> Series:
        return [(step, self.factor * value) for step, value in series(rows, key)] if key else []


LOSS = Panel("masked-LM loss [nats]", "lm_loss", "valid_lm_loss")
GENERATOR_LOSS = replace(LOSS, label="generator's loss [nats]")
MIXED_LOSS = replace(LOSS, label="masked-LM loss (ELECTRA: the generator's) [nats]")
RTD_ACCURACY = Panel("RTD accuracy [%]", "rtd_accuracy", "valid_rtd_accuracy", 100)
LEARNING = (
    Panel("masked-LM accuracy [%]", "lm_accuracy", "valid_lm_accuracy", 100),
    Panel("TCD: mean cosine of tokens", "tcd_loss", "token_similarity"),
    Panel("HCD: mean cosine of heads", "hcd_loss", "head_similarity", is_noisy=True),
    Panel("RTD loss [nats]", "rtd_loss", "valid_rtd_loss"),
    RTD_ACCURACY,
    Panel("replaced tokens found [%]", "rtd_recall", "valid_rtd_recall", 100),
    Panel("generator's accuracy [%]", "generator_accuracy", "valid_generator_accuracy", 100),
)
"""Panels below the loss, where a run logged their numbers."""
SPEED = (
    Panel("learning rate", "lr"),
    Panel("gradient norm", "grad_norm"),
    Panel("tokens per second", "tokens_per_second"),
    Panel("peak memory [GiB]", "peak_memory_gib"),
)


_WITHOUT_PANEL = {
    *("iteration", "consumed_samples", "consumed_tokens", "loss", "step_time", "mfu"),
    *("replaced_share", "valid_replaced_share"),
}
"""Columns that no panel shows: counts, and what other panels show in another form."""


def series(rows: MetricsRows, key: str) -> Series:
    """Return the values of one metric, where it was logged and finite."""
    return [(row["iteration"], row[key]) for row in rows if row.get(key) is not None]


def running_mean(values: Series, window: int) -> Series:
    """Return the means of `window` neighbouring values, each at the middle one's step; `window` is odd."""
    middle = window // 2
    return [
        (values[number][0], sum(value for _, value in values[number - middle : number + middle + 1]) / window)
        for number in range(middle, len(values) - middle)
    ]


def logged_panels(panels: Iterable[Panel], runs: Mapping[str, MetricsRows]) -> list[Panel]:
    """Return the panels that any run logged numbers of."""
    return [
        panel for panel in panels if any(panel.training_curve(r) or panel.validation_curve(r) for r in runs.values())
    ]


def learning_panels(runs: Mapping[str, MetricsRows]) -> list[Panel]:
    """Return the panels below the loss: the logged ones of `LEARNING`, and one for each column of another name.

    Such columns come from callbacks and from the terms of other objectives; their names are their labels.
    """
    known = [LOSS, *LEARNING, *SPEED]
    taken = {key for panel in known for key in (panel.training, panel.validation)} | _WITHOUT_PANEL
    logged = dict.fromkeys(key for rows in runs.values() for row in rows for key in row)
    others = dict.fromkeys(key.removeprefix("valid_") for key in logged if key not in taken)
    return logged_panels([*LEARNING, *(Panel(name, name, f"valid_{name}") for name in others)], runs)


def loss_panel(runs: Mapping[str, MetricsRows]) -> Panel:
    """Return the panel of the masked-LM losses; those of a run with a detector are its generator's."""
    detecting = [bool(logged_panels([RTD_ACCURACY], {name: rows})) for name, rows in runs.items()]
    return GENERATOR_LOSS if all(detecting) else MIXED_LOSS if any(detecting) else LOSS


def majority(rows: MetricsRows) -> Series:
    """Return the accuracy in percent of calling every token an original, in each validation."""
    return [(step, 100 * (1 - share)) for step, share in series(rows, "valid_replaced_share")]


def perplexity(loss: float) -> float:
    """Return exp(loss): pieces that the model is as unsure between as between equally likely ones."""
    return math.exp(loss) if loss < 700 else math.inf


WIDTH, TOP, LOWER = 11.0, 4.4, 3.2
"""Inches of a figure, of the panel of the loss, and of a row of panels below it."""
FEW_POINTS = 3
"""Most points of a curve that are drawn as points too: their line is short, or none."""
WINDOW = 9
"""Rows of metrics.jsonl in a running mean."""
MOST_DECIMALS = 4
"""Largest number of decimals on an axis of losses or rates; smaller numbers have two or three digits."""


def draw_losses(runs: Mapping[str, MetricsRows], unigram: float | None, path: Path) -> None:
    """Draw the losses of runs by name, with the perplexity at the right, and below them what else they learnt."""
    plt = figure_tools()
    lower = learning_panels(runs)
    columns = _columns(len(lower))
    lines = -(-len(lower) // columns)
    figure = plt.figure(figsize=(WIDTH, TOP + LOWER * lines), layout="constrained")
    grid = figure.add_gridspec(1 + lines, columns, height_ratios=[TOP] + [LOWER] * lines)
    top, looks = figure.add_subplot(grid[0, :]), _looks(runs)
    _draw_panel(top, loss_panel(runs), runs, looks)
    handles = _handles(plt, looks)
    if unigram is not None:
        handles[f"unigram level ({unigram:.2f})"] = top.axhline(unigram, color=GREY, linestyle=":", linewidth=2)
    _add_perplexity(plt, top)
    for number, panel in enumerate(lower):
        axis = figure.add_subplot(grid[1 + number // columns, number % columns])
        _draw_panel(axis, panel, runs, looks)
        if panel.is_noisy and any(len(panel.training_curve(rows)) > WINDOW for rows in runs.values()):
            handles[f"HCD, mean of {WINDOW} rows"] = plt.Line2D([], [], color=GREY, linewidth=2.5)
        if panel == RTD_ACCURACY:
            for level in filter(None, map(majority, runs.values())):
                (line,) = axis.plot(*zip(*level, strict=True), color=GREY, linestyle=":", linewidth=2)
                handles["majority: every token an original"] = line
    legend_below(figure, handles)
    save_figure(figure, path)


def draw_speed(runs: Mapping[str, MetricsRows], path: Path) -> bool:
    """Draw learning rate, gradient norm, speed and memory; return whether any of them was logged."""
    panels = logged_panels(SPEED, runs)
    remove_figure(path)
    if not panels:
        return False
    plt, looks = figure_tools(), _looks(runs)
    columns = _columns(len(panels))
    figure, axes = panel_grid(len(panels), columns, WIDTH / columns, LOWER)
    for axis, panel in zip(axes.flat, panels, strict=False):
        _draw_panel(axis, panel, runs, looks)
    if len(runs) > 1:
        legend_below(figure, {look.name: plt.Line2D([], [], color=look.color, linewidth=2) for look in looks})
    save_figure(figure, path)
    return True


def _columns(panels: int) -> int:
    """Return the columns that leave the fewest holes: 2 for 2 or 4 panels, else 3 at most."""
    return 2 if panels in (2, 4) else min(3, max(1, panels))


class _Look:
    """Colours and marker of one run. A run alone has a colour for training and one for validation."""

    def __init__(self, name: str, number: int, is_alone: bool) -> None:
        style = run_style(number)
        self.name, self.color, self.marker = name, style["color"], style["marker"]
        self.validation_color = COLORS[1] if is_alone else self.color


def _looks(runs: Mapping[str, MetricsRows]) -> list[_Look]:
    return [_Look(name, number, len(runs) == 1) for number, name in enumerate(short_names(list(runs)))]


def _handles(plt: Any, looks: Sequence[_Look]) -> dict[str, Any]:
    """Return label → line: training and validation of one run, or each run's colour and the two kinds of lines."""
    if len(looks) == 1:
        (look,) = looks
        return {
            "training": plt.Line2D([], [], color=look.color, linewidth=1.4),
            "validation": plt.Line2D([], [], color=look.validation_color, marker=look.marker, linewidth=2),
        }
    by_run = {look.name: plt.Line2D([], [], color=look.color, marker=look.marker, linewidth=2) for look in looks}
    kinds = {
        "training": plt.Line2D([], [], color=GREY, linewidth=1.2, alpha=0.6),
        "validation": plt.Line2D([], [], color=GREY, marker="o", linewidth=2),
    }
    return by_run | kinds


def _draw_panel(axis: Any, panel: Panel, runs: Mapping[str, MetricsRows], looks: Sequence[_Look]) -> None:
    """Draw the curves of a panel: training thin, validation with markers."""
    for rows, look in zip(runs.values(), looks, strict=True):
        trained = panel.training_curve(rows)
        smooth = running_mean(trained, WINDOW) if panel.is_noisy else []
        alpha = 0.35 if smooth else 1.0 if len(looks) == 1 else 0.6
        _plot(axis, trained, color=look.color, linewidth=1.4, alpha=alpha)
        _plot(axis, smooth, color=look.color, linewidth=2.5)
        _plot(
            axis,
            panel.validation_curve(rows),
            color=look.validation_color,
            linewidth=2,
            marker=look.marker,
            markersize=5,
        )
    axis.set(xlabel="step", ylabel=panel.label)
    axis.grid(alpha=0.3)
    axis.yaxis.set_major_formatter(lambda value, _: evenly(value, axis.yaxis.get_majorticklocs()))
    axis.locator_params(axis="x", nbins=5)
    axis.xaxis.set_major_formatter(lambda value, _: thousands(value))


def evenly(value: float, ticks: Sequence[float]) -> str:
    """Return a tick as text with as many decimals as all `ticks` of its axis need: 8.2, 8.0, 7.8."""
    for decimals in range(MOST_DECIMALS + 1):
        if np.allclose(np.round(ticks, decimals), ticks, rtol=0, atol=1e-6 * np.abs(ticks).max()):
            return f"{round(value, decimals) + 0.0:,.{decimals}f}".replace("-", "−")  # + 0.0: never −0
    return thousands(value)


def _plot(axis: Any, values: Series, **style: Any) -> None:
    if values:
        marker = {"marker": "."} if len(values) <= FEW_POINTS else {}
        axis.plot(*zip(*values, strict=True), **(marker | style))


def _add_perplexity(plt: Any, axis: Any) -> None:
    """Give the axis of a loss in nats a second scale at the right: exp(loss)."""
    right = axis.secondary_yaxis("right", functions=(np.exp, lambda x: np.log(np.clip(x, 1e-300, None))))
    ticks = perplexity_ticks(*np.exp(axis.get_ylim()))
    right.set_yticks(ticks, [thousands(tick) for tick in ticks])
    right.minorticks_off()
    right.set_ylabel("perplexity")


def perplexity_ticks(lowest: float, highest: float) -> list[float]:
    """Return round numbers between two perplexities: the fewest of 1-2-5 series, whole digits and parts of them that
    are three or more.
    """
    decades = 10.0 ** np.arange(np.floor(np.log10(lowest)), np.ceil(np.log10(highest)) + 1)
    found: list[float] = []
    for steps in ((1,), (1, 2, 5), range(1, 10), *(np.arange(parts, 10 * parts) / parts for parts in (2, 5, 10))):
        found = [decade * step for decade in decades for step in steps if lowest <= decade * step <= highest]
        if len(found) >= 3:
            break
    return found
