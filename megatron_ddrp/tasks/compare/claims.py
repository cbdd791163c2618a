"""Claims about pairs of arms, read from a YAML file, and their gains at every budget."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron_ddrp.config.option import option
from megatron_ddrp.config.reading import SHOWN, Place, load_yaml, read_section
from megatron_ddrp.tasks.compare.arms import Arm
from megatron_ddrp.tasks.compare.results import Results
from megatron_ddrp.tasks.measures import GLUE, INSIDE, LOSS, MINIMAL_PAIRS, SMALLER_IS_BETTER
from megatron_ddrp.tasks.minimal_pairs.results import over_paradigms
from megatron_ddrp.tasks.statistics import Difference, judge, paired, percentile_interval

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
    return read_section(ClaimFile, load_yaml(file or PAPER, place), place)


def claims_of(results: Results, file: ClaimFile) -> tuple[list[Claim], list[str]]:
    """Return the claims of a file about arms that ran, measure by measure, and a sentence for each of the others."""
    arms = {arm.key: arm for arm in results.arms}
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
            first, second = (arms[key] for key in keys)
            says = paper.get("", paper.get(encoding, ""))
            claims += [Claim(text, name, first, second, says) for name in entry.measures or file.measures]
    others += [f"{c.text}: no value of {c.measure}" for c in claims if c.measure not in results.measures]
    return [claim for measure in results.measures for claim in claims if claim.measure == measure], others


def model_claims(results: Results, known: Iterable[Claim]) -> list[Claim]:
    """Return claims that every arm gains over the baseline, and over masked LM with its encoding, by every score.

    Those of single GLUE tasks, and those about the arms of a claim that is `known`, are left out.
    """
    pairs = {(claim.measure, claim.first, claim.second) for claim in known}
    claims = [
        Claim(f"{arm.label} over {reference.label}", measure, arm, reference)
        for measure in scores_of(results)
        for arm, reference in _references(results)
    ]
    return [claim for claim in claims if (claim.measure, claim.first, claim.second) not in pairs]


def scores_of(results: Results) -> list[str]:
    """Return the measures of models as a whole: those outside of them, without the single tasks of the average."""
    return [name for name in results.measures if name not in INSIDE and name not in results.averaged]


def _references(results: Results) -> Iterator[tuple[Arm, Arm]]:
    """Yield each arm with the arms that it is compared with."""
    plain = {arm.encoding: arm for arm in results.arms if arm.key == f"{arm.encoding} mlm"}
    for arm in results.arms:
        own = plain.get(arm.encoding, results.baseline)
        for reference in dict.fromkeys((results.baseline, results.baseline if arm.half or results.check else own)):
            if arm != reference:
                yield arm, reference


def gains(results: Results, claims: Iterable[Claim]) -> list[Gain]:
    """Return the gains of the claims of one table at every budget with a common seed, judged together."""
    found = [gain for claim in claims for budget in results.budgets if (gain := _gain(results, claim, budget))]
    words = judge([gain.seeds for gain in found])
    return [gain._replace(word=word) for gain, word in zip(found, words, strict=True)]


def _gain(results: Results, claim: Claim, budget: str) -> Gain | None:
    arms = (claim.first, claim.second)
    if claim.measure in SMALLER_IS_BETTER:
        arms = (claim.second, claim.first)
    first, second = (results.of(claim.measure, arm, budget) for arm in arms)
    by_seed = paired(first, second)
    return Gain(claim, budget, by_seed, _over_items(results, claim.measure, arms, budget)) if by_seed else None


def _over_items(results: Results, measure: str, arms: tuple[Arm, Arm], budget: str) -> tuple[float, float] | None:
    """Return the interval of the mean of `first` − `second`, over paradigms for several paradigms of minimal pairs."""
    first, second = (results.at(budget, arm) for arm in arms)
    common = first.keys() & second.keys()
    if measure == MINIMAL_PAIRS:
        both = [(first[seed].paradigms, second[seed].paradigms) for seed in first if seed in common]
        differences = _paradigm_differences(both)
        if len(differences) > 1:
            return over_paradigms(differences)
    ours, theirs = (results.samples(measure, arm, budget) for arm in arms)
    if not common or not common <= ours.keys() & theirs.keys():
        return None
    return percentile_interval(np.mean([ours[seed] - theirs[seed] for seed in sorted(common)], axis=0))


def _paradigm_differences(both: Sequence[tuple[Mapping[str, float], Mapping[str, float]]]) -> np.ndarray:
    """Return the mean difference of each paradigm that all of some pairs of runs have, `[paradigms]`."""
    names = sorted(set.intersection(*(set(first) & set(second) for first, second in both))) if both else []
    return np.array([statistics.fmean(first[name] - second[name] for first, second in both) for name in names])
