"""Minimal pairs above chance, against loops over pairs."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megatron_ddrp.lab.compare.tables import Claim, above_chance, gains
from megatron_ddrp.tasks.minimal_pairs.pairs import ParadigmScore, Result, difference, standard_error
from tests.unit.lab.compare.made_rows import RUNGS, make_row, results_of


def pairs_row(model, seed, accuracies, pairs=4):
    paradigms = {f"p{place}": accuracy for place, accuracy in enumerate(accuracies)}
    values = {"minimal pairs": sum(accuracies) / len(accuracies)}
    return make_row(model, seed, RUNGS[0], values, paradigms=paradigms, pairs=pairs)


def slow_error(paradigms):
    """Square root of the sum of s²/n over paradigms, divided by their number; s² is the variance of the 0s and 1s."""
    total = 0.0
    for right in paradigms:
        mean = sum(right) / len(right)
        variance = 0.0
        for value in right:
            variance += (value - mean) ** 2 / (len(right) - 1)
        total += variance / len(right)
    return math.sqrt(total) / len(paradigms)


def test_the_standard_error_is_that_of_the_pairs():
    paradigms = [[1, 1, 0, 1], [0, 1], [1, 1, 1, 1]]
    accuracies, pairs = [sum(right) / len(right) for right in paradigms], [len(right) for right in paradigms]
    assert standard_error(accuracies, pairs) == pytest.approx(slow_error(paradigms), rel=1e-12)
    cells = {str(place): ParadigmScore(np.array(right, bool), 0, 0, 0.5) for place, right in enumerate(paradigms)}
    first = Result("", cells)
    assert first.standard_error == standard_error(accuracies, pairs)
    row = pairs_row("absolute", 1, accuracies, pairs={f"p{place}": count for place, count in enumerate(pairs)})
    found = above_chance(results_of([row]).runs)
    assert found == pytest.approx((sum(accuracies) / 3 - 0.5) / first.standard_error)


@pytest.mark.parametrize(("accuracies", "pairs"), [([], []), ([0.5], [1]), ([0.5, 1.0], [0, 9])])
def test_no_error_without_pairs(accuracies, pairs):
    assert standard_error(accuracies, pairs) is None


def test_the_interval_over_paradigms_is_that_of_the_command_minimal_pairs():
    rights = {
        "absolute": ([1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 1]),
        "ddrp": ([1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]),
    }
    rows = [pairs_row(name, 1, [sum(right) / 4 for right in found]) for name, found in rights.items()]
    results = results_of(rows)
    (gain,) = gains(results, [Claim("", "minimal pairs", *results.arms[::-1])])
    base, ddrp = (
        Result(
            name, {f"p{place}": ParadigmScore(np.array(right, bool), 0, 0, 0.5) for place, right in enumerate(found)}
        )
        for name, found in rights.items()
    )
    assert gain.items == difference(ddrp, base).items


def test_the_error_of_a_mean_over_seeds_is_an_upper_bound():
    """Seeds score the same pairs: the error of the mean of their results per pair is at most the mean of the errors."""
    first, second = [[1, 1, 0, 1], [0, 1, 0, 0]], [[1, 0, 0, 1], [0, 1, 1, 0]]
    rows = [pairs_row("absolute", seed, [sum(r) / 4 for r in runs]) for seed, runs in enumerate((first, second))]
    error = (slow_error(first) + slow_error(second)) / 2
    together = [[(a + b) / 2 for a, b in zip(x, y, strict=True)] for x, y in zip(first, second, strict=True)]
    assert slow_error(together) < error
    mean = sum(row["values"]["minimal pairs"] for row in rows) / 2
    assert above_chance(results_of(rows).runs) == pytest.approx((mean - 0.5) / error)


def test_a_seed_without_minimal_pairs_leaves_the_interval_of_the_others():
    """It may have diverged, or be scored later."""
    shares = {"absolute": [0.25, 0.5, 0.25], "ddrp": [0.5, 0.25, 1.0]}
    rows = [pairs_row(model, seed, found) for seed in (1, 2) for model, found in shares.items()]
    more = [make_row(model, 3, RUNGS[0], {"minimal pairs": None}) for model in shares]
    results, less = results_of(rows + more), results_of(rows)
    (gain,) = gains(results, [Claim("", "minimal pairs", *results.arms[::-1])])
    (expected,) = gains(less, [Claim("", "minimal pairs", *less.arms[::-1])])
    assert gain == expected and gain.items is not None
