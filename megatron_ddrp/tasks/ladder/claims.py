"""Claims of the DDRP+MTH paper about two arms of a ladder, their gains on every rung and their verdicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from megatron_ddrp.tasks.glue.paper import BETTER, PAPER_NAMES, PAPER_TRIANGLES, average_difference, paper_row
from megatron_ddrp.tasks.ladder.ladder import Ladder
from megatron_ddrp.tasks.ladder.measures import (
    FIRST_COMPONENT,
    HEAD_SIMILARITY,
    LOSS,
    SCORED,
    SHUFFLED,
    SMALLER_IS_BETTER,
    TOKEN_SIMILARITY,
    TRIANGLE,
)
from megatron_ddrp.tasks.ladder.numbers import shown_tokens
from megatron_ddrp.tasks.ladder.rows import Arm
from megatron_ddrp.tasks.ladder.trend import Trend, fit, steps_of_four
from megatron_ddrp.tasks.ladder.verdicts import over_the_ladder, with_trend
from megatron_ddrp.tasks.statistics import NO_VERDICT, Difference, paired


@dataclass(frozen=True)
class Claim:
    """Claim that the first arm gains over the second by a measure.

    A gain is first − second, or second − first for a measure of which less is better. A claim holds if it is positive.
    """

    text: str
    measure: str
    first: Arm
    second: Arm
    paper: str = ""
    """Difference that the paper prints: of GLUE averages for the measures in `SCORED`. Empty without one."""


@dataclass(frozen=True)
class Judged:
    """A claim with its gains on the rungs of a ladder."""

    claim: Claim
    ladder: Ladder

    @cached_property
    def gains(self) -> dict[int, Difference]:
        """Rung → gains paired by seed, for the rungs with a common seed."""
        found = {rung: self._gain(rung) for rung in self.ladder.rungs}
        return {rung: gain for rung, gain in found.items() if gain}

    def _gain(self, rung: int) -> Difference | None:
        first, second = (self.ladder.of(self.claim.measure, arm, rung) for arm in (self.claim.first, self.claim.second))
        return paired(second, first) if self.claim.measure in SMALLER_IS_BETTER else paired(first, second)

    @cached_property
    def trend(self) -> Trend | None:
        """Trend of the gains; None with fewer than two rungs that have an interval."""
        first = self.ladder.rungs[0]
        return fit({steps_of_four(rung, first): gain.values for rung, gain in self.gains.items() if gain.interval})

    @cached_property
    def verdicts(self) -> dict[int, str]:
        """Rung → verdict on it, for the rungs with a common seed."""
        return {rung: gain.verdict(1) for rung, gain in self.gains.items()}

    @property
    def kind(self) -> str:
        """Verdict over the ladder without a word for the trend."""
        verdicts = [verdict for verdict in self.verdicts.values() if verdict not in NO_VERDICT]
        return over_the_ladder(verdicts, len(self.ladder.rungs), self.band)

    @property
    def band(self) -> int:
        """Sign of the gain if the trend's 95 % band lies on one side of 0 on every rung of the trend, otherwise 0.

        A gain that turns has no line, and so no band.
        """
        if self.trend is None or self.trend.turns:
            return 0
        sides = {self.trend.side(rung.x) for rung in self.trend.rungs}
        return sides.pop() if len(sides) == 1 else 0

    @property
    def verdict(self) -> str:
        """Verdict over the ladder."""
        return with_trend(self.kind, self.trend, [shown_tokens(rung) for rung in self.turned])

    @property
    def turned(self) -> list[int]:
        """Rungs above the trend whose one gain lies against its direction, from the mean of the trend's last rung."""
        if self.trend is None or self.trend.turns:
            return []
        last = max(rung for rung, gain in self.gains.items() if gain.interval)
        single = {rung: gain.mean for rung, gain in self.gains.items() if rung > last and len(gain.values) == 1}
        return [rung for rung, mean in single.items() if (mean - self.gains[last].mean) * self.trend.direction < 0]

    @property
    def last(self) -> tuple[int, Difference]:
        """Highest rung with an interval, or with a common seed if no rung has one, and the gains there."""
        best = [item for item in self.gains.items() if item[1].interval] or list(self.gains.items())
        return best[-1]


def judge(ladder: Ladder, claims: list[Claim]) -> list[Judged]:
    """Return the claims whose arms have a common seed on a rung."""
    return [judged for claim in claims if (judged := Judged(claim, ladder)).gains]


def paper_claims(ladder: Ladder) -> list[Claim]:
    """Return the paper's claims about the arms of a ladder: encodings, objectives, then the inside of the models."""
    contrasts = [*_encodings(ladder), *_objectives(ladder)]
    scored = [
        Claim(text, measure, first, second, average_difference(row_of(first), row_of(second)))
        for measure in SCORED
        for text, first, second in contrasts
    ]
    return scored + list(_inside(ladder))


def model_claims(ladder: Ladder) -> list[Claim]:
    """Return one claim by validation loss per arm: it gains over its reference.

    The reference of another encoding is the baseline. An arm with another objective or with flags has the plain masked
    LM of its encoding as reference, if that ran.
    """
    find = _finder(ladder)
    claims = []
    for arm in ladder.arms:
        plain = find(arm.encoding, "MLM")
        reference = ladder.baseline if plain in (None, arm) else plain
        if reference and arm != reference and not arm.half:
            claims.append(Claim(f"{arm.label} over {reference.label}", LOSS, arm, reference))
    return claims


def check_claims(check: Ladder) -> list[Claim]:
    """Return one claim by validation loss per other arm of a check: it gains over the check's baseline."""
    base = check.baseline
    return [Claim(f"{arm.label} over {base.label}", LOSS, arm, base) for arm in check.arms if arm != base]


def _finder(ladder: Ladder) -> Callable[[str, str], Arm | None]:
    """Return a function from an encoding and an objective's name to the arm at the full budget, None without one."""
    arms = {(arm.encoding, arm.objective_name): arm for arm in ladder.arms if _has_a_name(arm)}
    return lambda encoding, objective: arms.get((encoding, objective))


def _has_a_name(arm: Arm) -> bool:
    """Return whether the objective's name says everything about the arm but its encoding."""
    return arm.is_plain or (not arm.half and arm.objective_name.endswith(" alone"))


def row_of(arm: Arm) -> str | None:
    """Return the name of an arm's row in the paper's tables; None without such a row."""
    objective = {"TCD alone": "MTH without HCD"}.get(arm.objective_name, arm.objective_name)
    return None if arm.flags and objective == arm.objective_name else paper_row(arm.encoding, objective, arm.half)


def _name(encoding: str) -> str:
    return PAPER_NAMES.get(encoding, encoding)


def _encodings(ladder: Ladder) -> Iterator[tuple[str, Arm, Arm]]:
    find = _finder(ladder)
    for objective in ("MLM", "MTH"):
        for better, worse in BETTER:
            first, second = find(better, objective), find(worse, objective)
            if first and second:
                under = " under MTH" if objective == "MTH" else ""
                yield f"{_name(better)} is better than {_name(worse)}{under}", first, second


def _objectives(ladder: Ladder) -> Iterator[tuple[str, Arm, Arm]]:
    find = _finder(ladder)
    for encoding in dict.fromkeys(arm.encoding for arm in ladder.arms):
        name = _name(encoding)
        for better, worse in (("MTH", "MLM"), ("MTH", "TCD alone"), ("TCD alone", "MLM"), ("HCD alone", "MLM")):
            first, second = find(encoding, better), find(encoding, worse)
            if first and second:
                yield f"{better} is better than {worse} with {name}", first, second
        mth, mlm = find(encoding, "MTH"), find(encoding, "MLM")
        half = mth._replace(half=True) if mth else None
        if half in ladder.arms and mlm and half:
            yield f"MTH at half the budget is at least as good as MLM at the whole with {name}", half, mlm


def _inside(ladder: Ladder) -> Iterator[Claim]:
    find = _finder(ladder)
    for encoding in dict.fromkeys(arm.encoding for arm in ladder.arms):
        mth, mlm = find(encoding, "MTH"), find(encoding, "MLM")
        for words, measure, paper in (
            ("lowers f(S)", TOKEN_SIMILARITY, "lower, figure 3a"),
            ("lowers f(H)", HEAD_SIMILARITY, "lower, figure 3a"),
            ("raises IsoScore", "IsoScore", ""),
            ("raises the effective rank", "effective rank", ""),
            ("lowers the share of the first component", FIRST_COMPONENT, ""),
        ):
            if mth and mlm:
                yield Claim(f"MTH {words} with {_name(encoding)}", measure, mth, mlm, paper)
    more, fewer = PAPER_TRIANGLES
    for objective in ("MLM", "MTH"):
        first, second = find(more, objective), find(fewer, objective)
        if first and second:
            text = f"{_name(more)} shows the triangle in more sentences than {_name(fewer)} under {objective}"
            yield Claim(text, TRIANGLE, first, second, f"{PAPER_TRIANGLES[more] - PAPER_TRIANGLES[fewer]:+.2f}")
            text = f"{_name(more)} tells left from right better than {_name(fewer)} under {objective}"
            yield Claim(text, SHUFFLED, first, second)
