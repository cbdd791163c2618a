"""The page's curves: the mean over seeds, and a band from the lowest to the highest."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_ddrp.analysis.figures import COLORS, MARKERS, pyplot, run_style, save_figure
from megatron_ddrp.tasks.compare.results import (
    GLUE,
    HEAD_SIMILARITY,
    LOSS,
    STEP_SECONDS,
    TOKEN_SIMILARITY,
    Arm,
    Curve,
    Results,
)
from megatron_ddrp.tasks.compare.statistics import mean_and_band

Curves = Mapping[Arm, Mapping[int, Curve]]
STEPS = "training step"


def draw_all(results: Results, folder: Path) -> dict[str, Path]:
    """Name of a figure → its file, for those that there are data for."""
    full = {
        measure: _full(results.curves.get(measure, {})) for measure in (LOSS, TOKEN_SIMILARITY, HEAD_SIMILARITY, GLUE)
    }
    wanted: dict[str, tuple[Curves, str, str]] = {
        "loss-steps": (full[LOSS], STEPS, "validation masked-LM loss [nats]"),
        "loss-seconds": (_over_seconds(results, full[LOSS]), "training time [s]", "validation masked-LM loss [nats]"),
        "token-similarity": (full[TOKEN_SIMILARITY], STEPS, "f(S), mean cosine of tokens"),
        "head-similarity": (full[HEAD_SIMILARITY], STEPS, "f(H), mean cosine of heads"),
        "glue-curve": (_percent(full[GLUE]), STEPS, "GLUE average x 100"),
    }
    drawn = {}
    for name, (curves, x_label, y_label) in wanted.items():
        path = folder / f"{name}.png"
        path.unlink(missing_ok=True)  # an old one may be of data that are not there any more
        if any(curves.values()):
            draw_bands(curves, x_label, y_label, path)
            drawn[name] = path
    return drawn


def draw_bands(curves: Curves, x_label: str, y_label: str, path: Path) -> None:
    """One line an arm."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(8, 5.4), layout="constrained")
    for arm, style in styles(list(curves)).items():
        points = mean_and_band(list(curves[arm].values()))
        if not points:
            continue
        x, mean, lowest, highest = zip(*points, strict=True)
        axis.plot(x, mean, label=arm.label, **style)
        axis.fill_between(x, lowest, highest, color=style["color"], alpha=0.18, linewidth=0)
    axis.set(xlabel=x_label, ylabel=y_label)
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")
    save_figure(plt, figure, path)


def styles(arms: list[Arm]) -> dict[Arm, dict[str, Any]]:
    """A colour and marker an encoding, a line an objective; where that does not tell arms apart, one of each an arm."""
    kinds = [(arm.model.encoding, arm.model.objective) for arm in arms]
    if len(set(kinds)) < len(kinds):
        return {arm: run_style(number) for number, arm in enumerate(arms)}
    encodings = list(dict.fromkeys(encoding for encoding, _ in kinds))
    lines = {"mlm": "-", "mth": "--", "electra": ":"}
    found = {}
    for arm in arms:
        number = encodings.index(arm.model.encoding)
        found[arm] = run_style(number) | {
            "color": COLORS[number % len(COLORS)],
            "marker": MARKERS[number % len(MARKERS)],
            "linestyle": lines[arm.model.objective],
        }
    return found


def _full(curves: Curves) -> Curves:
    """Without the arms at half of the budget, which end elsewhere."""
    return {arm: by_seed for arm, by_seed in curves.items() if not arm.half}


def _percent(curves: Curves) -> Curves:
    return {
        arm: {seed: [(x, 100 * y) for x, y in curve] for seed, curve in by_seed.items()}
        for arm, by_seed in curves.items()
    }


def _over_seconds(results: Results, curves: Curves) -> Curves:
    """Steps become seconds of training: their number times the median step of that course."""
    found: dict[Arm, dict[int, Curve]] = {}
    for arm, by_seed in curves.items():
        seconds = results.of(STEP_SECONDS, arm)
        found[arm] = {s: [(x * seconds[s], y) for x, y in c] for s, c in by_seed.items() if s in seconds}
    return found
