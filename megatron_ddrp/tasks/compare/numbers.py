"""Numbers as the page shows them."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ddrp.tasks.glue.tasks import PAPER_TASKS
from megatron_ddrp.tasks.measures import (
    DIRECTION,
    HEAD_SIMILARITY,
    LOSS,
    SPACE,
    TOKEN_SIMILARITY,
    TRAINING_LOSS,
    TRIANGLE,
)
from megatron_ddrp.tasks.statistics import Difference, Spread, seeds_needed

_SHOWN = {
    **dict.fromkeys((LOSS, TOKEN_SIMILARITY, HEAD_SIMILARITY, *SPACE), (1, 4)),
    **dict.fromkeys(DIRECTION, (1, 3)),
    "effective rank": (1, 1),
    TRIANGLE: (100, 1),
}
"""Measure → factor and digits; other measures are shares in points."""


def shown(measure: str, value: float, sign: str = "") -> str:
    """Return a value of a measure; with `sign` "+" a difference."""
    factor, digits = _SHOWN.get(measure, (100, 2))
    return f"{factor * value:{sign}.{digits}f}"


def shown_spread(measure: str, values: Spread | None) -> str:
    """Return mean ± standard deviation over the seeds; only the mean for one seed, nothing for none."""
    if values is None:
        return ""
    mean = shown(measure, values.mean)
    return mean if values.deviation is None else f"{mean} ± {shown(measure, values.deviation)}"


def shown_interval(measure: str, interval: tuple[float, float] | None) -> str:
    """Return both ends of an interval of a difference; nothing without an interval."""
    return " to ".join(shown(measure, end, "+") for end in interval or ())


def shown_gain(measure: str, gain: Difference) -> str:
    """Return the mean of a difference, its interval and the number of seeds."""
    interval = f" ({shown_interval(measure, gain.interval)})" if gain.interval else ""
    return f"{shown(measure, gain.mean, '+')}{interval}, n = {len(gain.values)}"


def shown_needed(gain: Difference) -> str:
    """Return the number of seeds whose interval would exclude 0; empty without a spread, or if it already does."""
    if not gain.interval or not gain.deviation or not gain.interval[0] <= 0 <= gain.interval[1]:
        return ""
    count = seeds_needed(gain.mean, gain.deviation)
    return "no number" if gain.mean == 0 else "over 100,000" if count is None else f"{count:,}"


def shown_average(tasks: Sequence[str]) -> str:
    """Return the meaning of a GLUE average over these tasks: "the paper's measure", or their names."""
    if set(tasks) == set(PAPER_TASKS):
        return "the paper's measure"
    *others, last = tasks
    names = f"the mean of {', '.join(others)} and {last}" if others else f"{last} alone"
    return f"{names}; the paper's average has eight tasks"


def shown_tokens(tokens: float) -> str:
    """Return a number of tokens: 4.19 M, 1.07 G, 524,288."""
    for size, unit in ((1e9, "G"), (1e6, "M")):
        if tokens >= size:
            return f"{tokens / size:.3g} {unit}"
    return f"{tokens:,.0f}"


def shown_budget(budget: str, tokens: int) -> str:
    """Return a budget in words: 4.19 M tokens, 2,048 steps."""
    return f"{shown_tokens(tokens)} tokens" if budget == f"{tokens:,} tokens" else budget


def factor_of(measure: str) -> int:
    """Return the factor with which a measure is shown."""
    return _SHOWN.get(measure, (100, 2))[0]


def unit_of(measure: str) -> str:
    """Return the unit of a gain in brackets, with a space before it; empty for one without a unit."""
    return " [nats]" if measure in (LOSS, TRAINING_LOSS) else " [points]" if factor_of(measure) == 100 else ""
