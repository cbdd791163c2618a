"""Values of an experiment by budget, arm and seed, from its rows alone; claims about pairs of arms and their gains."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, replace
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron_ddrp.config import ENCODINGS
from megatron_ddrp.config.option import option
from megatron_ddrp.config.reading import SHOWN, Place, load_values, read_section
from megatron_ddrp.errors import UserError
from megatron_ddrp.tasks.compare.rows import Arm, RunRow
from megatron_ddrp.tasks.glue.tasks import averaged_tasks
from megatron_ddrp.tasks.measures import GLUE, INSIDE, LOSS, MINIMAL_PAIRS, NO_MEASURES, ONSET, SMALLER_IS_BETTER
from megatron_ddrp.tasks.minimal_pairs.results import resampled_interval
from megatron_ddrp.tasks.statistics import BySeed, Difference, judge, pair_by_seed, percentile_interval


def check_places(runs: Sequence[RunRow]) -> None:
    """Check that no two runs have the same model, seed and budget, and that a name means one model, of one size.

    Raises:
        UserError: one line that names the runs.
    """
    places: dict[tuple[object, ...], RunRow] = {}
    models: dict[tuple[str, str], Arm] = {}
    sizes: dict[tuple[object, ...], RunRow] = {}
    for run in runs:
        other = places.setdefault((run.check, run.arm.label, run.seed, run.budget), run)
        if other is not run:
            names = [name for name in {**run.common, **other.common} if run.common.get(name) != other.common.get(name)]
            raise UserError(
                f"two runs of {run.arm.label}, seed {run.seed}, {run.budget}: {other.run} and {run.run}"
                f"{', which differ in ' * bool(names)}{', '.join(names)}; delete the row of one"
            )
        first = models.setdefault((run.check, run.arm.name), run.arm)
        if first._replace(half=run.arm.half) != run.arm:
            raise UserError(
                f"two models are called {run.arm.name!r}: {first._replace(half=False).key} and "
                f"{run.arm._replace(half=False).key}; give each model of the plans its own name"
            )
        like = sizes.setdefault((run.check, run.arm.label, run.budget), run) if run.parameters else run
        if like.parameters != run.parameters:
            raise UserError(
                f"the runs {like.run} and {run.run} of {run.arm.label}, {run.budget}, have {like.parameters:,} and "
                f"{run.parameters:,} parameters: they are not one model; delete the rows of one, or rename it"
            )


class Results:
    """Values of the main experiment, or of a side experiment (`check`)."""

    def __init__(self, runs: Sequence[RunRow], check: str = "", baseline: str = ""):
        """Take the runs of the check, with `baseline` those that name it or none. Its own runs from elsewhere join it.

        They have the same budget, seed and common flags: otherwise the flags, not the model, may make the difference.
        """
        own = [run for run in runs if run.check == check and (not baseline or run.baseline in ("", baseline))]
        self._named = {run.baseline for run in own}
        if check:
            settings, taken = [_setting(run) for run in own], {run.run for run in own}
            others = [run for run in runs if run.run not in taken and not run.arm.half and run.arm.name in self._named]
            own = [*(replace(run, check=check) for run in others if _setting(run) in settings), *own]
        self.check, self.runs = check, own
        tokens: dict[str, int] = {}
        for run in own:
            tokens[run.budget] = max(tokens.get(run.budget, 0), run.planned_tokens)
        self.budgets = dict(sorted(tokens.items(), key=lambda item: item[1]))
        """Budget in words → its tokens, in growing order. With minutes models differ in tokens."""
        self._places: dict[tuple[str, Arm], dict[int, RunRow]] = {}
        for run in own:
            self._places.setdefault((run.budget, run.arm), {})[run.seed] = run

    @cached_property
    def baseline(self) -> Arm:
        """Arm that the others are compared with: the rows' baseline if it ran, otherwise the first arm."""
        named = (run.arm for run in self.runs if run.model in self._named and not run.half)
        return next(named, self.runs[0].arm)

    @cached_property
    def arms(self) -> list[Arm]:
        """Arms in the order of tables: plain masked LM, its variants, plain MTH, …; those of a check as in its rows."""
        found = list(dict.fromkeys(run.arm for run in self.runs))
        return found if self.check else sorted(found, key=self._place)

    def _place(self, arm: Arm) -> tuple[object, ...]:
        objectives = ["mlm", "mth", *sorted({run.arm.objective for run in self.runs} - {"mlm", "mth"})]
        encodings = [*ENCODINGS, arm.encoding]
        plain = (arm.half, objectives.index(arm.objective), bool(arm.flags))
        return (*plain, encodings.index(arm.encoding), arm.encoding, arm.name)

    @cached_property
    def averaged(self) -> list[str]:
        """Tasks of the GLUE average: those that all runs with an average have. Runs of other plans may have more."""
        return averaged_tasks([run.values for run in self.runs if GLUE in run.values])

    @cached_property
    def measures(self) -> list[str]:
        """Measures with a value: loss, onset, minimal pairs, tasks, the GLUE average, then those of the inside.

        The onset tells nothing if no run has left the plateau.
        """
        known = {GLUE: bool(self.averaged), ONSET: any(ONSET in run.values and run.onset for run in self.runs)}
        found = dict.fromkeys(name for run in self.runs for name in run.values if known.get(name, True))
        tasks = [name for name in found if name not in (LOSS, ONSET, MINIMAL_PAIRS, GLUE, *NO_MEASURES, *INSIDE)]
        return [name for name in (LOSS, ONSET, MINIMAL_PAIRS, *tasks, GLUE, *INSIDE) if name in found]

    def at(self, budget: str, arm: Arm) -> Mapping[int, RunRow]:
        """Return seed → run of an arm at a budget."""
        return self._places.get((budget, arm), {})

    def arms_at(self, budget: str) -> list[Arm]:
        """Return the arms with a run at a budget."""
        return [arm for arm in self.arms if (budget, arm) in self._places]

    def of(self, measure: str, arm: Arm, budget: str) -> BySeed:
        """Return seed → value of an arm at a budget; empty if nothing is measured.

        The GLUE average is computed here from the tasks that all runs share; the one in the rows may be of others.
        """
        parts = self._parts(measure)
        return {
            seed: statistics.fmean(run.values[part] for part in parts)
            for seed, run in self.at(budget, arm).items()
            if parts and all(part in run.values for part in parts)
        }

    def samples(self, measure: str, arm: Arm, budget: str) -> dict[int, np.ndarray]:
        """Return seed → value on each bootstrap sample of the test items, `[samples]`, of the runs that have them."""
        parts = self._parts(measure)
        return {
            seed: np.mean([run.samples[part] for part in parts], axis=0)
            for seed, run in self.at(budget, arm).items()
            if parts and all(part in run.samples for part in parts)
        }

    def _parts(self, measure: str) -> Sequence[str]:
        return self.averaged if measure == GLUE else [measure]


_setting = attrgetter("budget", "seed", "common")


def checks_of(runs: Sequence[RunRow]) -> list[Results]:
    """Return the side experiments of some runs. Entries of one check with different baselines stand apart."""
    found = dict.fromkeys((run.check, run.baseline) for run in runs if run.check)
    named = {check for check, baseline in found if baseline}
    return [Results(runs, check, baseline) for check, baseline in found if baseline or check not in named]


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
    arms = (claim.second, claim.first) if claim.measure in SMALLER_IS_BETTER else (claim.first, claim.second)
    first, second = (results.of(claim.measure, arm, budget) for arm in arms)
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
