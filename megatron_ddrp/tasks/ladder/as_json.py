"""Content of results.json: the numbers behind the page's tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_ddrp.tasks.ladder.claims import Judged
from megatron_ddrp.tasks.ladder.ladder import Ladder
from megatron_ddrp.tasks.ladder.minimal_pairs import PairsScore, pair_scores
from megatron_ddrp.tasks.statistics import Difference, seeds_needed


def results(ladder: Ladder, judged: Sequence[Judged]) -> dict[str, Any]:
    """Return claims with their gains and trends, values by rung, arm, measure and seed, and minimal pairs."""
    return {
        "rungs": ladder.rungs,
        "claims": claims(judged),
        "values": {
            str(rung): {
                arm.label: {measure: found for measure in ladder.measures if (found := ladder.of(measure, arm, rung))}
                for arm in ladder.arms_on(rung)
            }
            for rung in ladder.rungs
        },
        "minimal_pairs": [_pairs(score) for score in pair_scores(ladder)],
        "phenomena": {
            str(rung): {arm.label: dict(ladder.accuracies(arm, rung)) for arm in ladder.arms_on(rung)}
            for rung in ladder.rungs
        },
    }


def claims(judged: Sequence[Judged]) -> list[dict[str, Any]]:
    """Return claims with their gains, trends and verdicts."""
    return [_claim(item) for item in judged]


def _claim(item: Judged) -> dict[str, Any]:
    claim, trend = item.claim, item.trend
    return {
        "claim": claim.text,
        "measure": claim.measure,
        "first": claim.first.label,
        "second": claim.second.label,
        "paper": claim.paper,
        "gains": {str(rung): _gain(gain) | {"verdict": item.verdicts[rung]} for rung, gain in item.gains.items()},
        "trend": trend
        and {"at_first_rung": trend.at(0), "per_factor_four": trend.slope, "half_width": trend.slope_half_width}
        | {"steps": trend.steps, "turns": trend.turns},
        "verdict": item.verdict,
    }


def _gain(gain: Difference) -> dict[str, Any]:
    needed = seeds_needed(gain.mean, gain.deviation) if gain.interval and gain.deviation is not None else None
    return {
        "values": gain.values,
        "mean": gain.mean,
        "deviation": gain.deviation,
        "interval": gain.interval,
        "seeds_needed": needed,
    }


def _pairs(score: PairsScore) -> dict[str, Any]:
    difference = score.difference
    return {
        "rung": score.rung,
        "model": score.arm.label,
        "accuracy": score.accuracy.mean,
        "standard_error": score.error,
        "errors_above_chance": score.errors_above_chance,
        "difference": difference.mean if difference else None,
        "over_seeds": difference.interval if difference else None,
        "over_paradigms": score.over_paradigms,
    }
