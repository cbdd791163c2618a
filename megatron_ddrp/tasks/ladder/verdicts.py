"""Verdict on a claim over all rungs, from its verdict on each rung and the trend of its gain."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from megatron_ddrp.pages.markdown import marked
from megatron_ddrp.tasks.ladder.trend import Trend
from megatron_ddrp.tasks.statistics import OPPOSITE, VISIBLE

HOLDS, EVERY, MEASURED, SOME = "holds", "holds on every rung", "holds where measured", "holds on some rungs"
BY_TREND, AGAINST_BY_TREND = "holds by the trend", "contradicted by the trend"
MIXED, CONTRADICTED, NOT_TOLD, NO_INTERVAL = "changes sign", "contradicted", "not told apart", "no interval"

DEFINITIONS = {
    HOLDS: "visible on the only rung of the ladder",
    EVERY: "visible on every rung of the ladder",
    MEASURED: "visible on every rung that has an interval, while another rung has none",
    BY_TREND: "opposite on no rung, and not visible on at least one, but the 95 % band of the trend is above 0 on "
    "each of its rungs",
    SOME: "visible on a rung, not visible on another, opposite on none, and the band does not decide",
    MIXED: "visible on a rung and opposite on another",
    CONTRADICTED: "opposite on a rung, visible on none",
    AGAINST_BY_TREND: "neither visible nor opposite on any rung, but the band is below 0 on every rung",
    NOT_TOLD: "neither visible nor opposite on any rung, and the band does not decide",
    NO_INTERVAL: "no rung has two common seeds with different gains",
}
"""Verdict over the ladder → its definition. On one rung a gain is visible if its interval is above 0, opposite if the
interval is below 0, and not visible if the interval contains 0."""
DEFINITIONS_OF_ONE = {
    HOLDS: "the interval of the gain is above 0",
    CONTRADICTED: "the interval is below 0",
    NOT_TOLD: "the interval contains 0",
    NO_INTERVAL: "there are no two common seeds with different gains",
}
"""Verdict on one budget alone → its definition."""
TREND_DEFINITION = (
    "The gain is *growing* or *shrinking* (where the claim holds), *rising* or *falling* (elsewhere) if the 95 % "
    "interval of the trend's slope excludes 0; without such a word it contains 0, or fewer than two rungs have an "
    "interval. If the gain visibly rises from one rung to the next and visibly falls from another one, it has both "
    "words in their order, *growing, then shrinking*; no line describes it then, and no band decides"
)


def definitions(num_rungs: int) -> str:
    """Return the verdicts that a ladder of so many rungs can have, with their definitions, as Markdown."""
    shown = DEFINITIONS_OF_ONE if num_rungs == 1 else {word: DEFINITIONS[word] for word in DEFINITIONS if word != HOLDS}
    before = [
        "On one rung a gain is *visible* if its interval is above 0, *opposite* if the interval is below 0, and *not "
        "visible* if the interval contains 0. A rung with one common seed, or with equal gains "
        "other than 0, has no interval and no verdict.",
        f"{TREND_DEFINITION}. The trend is the straight line a + b·log4(tokens / tokens of the first rung) by least "
        "squares through the paired differences of all seeds, on the rungs that have an interval. Tables show b, the "
        "change per factor of four, with half the width of its 95 % interval. Each rung has its own variance (Welch's "
        "t); differences count as independent, although seeds recur on every rung. Where a rung above the trend has "
        "one common seed, and its gain lies against the trend's direction from the mean of the highest rung with an "
        "interval, the verdict names it: *growing, but lower in the one seed at* so many tokens.",
    ]
    after = 'A claim that a model is "at least as good" is contradicted only if the model is worse.'
    paragraphs = [*(before if num_rungs > 1 else []), after]
    listed = "\n".join(f"- *{word}*: {shown[word]}" for word in shown)
    return "\n\n".join(map(marked, paragraphs)) + "\n\n" + listed


def over_the_ladder(verdicts: Sequence[str], num_rungs: int, band: int) -> str:
    """Return the verdict over a ladder of `num_rungs` rungs, without a word for the trend.

    `verdicts` are those of the rungs with an interval. `band` is 1 if the trend's band is above 0 on every rung of the
    claim, −1 if it is below 0 on all of them, otherwise 0.
    """
    if not verdicts:
        return NO_INTERVAL
    if OPPOSITE in verdicts:
        return MIXED if VISIBLE in verdicts else CONTRADICTED
    if set(verdicts) == {VISIBLE}:
        return (HOLDS if num_rungs == 1 else EVERY) if len(verdicts) == num_rungs else MEASURED
    if band > 0:
        return BY_TREND
    if VISIBLE in verdicts:
        return SOME
    return AGAINST_BY_TREND if band < 0 else NOT_TOLD


def with_trend(verdict: str, trend: Trend | None, turned: Sequence[str] = ()) -> str:
    """Return a verdict with a word for the trend, if its slope differs from 0.

    `turned` are the budgets above the trend, in words, where the gain of the only common seed lies the other way.
    """
    if trend is None or verdict == NO_INTERVAL or not (trend.direction or trend.turns):
        return verdict
    holds = verdict in (EVERY, MEASURED, BY_TREND, SOME)  # HOLDS is about one rung, which has no trend
    words = ("growing", "shrinking") if holds else ("gain rising", "gain falling")
    if trend.turns:
        first, *others = [words[sign < 0] for sign, _ in itertools.groupby(filter(None, trend.steps))]
        return ", then ".join([f"{verdict}, {first}", *(word.removeprefix("gain ") for word in others)])
    falls = trend.direction < 0
    but = f", but {'higher' if falls else 'lower'} in the one seed at {' and at '.join(turned)}" if turned else ""
    return f"{verdict}, {words[falls]}{but}"
