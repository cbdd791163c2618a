"""The page's curves: the mean over seeds, and a band from the lowest to the highest."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_ddrp.analysis.figures import pyplot, run_style, save_figure
from megatron_ddrp.tasks.compare.results import (
    GLUE,
    HEAD_SIMILARITY,
    LOSS,
    STEP_SECONDS,
    TOKEN_SIMILARITY,
    Curve,
    Results,
)
from megatron_ddrp.tasks.compare.runs import Arm
from megatron_ddrp.tasks.statistics import mean_and_band

Curves = Mapping[Arm, Mapping[int, Curve]]
STEPS = "training step"


def draw_all(results: Results, folder: Path) -> dict[str, Path]:
    """Draw the figures that there are data for; return name → file."""
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
    """Draw one line per arm."""
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
    """Return a colour and marker per encoding and a line per objective; one of each per arm where these are alike."""
    kinds = [(arm.model.encoding, arm.model.objective) for arm in arms]
    if len(set(kinds)) < len(kinds):
        return {arm: run_style(number) for number, arm in enumerate(arms)}
    encodings = list(dict.fromkeys(encoding for encoding, _ in kinds))
    lines = {"mlm": "-", "mth": "--", "electra": ":"}
    return {
        arm: run_style(encodings.index(arm.model.encoding)) | {"linestyle": lines.get(arm.model.objective, "-.")}
        for arm in arms
    }


def _full(curves: Curves) -> Curves:
    """Return the curves without the arms at half of the budget, which end elsewhere."""
    return {arm: by_seed for arm, by_seed in curves.items() if not arm.half}


def _percent(curves: Curves) -> Curves:
    return {
        arm: {seed: [(x, 100 * y) for x, y in curve] for seed, curve in by_seed.items()}
        for arm, by_seed in curves.items()
    }


def _over_seconds(results: Results, curves: Curves) -> Curves:
    """Return the curves over seconds of training: steps times the median step of their run."""
    found: dict[Arm, dict[int, Curve]] = {}
    for arm, by_seed in curves.items():
        seconds = results.of(STEP_SECONDS, arm)
        found[arm] = {s: [(x * seconds[s], y) for x, y in c] for s, c in by_seed.items() if s in seconds}
    return found
