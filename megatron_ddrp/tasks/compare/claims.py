"""Claims of the DDRP+MTH paper as differences between two arms of a plan, and their verdicts."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import NamedTuple

from megatron_ddrp.tasks.compare.plan import Plan
from megatron_ddrp.tasks.compare.results import (
    GLUE,
    HEAD_SIMILARITY,
    LOSS,
    MINIMAL_PAIRS,
    SPACE,
    STEP_SECONDS,
    TOKEN_SIMILARITY,
    TRIANGLE,
    Results,
)
from megatron_ddrp.tasks.compare.runs import Arm
from megatron_ddrp.tasks.glue.paper import BETTER, PAPER_NAMES, PAPER_TRIANGLES, average_difference, paper_row
from megatron_ddrp.tasks.statistics import NOT_VISIBLE, ONE_SEED, OPPOSITE, VISIBLE, Difference, paired

PAPER_COSTS = {"ddrp": "+5 %", "bert-r": "+5 %", "deberta": "+25 to 30 %"}
PAPER_MTH_COST = "+4 %"

_TITLES = {
    VISIBLE: "*Visible*, the 95 % interval is on the paper's side of 0",
    OPPOSITE: "*Opposite*, the interval is on the other side of 0",
    NOT_VISIBLE: "*Not visible*, the interval contains 0",
    ONE_SEED: "*No verdict*, there is only one common seed and so no spread",
}
_SHOWN = {
    STEP_SECONDS: (100, 1, " %"), TRIANGLE: (100, 1, ""), LOSS: (1, 4, ""), TOKEN_SIMILARITY: (1, 4, ""),
    HEAD_SIMILARITY: (1, 4, ""), **dict.fromkeys(SPACE, (1, 4, "")), "effective rank": (1, 1, ""),
}  # fmt: skip
"""Measure → factor, digits and unit in tables; other measures are shares in points."""


@dataclass(frozen=True)
class Claim:
    """Claim that the difference `first` − `second` of a measure has the sign `sign`."""

    text: str
    measure: str
    first: Arm
    second: Arm
    sign: int
    paper: str = ""
    """Difference that the paper prints; empty without one."""
    is_papers: bool = True
    """True if the paper compares models by this measure."""

    @property
    def relative(self) -> bool:
        """True if differences are shares of the second arm's value."""
        return self.measure == STEP_SECONDS

    def difference(self, results: Results) -> Difference | None:
        """Return the difference of the arms; None if they have no common seed yet."""
        return paired(results.of(self.measure, self.first), results.of(self.measure, self.second), self.relative)


def all_claims(plan: Plan) -> list[Claim]:
    """Return the claims about pairs of models in the plan."""
    arms = {(m.encoding, m.objective): Arm(m) for m in reversed(plan.models) if not m.flags}
    claims: list[Claim] = []
    for encoding in dict.fromkeys(model.encoding for model in plan.models):
        if {(encoding, "mlm"), (encoding, "mth")} <= arms.keys():
            claims += _objectives(plan, encoding, arms[encoding, "mlm"], arms[encoding, "mth"])
    for objective in ("mlm", "mth"):
        for better, worse in BETTER:
            if {(better, objective), (worse, objective)} <= arms.keys():
                claims += _encodings(plan, arms[better, objective], arms[worse, objective])
    for model in plan.models:
        plain = arms.get((model.encoding, "mth"))
        if plain and model.without_hcd:
            paper = "+0.42" if model.encoding == "absolute" else ""
            claims.append(Claim(f"MTH is better than {model.name} on GLUE", GLUE, plain, Arm(model), 1, paper))
    return claims


def _objectives(plan: Plan, encoding: str, mlm: Arm, mth: Arm) -> list[Claim]:
    name = PAPER_NAMES.get(encoding, encoding)
    claims = [
        Claim(f"MTH lowers f(S) of {name}", TOKEN_SIMILARITY, mth, mlm, -1, "lower, figure 3a"),
        Claim(f"MTH lowers f(H) of {name}", HEAD_SIMILARITY, mth, mlm, -1, "lower, figure 3a"),
        Claim(f"MTH is better than MLM on GLUE with {name}", GLUE, mth, mlm, 1, paper_difference(mth, mlm)),
        Claim(f"MTH has a lower masked-LM loss with {name}", LOSS, mth, mlm, -1, is_papers=False),
        Claim(f"a step of MTH costs a little more with {name}", STEP_SECONDS, mth, mlm, 1, PAPER_MTH_COST),
    ]
    if plan.minimal_pairs:
        text = f"MTH is better than MLM on minimal pairs with {name}"
        claims.append(Claim(text, MINIMAL_PAIRS, mth, mlm, 1, is_papers=False))
    if mth.model.name in plan.half_budget:
        half = Arm(mth.model, half=True)
        text = f"MTH with half the budget is at least as good as MLM with all of it on GLUE, {name}"
        claims.insert(3, Claim(text, GLUE, half, mlm, 1, paper_difference(half, mlm)))
    return claims


def _encodings(plan: Plan, better: Arm, worse: Arm) -> list[Claim]:
    names = f"{better.model.name} is better than {worse.model.name}"
    claims = [
        Claim(f"{names} on GLUE", GLUE, better, worse, 1, paper_difference(better, worse)),
        Claim(f"{names} by its masked-LM loss", LOSS, better, worse, -1, is_papers=False),
    ]
    if plan.minimal_pairs:
        claims.append(Claim(f"{names} on minimal pairs", MINIMAL_PAIRS, better, worse, 1, is_papers=False))
    ours, theirs = better.model.encoding, worse.model.encoding
    if {ours, theirs} == set(PAPER_TRIANGLES):
        shown = f"{PAPER_TRIANGLES[ours] - PAPER_TRIANGLES[theirs]:+.2f}"
        text = f"{better.model.name} shows the triangle effect in more sentences than {worse.model.name}"
        claims.append(Claim(text, TRIANGLE, better, worse, 1, shown))
    if theirs == "absolute" and ours in PAPER_COSTS:
        text = f"a step of {better.model.name} costs more than one of {worse.model.name}"
        claims.append(Claim(text, STEP_SECONDS, better, worse, 1, PAPER_COSTS[ours]))
    return claims


def arm_row(arm: Arm) -> str | None:
    """Return the name of an arm's row in the paper's tables; None without such a row."""
    model = arm.model
    objective = model.objective.upper()
    if model.flags:
        only_hcd = model.without_hcd and len(model.flags) == 1
        objective = f"{objective} without HCD" if only_hcd else "other"
    return paper_row(model.encoding, objective, arm.half)


def paper_difference(first: Arm, second: Arm) -> str:
    """Return the difference of the paper's GLUE averages as text; empty if the paper lacks one of the two."""
    return average_difference(arm_row(first), arm_row(second))


def number(measure: str, value: float, sign: str = "") -> str:
    """Return a value of a measure as tables show it; with `sign` "+" a difference."""
    factor, digits, unit = _SHOWN.get(measure, (100, 2, ""))
    return f"{factor * value:{sign}.{digits}f}{unit}"


def summary(results: Results, claims: list[Claim]) -> list[str]:
    """Return one paragraph per verdict with the claims that have it."""
    found = {claim: difference for claim in claims if (difference := claim.difference(results))}
    paragraphs = []
    for verdict, title in _TITLES.items():
        for papers, whose in ((True, ""), (False, " (by a measure that the paper does not use)")):
            texts = [c.text for c, d in found.items() if (d.verdict(c.sign), c.is_papers) == (verdict, papers)]
            if texts:
                paragraphs.append(f"{title}{whose}: {'; '.join(texts)}.")
    if missing := [claim.text for claim in claims if claim not in found]:
        paragraphs.append(f"*Not measured*, here or not yet: {'; '.join(missing)}.")
    return paragraphs


class Resolution(NamedTuple):
    """Size of the differences that the spread over seeds allows to see."""

    intervals: int
    """Number of intervals."""
    half_width: float | None
    """Median half-width of the intervals of GLUE averages, in points; None without one."""
    papers: list[float]
    """Differences of GLUE averages between the same models in the paper, in points."""

    @property
    def seen(self) -> str:
        """Number of the paper's differences that are larger than the half-width, in words."""
        able = sum(size > (self.half_width or 0.0) for size in self.papers)
        return {0: "none", len(self.papers): "all"}.get(able, f"{able} of {len(self.papers)}")


def resolution(results: Results, claims: list[Claim]) -> Resolution:
    """Return the resolution of the claims' differences."""
    found = [(claim, difference) for claim in claims if (difference := claim.difference(results))]
    widths = [(high - low) / 2 for c, d in found if c.measure == GLUE and d.interval for low, high in [d.interval]]
    papers = [abs(float(claim.paper)) for claim, _ in found if claim.measure == GLUE and claim.paper]
    intervals = sum(difference.interval is not None for _, difference in found)
    return Resolution(intervals, 100 * statistics.median(widths) if widths else None, papers)
