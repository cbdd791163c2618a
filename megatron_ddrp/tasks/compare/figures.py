"""The page's curves: the mean over seeds, and a band from the lowest to the highest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

Curves = Mapping[Arm, Sequence[Curve]]
STEPS = "training step"


def draw_all(results: Results, folder: Path) -> dict[str, Path]:
    """Draw the figures that there are data for; return name → file."""
    loss = "validation masked-LM loss [nats]"
    wanted = {
        "loss-steps": (_curves(results, LOSS), STEPS, loss),
        "loss-seconds": (_curves(results, LOSS, over_seconds=True), "training time [s]", loss),
        "token-similarity": (_curves(results, TOKEN_SIMILARITY), STEPS, "f(S), mean cosine of tokens"),
        "head-similarity": (_curves(results, HEAD_SIMILARITY), STEPS, "f(H), mean cosine of heads"),
        "glue-curve": (_curves(results, GLUE, factor=100.0), STEPS, "GLUE average x 100"),
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
        points = mean_and_band(curves[arm])
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


def _curves(results: Results, measure: str, factor: float = 1.0, over_seconds: bool = False) -> Curves:
    """Return the curves of a measure times `factor`, without the arms at half of the budget, which end elsewhere.

    With `over_seconds` steps become seconds of training: steps times the median step of their run.
    """
    found: dict[Arm, list[Curve]] = {}
    for arm, by_seed in results.curves.get(measure, {}).items():
        units = results.of(STEP_SECONDS, arm) if over_seconds else dict.fromkeys(by_seed, 1.0)
        if not arm.half:
            common = by_seed.keys() & units.keys()
            found[arm] = [[(x * units[seed], factor * y) for x, y in by_seed[seed]] for seed in sorted(common)]
    return found
