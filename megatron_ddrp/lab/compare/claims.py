"""Claims about pairs of arms, from a file or for every model, and their gains by budget, judged together."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron_ddrp.config.option import option
from megatron_ddrp.config.reading import SHOWN, Place, load_values, read_section
from megatron_ddrp.lab.compare.results import Results
from megatron_ddrp.lab.compare.rows import Arm
from megatron_ddrp.tasks.measures import GLUE, INSIDE, LOSS, MINIMAL_PAIRS, ONSET, SMALLER_IS_BETTER
from megatron_ddrp.tasks.minimal_pairs.results import resampled_interval
from megatron_ddrp.tasks.statistics import Difference, judge, pair_by_seed, percentile_interval

PAPER = Path(__file__).with_name("paper.yaml")
"""Claims of the DDRP+MTH paper."""
ENCODING = "{encoding}"


class Claim(NamedTuple):
    """The first arm gains over the second: it is higher by the measure, or lower where less is better."""

    text: str
    measure: str
    first: Arm
    second: Arm
    paper: str = ""
    """Statement of the paper; empty without one."""


class Gain(NamedTuple):
    """Gain of a claim at a budget."""

    claim: Claim
    budget: str
    seeds: Difference
    """Gains paired by seed, with Student's 95 % interval."""
    items: tuple[float, float] | None
    """95 % interval of the mean gain on resampled test items; None if nothing is stored per item."""
    word: str = ""
    """"better", "worse" or "not told apart", judged with the other gains of its table; empty without a p value."""


def _texts(values: Any, place: Place) -> dict[str, str]:
    """Read a mapping of texts; a single text, what the paper says of every encoding, has the key ""."""
    found = values if isinstance(values, Mapping) else {"": values}
    if not all(isinstance(text, str | int | float) for text in found.values()):
        raise place.error(f"got {SHOWN.repr(values)}, expected some text, or texts by encoding")
    return {str(name): str(text) for name, text in found.items()}


@dataclass(frozen=True)
class Entry:
    """Claim of a file, for one pair of arms or, with `{encoding}`, for one pair per encoding."""

    text: str = option(MISSING, "sentence in tables")
    first: str = option(MISSING, "better arm: encoding objective [flag=value …] [half]")
    second: str = option(MISSING, "worse arm")
    measures: tuple[str, ...] = option((), "measures (default: those of the file)", distinct=True)
    paper: dict[str, str] | None = option(None, "what the paper says, or that by encoding", read=_texts)


@dataclass(frozen=True)
class ClaimFile:
    """File of claims."""

    claims: tuple[Entry, ...] = option(MISSING, "claims")
    measures: tuple[str, ...] = option((LOSS, GLUE, MINIMAL_PAIRS), "measures of a claim without its own")
    names: dict[str, str] | None = option(None, "name of an encoding in texts", read=_texts)


def load_claims(file: Path | None = None) -> ClaimFile:
    """Read a file of claims, by default the paper's. Raises `UserError` with the file and the key."""
    place = Place(str(file or PAPER))
    return read_section(ClaimFile, load_values(file or PAPER, place), place)


def claims_of(results: Results, file: ClaimFile) -> tuple[list[Claim], list[str]]:
    """Return the claims of a file about arms that ran, measure by measure, and a sentence for each of the others."""
    arms: dict[str, list[Arm]] = {}
    for arm in results.arms:
        arms.setdefault(arm.key, []).append(arm)
    encodings = dict.fromkeys(arm.encoding for arm in results.arms)
    claims, others = [], []
    for entry in file.claims:
        for encoding in encodings if ENCODING in entry.first + entry.second else [""]:
            keys = [key.replace(ENCODING, encoding) for key in (entry.first, entry.second)]
            text = entry.text.replace(ENCODING, (file.names or {}).get(encoding, encoding))
            paper = entry.paper or {}
            if absent := [key for key in keys if key not in arms]:
                others.append(f"{text}: no run of {' or of '.join(absent)}; there is {', '.join(arms)}")
                continue
            if keys[0] == keys[1]:  # with {encoding}, an arm may meet itself
                continue
            names = entry.measures or [name for name in file.measures if name in results.measures] or file.measures
            pairs = list(itertools.product(*(arms[key] for key in keys)))  # several if a model has several names
            for first, second in pairs:
                one = f"{text} ({first.label} over {second.label})" if len(pairs) > 1 else text
                claims += [Claim(one, name, first, second, paper.get("", paper.get(encoding, ""))) for name in names]
    others += [f"{c.text}: no value of {c.measure}" for c in claims if c.measure not in results.measures]
    return [claim for measure in results.measures for claim in claims if claim.measure == measure], others


def model_claims(results: Results, known: Iterable[Claim] = ()) -> list[Claim]:
    """Return claims that every arm gains over the baseline, and over masked LM with its encoding, by every score.

    In a check they are over the baseline alone. Those of single GLUE tasks, and those about the arms of a claim that is
    `known`, are left out.
    """
    base, pairs = results.baseline, {(claim.measure, claim.first, claim.second) for claim in known}
    plain = {arm.encoding: arm for arm in results.arms if arm.key == f"{arm.encoding} mlm"}
    compared = [
        (arm, reference)
        for arm in results.arms
        for reference in dict.fromkeys((base, base if arm.half or results.check else plain.get(arm.encoding, base)))
        if arm != reference
    ]
    return [
        Claim(f"{arm.label} over {reference.label}", measure, arm, reference)
        for measure in results.measures
        if measure not in INSIDE and measure not in results.averaged
        for arm, reference in compared
        if (measure, arm, reference) not in pairs
    ]


def gains(results: Results, claims: Iterable[Claim]) -> list[Gain]:
    """Return the gains of the claims of one table at every budget with a common seed, judged together."""
    found = [gain for claim in claims for budget in results.budgets if (gain := _gain(results, claim, budget))]
    words = judge([gain.seeds for gain in found])
    return [gain._replace(word=word) for gain, word in zip(found, words, strict=True)]


def _gain(results: Results, claim: Claim, budget: str) -> Gain | None:
    """Return the gain of a claim at a budget; None without a common seed.

    Two runs of a seed that both rested on the plateau to their end count as equal by the onset. If that holds at every
    seed, nothing is known, and there is no gain.
    """
    arms = (claim.second, claim.first) if claim.measure in SMALLER_IS_BETTER else (claim.first, claim.second)
    first, second = (results.of(claim.measure, arm, budget) for arm in arms)
    if claim.measure == ONSET:
        common, pair = first.keys() & second.keys(), [results.at(budget, arm) for arm in arms]
        resting = {seed for seed in common if all(runs[seed].onset is None for runs in pair)}
        if resting == common:
            return None
        first = {**first, **{seed: second[seed] for seed in resting}}
    by_seed = pair_by_seed(first, second)
    return Gain(claim, budget, by_seed, _over_items(results, claim, arms, budget, by_seed.seeds)) if by_seed else None


def _over_items(
    results: Results, claim: Claim, arms: tuple[Arm, Arm], budget: str, seeds: Sequence[int]
) -> tuple[float, float] | None:
    """Return the interval of the mean gain at some seeds, over paradigms for several paradigms of minimal pairs."""
    first, second = (results.at(budget, arm) for arm in arms)
    if claim.measure == MINIMAL_PAIRS:
        both = [(first[seed].paradigms, second[seed].paradigms) for seed in seeds]
        names = sorted(set.intersection(*(set(run) for pair in both for run in pair)))
        means = [statistics.fmean(one[name] - other[name] for one, other in both) for name in names]
        if interval := resampled_interval(np.array(means)):
            return interval
    ours, theirs = (results.samples(claim.measure, arm, budget) for arm in arms)
    if not ours.keys() & theirs.keys() >= set(seeds):
        return None
    return percentile_interval(np.mean([ours[seed] - theirs[seed] for seed in seeds], axis=0))
