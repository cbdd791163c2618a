"""Verdict on a claim over all rungs, from its verdict on each rung and the trend of its gain."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ddrp.tasks.ladder.trend import Trend
from megatron_ddrp.tasks.statistics import OPPOSITE, VISIBLE

EVERY, MEASURED, SOME = "holds on every rung", "holds where measured", "holds on some rungs"
MIXED, CONTRADICTED, NOT_TOLD, NO_INTERVAL = "changes sign", "contradicted", "not told apart", "no interval"

DEFINITIONS = {
    EVERY: "visible on every rung of the ladder",
    MEASURED: "visible on every rung with at least two common seeds, while another rung has fewer",
    SOME: "visible on a rung, not visible on another, opposite on none",
    MIXED: "visible on a rung and opposite on another",
    CONTRADICTED: "opposite on a rung, visible on none",
    NOT_TOLD: "neither visible nor opposite on any rung",
    NO_INTERVAL: "no rung has two common seeds",
}
"""Verdict over the ladder → its definition. On one rung a gain is visible if its interval is above 0, opposite if the
interval is below 0, and not visible if the interval contains 0."""

RISING, FALLING = "gain rising", "gain falling"
TREND_DEFINITION = (
    "The gain is *growing* or *shrinking* (where the claim holds), *rising* or *falling* (elsewhere) if the 95 % interval "
    "of the trend's slope excludes 0; without such a word it contains 0, or there are fewer than two rungs or three "
    "differences"
)


def over_the_ladder(verdicts: Sequence[str], num_rungs: int) -> str:
    """Return the verdict over a ladder of `num_rungs` rungs from the verdicts on its rungs with an interval."""
    if not verdicts:
        return NO_INTERVAL
    if VISIBLE in verdicts and OPPOSITE in verdicts:
        return MIXED
    if OPPOSITE in verdicts:
        return CONTRADICTED
    if VISIBLE not in verdicts:
        return NOT_TOLD
    if set(verdicts) != {VISIBLE}:
        return SOME
    return EVERY if len(verdicts) == num_rungs else MEASURED


def with_trend(verdict: str, trend: Trend | None) -> str:
    """Return a verdict with a word for the trend, if its slope differs from 0."""
    if trend is None or trend.direction == 0 or verdict == NO_INTERVAL:
        return verdict
    words = ("growing", "shrinking") if verdict in (EVERY, MEASURED, SOME) else (RISING, FALLING)
    return f"{verdict}, {words[trend.direction < 0]}"
