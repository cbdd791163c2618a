"""Minimal pairs above chance: standard errors over pairs, and differences to the baseline.

The standard error of a run's macro average over k paradigms of n pairs each is √(Σ p(1 − p)/(n − 1))/k with the
accuracies p of the paradigms, as `megatron-ddrp minimal-pairs` prints it. The runs of an arm score the same pairs, so
their errors are not independent. The error of the mean over the seeds is at most the mean of the runs' errors, and the
table shows that mean.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from megatron_ddrp.pages.markdown import Table
from megatron_ddrp.tasks.ladder.ladder import Ladder
from megatron_ddrp.tasks.ladder.measures import MINIMAL_PAIRS
from megatron_ddrp.tasks.ladder.numbers import shown, shown_interval, shown_seeds, shown_spread, shown_tokens
from megatron_ddrp.tasks.ladder.rows import Arm, Run
from megatron_ddrp.tasks.minimal_pairs.results import over_paradigms, standard_error
from megatron_ddrp.tasks.statistics import Difference, Spread, paired, spread

CHANCE = 0.5


@dataclass(frozen=True)
class PairsScore:
    """Accuracy of an arm on a rung."""

    rung: int
    arm: Arm
    accuracy: Spread
    error: float | None
    """Standard error over pairs; None if a run has no paradigms, or one with fewer than two pairs."""
    difference: Difference | None
    """This arm − the baseline at each common seed; None for the baseline and without a common seed."""
    over_paradigms: tuple[float, float] | None
    """95 % interval of the mean difference from resampling paradigms; None for fewer than two common paradigms."""

    @property
    def errors_above_chance(self) -> float | None:
        """Accuracy minus 50 %, in standard errors; None without an error."""
        return (self.accuracy.mean - CHANCE) / self.error if self.error else None


def _error(run: Run) -> float | None:
    """Return the standard error over pairs of a run's macro average; None if a number of pairs is unknown or 1."""
    return standard_error(list(run.paradigms.values()), [run.pairs.get(uid, 0) for uid in run.paradigms])


def pair_scores(ladder: Ladder) -> list[PairsScore]:
    """Return the accuracies of all arms, rung by rung."""
    found = []
    for rung in ladder.rungs:
        base = ladder.on(rung, ladder.baseline)
        for arm in ladder.arms_on(rung):
            values = ladder.of(MINIMAL_PAIRS, arm, rung)
            accuracy = spread(values)
            if accuracy is None:
                continue
            runs = {seed: run for seed, run in ladder.on(rung, arm).items() if seed in values}
            errors = [_error(run) for run in runs.values()]
            known = [error for error in errors if error is not None]
            error = statistics.fmean(known) if len(known) == len(errors) else None
            difference, over_paradigms = None, None
            if arm != ladder.baseline:
                difference = paired(values, ladder.of(MINIMAL_PAIRS, ladder.baseline, rung))
                over_paradigms = _over_paradigms(runs, base)
            found.append(PairsScore(rung, arm, accuracy, error, difference, over_paradigms))
    return found


def _over_paradigms(runs: Mapping[int, Run], base: Mapping[int, Run]) -> tuple[float, float] | None:
    """Return the bootstrap interval over paradigms of the mean difference at the common seeds."""
    both = [(run.paradigms, base[seed].paradigms) for seed, run in runs.items() if seed in base]
    if not both:
        return None
    uids = sorted(set.intersection(*(set(first) & set(second) for first, second in both)))
    return over_paradigms(np.array([statistics.fmean(a[uid] - b[uid] for a, b in both) for uid in uids]))


def pairs_table(ladder: Ladder) -> Table:
    """Return the table of accuracies, their distance from chance, and the differences to the baseline."""
    rows = []
    for score in pair_scores(ladder):
        above, difference = score.errors_above_chance, score.difference
        rows.append(
            [
                shown_tokens(score.rung),
                score.arm.label,
                shown_spread(MINIMAL_PAIRS, score.accuracy),
                "" if score.error is None else shown(MINIMAL_PAIRS, score.error),
                "" if above is None else f"{above:+.1f}",
                "baseline" if score.arm == ladder.baseline else "",
                "",
                shown_seeds(score.accuracy, difference),
            ]
        )
        if difference:
            over_seeds = shown_interval(MINIMAL_PAIRS, difference.interval)
            mean = shown(MINIMAL_PAIRS, difference.mean, "+")
            rows[-1][5] = f"{mean} ({over_seeds})" if over_seeds else mean
            rows[-1][6] = shown_interval(MINIMAL_PAIRS, score.over_paradigms)
    header = [
        *("rung", "model", "pairs right [%]", "standard error", "above chance, in errors"),
        *(f"− {ladder.baseline.label} (95 % over seeds)", "95 % over paradigms", "seeds"),
    ]
    caption = (
        "Minimal pairs: mean ± standard deviation over the seeds, the standard error over pairs, and (accuracy − 50 %) "
        "divided by it. Chance is 50 %. The runs of a model score the same pairs, so the error of their mean is at "
        "most the mean of their errors, which stands here. Differences are in points and paired by seed; the last "
        "interval resamples paradigms."
    )
    return Table(header, rows, caption, wordy=(0, 1))
