"""Values, claims and gains of a comparison, and their tables.

Values come from rows alone. Claims are about pairs of arms, from a file or for every model; their gains at all budgets
are judged together. Each table has a name, under which it is a file of its own and `--tables` writes it into a
document.
"""

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
from megatron_ddrp.config.reading import SHOWN, Place, load_values, option, read_section
from megatron_ddrp.errors import UserError
from megatron_ddrp.lab.compare.rows import Arm, RunRow, times_on_plateau
from megatron_ddrp.pages.markdown import Table
from megatron_ddrp.run.log import duration
from megatron_ddrp.tasks.glue import PAPER_TASKS, averaged_tasks, paper_rows
from megatron_ddrp.tasks.minimal_pairs.pairs import standard_error
from megatron_ddrp.tasks.statistics import (
    GLUE,
    INSIDE,
    LIKE_LOSS,
    LOSS,
    LOSSES,
    MINIMAL_PAIRS,
    NO_MEASURES,
    OTHER_LOSS,
    SMALLER_IS_BETTER,
    STEP_SECONDS,
    BySeed,
    Difference,
    Gain,
    Interval,
    format_interval,
    format_median,
    format_value,
    judge,
    pair_by_seed,
    percentile_interval,
    seeds_needed,
    table_of,
)

SAME_TEXT = 0.05
"""Largest difference of the unigram levels of one text, in nats; all row lengths have one level."""


def same_text(one: RunRow, other: RunRow) -> bool:
    """Return whether two runs may have the same training text: by their unigram levels, if both rows have one."""
    levels = one.unigram_loss, other.unigram_loss
    return not all(levels) or abs(levels[0] - levels[1]) < SAME_TEXT


def check_places(runs: Sequence[RunRow]) -> None:
    """Check that no two runs have the same model, seed and budget, and that a name means one model, of one size.

    The models of a seed and budget must have the same training text, too.

    Raises:
        UserError: one line that names the runs or models.
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
    for results in (ExperimentValues(runs), *checks_of(runs)):
        _check_texts(results.runs)


def _check_texts(runs: Sequence[RunRow]) -> None:
    """Refuse runs of one seed and budget, judged together, that had different training texts."""
    groups: dict[tuple[str, int], list[RunRow]] = {}
    for run in runs:
        if run.unigram_loss:
            groups.setdefault((run.budget, run.seed), []).append(run)
    for (budget, seed), group in groups.items():
        parts = [[run for run in group if same_text(run, group[0]) is same] for same in (True, False)]
        if parts[1]:
            told = [
                f"{', '.join(run.arm.label for run in part)} (unigram level {part[0].unigram_loss:.2f})"
                for part in parts
            ]
            raise UserError(
                f"seed {seed}, {budget}: {' and '.join(told)} were trained on different texts or "
                "vocabularies and cannot be judged against each other: give the rows of one text at a time"
            )


class ExperimentValues:
    """Values of the main experiment, or of a side experiment (`check`)."""

    def __init__(self, runs: Sequence[RunRow], check: str = "", baseline: str = ""):
        """Take the runs of the check, with `baseline` those that name it or none. Its own runs from elsewhere join it.

        They have the same budget, seed, common flags and training text: otherwise these, not the model, may make the
        difference.
        """
        own = [run for run in runs if run.check == check and (not baseline or run.baseline in ("", baseline))]
        self._named = {run.baseline for run in own}
        if check:
            taken = {run.run for run in own}
            others = [run for run in runs if run.run not in taken and not run.arm.half and run.arm.name in self._named]
            like = [run for run in others if any(_setting(run) == _setting(one) and same_text(run, one) for one in own)]
            own = [*(replace(run, check=check) for run in like), *own]
        self.check, self.runs = check, own
        tokens: dict[str, int] = {}
        for run in own:
            tokens[run.budget] = max(tokens.get(run.budget, 0), run.planned_tokens)
        self.budgets = dict(sorted(tokens.items(), key=lambda item: item[1]))
        """Budget in words → its tokens, in growing order. Earlier versions had minutes, where models differ."""
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
        """Measures with a value: losses, minimal pairs, tasks, the GLUE average, then those of the inside."""
        found = dict.fromkeys(name for run in self.runs for name in run.values if name != GLUE or self.averaged)
        tasks = [name for name in found if name not in (*LOSSES, MINIMAL_PAIRS, GLUE, *NO_MEASURES, *INSIDE)]
        return [name for name in (*LOSSES, MINIMAL_PAIRS, *tasks, GLUE, *INSIDE) if name in found]

    def at(self, budget: str, arm: Arm) -> Mapping[int, RunRow]:
        """Return seed → run of an arm at a budget."""
        return self._places.get((budget, arm), {})

    def arms_at(self, budget: str) -> list[Arm]:
        """Return the arms with a run at a budget."""
        return [arm for arm in self.arms if (budget, arm) in self._places]

    def of(self, measure: str, arm: Arm, budget: str, beside: Arm | None = None) -> BySeed:
        """Return seed → value of an arm at a budget; empty if nothing is measured.

        The GLUE average is computed here from the tasks that all runs share; the one in the rows may be of others. The
        runs whose values do not compare with those of `beside` (`RunRow.compares`) are left out.
        """
        parts, others = self._parts(measure), self.at(budget, beside) if beside else {}
        return {
            seed: statistics.fmean(run.values[part] for part in parts)
            for seed, run in self.at(budget, arm).items()
            if parts
            and all(part in run.values for part in parts)
            and all(run.compares(others.get(seed, next(iter(others.values()))), part) for part in parts * bool(others))
        }

    def samples(self, measure: str, arm: Arm, budget: str) -> dict[int, np.ndarray]:
        """Return seed → value on each bootstrap sample of the test items, `[samples]`, of the runs that have them."""
        parts = self._parts(measure)
        return {
            seed: np.mean([run.samples[part] for part in parts], axis=0)
            for seed, run in self.at(budget, arm).items()
            if parts and all(part in run.samples for part in parts)
        }

    def _parts(self, measure: str) -> list[str]:
        return self.averaged if measure == GLUE else [measure]


_setting = attrgetter("budget", "seed", "common")


def checks_of(runs: Sequence[RunRow]) -> list[ExperimentValues]:
    """Return the side experiments of some runs. Entries of one check with different baselines stand apart."""
    found = dict.fromkeys((run.check, run.baseline) for run in runs if run.check)
    named = {check for check, baseline in found if baseline}
    return [ExperimentValues(runs, check, baseline) for check, baseline in found if baseline or check not in named]


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


def claims_of(results: ExperimentValues, file: ClaimFile) -> tuple[list[Claim], list[str]]:
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
            stated = {LOSS: [name for name in LOSSES if name in results.measures] or [LOSS]}
            names = [one for name in entry.measures or file.measures for one in stated.get(name, [name])]
            names = [name for name in names if entry.measures or name in results.measures] or names
            pairs = list(itertools.product(*(arms[key] for key in keys)))  # several if a model has several names
            for first, second in pairs:
                one = f"{text} ({first.label} over {second.label})" if len(pairs) > 1 else text
                claims += [Claim(one, name, first, second, paper.get("", paper.get(encoding, ""))) for name in names]
    others += [f"{c.text}: no value of {c.measure}" for c in claims if c.measure not in results.measures]
    return [claim for measure in results.measures for claim in claims if claim.measure == measure], others


def compared_arms(results: ExperimentValues) -> list[tuple[Arm, Arm]]:
    """Return every arm with the baseline, and with masked LM with its encoding; in a check with the baseline alone."""
    base = results.baseline
    plain = {arm.encoding: arm for arm in results.arms if arm.key == f"{arm.encoding} mlm"}
    return [
        (arm, reference)
        for arm in results.arms
        for reference in dict.fromkeys((base, base if arm.half or results.check else plain.get(arm.encoding, base)))
        if arm != reference
    ]


def model_claims(results: ExperimentValues, known: Iterable[Claim] = ()) -> list[Claim]:
    """Return claims that every arm gains over those of `compared_arms`, by every score.

    Those of single GLUE tasks, and those about the arms of a claim that is `known`, are left out.
    """
    pairs = {(claim.measure, claim.first, claim.second) for claim in known}
    return [
        Claim(f"{arm.label} over {reference.label}", measure, arm, reference)
        for measure in results.measures
        if measure not in INSIDE and measure not in results.averaged
        for arm, reference in compared_arms(results)
        if (measure, arm, reference) not in pairs
    ]


def gains(results: ExperimentValues, claims: Iterable[Claim]) -> list[Gain]:
    """Return the gains of the claims of one table at every budget with a common seed, judged together."""
    return judge([gain for claim in claims for budget in results.budgets if (gain := _gain(results, claim, budget))])


def _gain(results: ExperimentValues, claim: Claim, budget: str) -> Gain | None:
    """Return the gain of a claim at a budget; None without a common seed."""
    arms = (claim.second, claim.first) if claim.measure in SMALLER_IS_BETTER else (claim.first, claim.second)
    first, second = (results.of(claim.measure, arm, budget, arms[1]) for arm in arms)
    by_seed = pair_by_seed(first, second)
    if by_seed is None:
        return None
    items = _over_items(results, claim, arms, budget, by_seed.seeds)
    about = {"text": claim.text, "paper": claim.paper, "budget": budget}
    return Gain(claim.first, claim.second, claim.measure, by_seed, items, **about)


def _over_items(
    results: ExperimentValues, claim: Claim, arms: tuple[Arm, Arm], budget: str, seeds: Sequence[int]
) -> Interval | None:
    """Return the interval of the mean gain at some seeds, over paradigms for several paradigms of minimal pairs."""
    first, second = (results.at(budget, arm) for arm in arms)
    if claim.measure == MINIMAL_PAIRS:
        both = [(first[seed].paradigms, second[seed].paradigms) for seed in seeds]
        names = sorted(set.intersection(*(set(run) for pair in both for run in pair)))
        means = tuple(statistics.fmean(one[name] - other[name] for one, other in both) for name in names)
        if means and (interval := Difference(means).interval):
            return interval
    ours, theirs = (results.samples(claim.measure, arm, budget) for arm in arms)
    if not ours.keys() & theirs.keys() >= set(seeds):
        return None
    return percentile_interval(np.mean([ours[seed] - theirs[seed] for seed in seeds], axis=0))


def format_spread(measure: str, values: BySeed) -> str:
    """Return mean ± standard deviation over the seeds; only the mean for one seed, nothing for none."""
    if not values:
        return ""
    mean = format_value(measure, statistics.fmean(values.values()))
    return mean if len(values) < 2 else f"{mean} ± {format_value(measure, statistics.stdev(values.values()))}"


def format_needed(gain: Difference) -> str:
    """Return the number of seeds whose interval would exclude 0; empty without a spread, or if it already does."""
    if not gain.interval or not gain.deviation or not gain.interval[0] <= 0 <= gain.interval[1]:
        return ""
    count = seeds_needed(gain.mean, gain.deviation)
    return "no number" if gain.mean == 0 else "over 100,000" if count is None else f"{count:,}"


def format_average(tasks: Sequence[str]) -> str:
    """Return the meaning of a GLUE average over these tasks: "the paper's measure", or their names."""
    if set(tasks) == set(PAPER_TASKS):
        return "the paper's measure"
    *others, last = tasks
    names = f"the mean of {', '.join(others)} and {last}" if others else f"{last} alone"
    return f"{names}; the paper's average has eight tasks"


def format_tokens(tokens: float) -> str:
    """Return a number of tokens: 4.19 M, 1.07 G, 524,288."""
    for size, unit in ((1e9, "G"), (1e6, "M")):
        if tokens >= size:
            return f"{tokens / size:.3g} {unit}"
    return f"{tokens:,.0f}"


def format_budget(budget: str, tokens: int) -> str:
    """Return a budget in words: 4.19 M tokens, 2,048 steps."""
    return f"{format_tokens(tokens)} tokens" if budget == f"{tokens:,} tokens" else budget


CHANCE = 0.5
ABOVE_CHANCE = "above chance"
KINDS = {"other": [OTHER_LOSS], "glue": [GLUE], "minimal-pairs": [MINIMAL_PAIRS], "inside": list(INSIDE)}
"""End of a table's name → its measures. Other losses have no ending, and all other measures have `tasks`."""


def group_of(measure: str) -> str:
    """Return the end of the name of a measure's table of gains; empty for the loss on like text or an unknown kind."""
    found = next((name for name, measures in KINDS.items() if measure in measures), "tasks")
    return "" if measure in (LIKE_LOSS, LOSS) else f"-{found}"


def basis_of(results: ExperimentValues, measure: str) -> str:
    """Return what a measure is taken on, in words: the text of a loss, the tasks of the GLUE average; else nothing."""
    if measure == GLUE:
        return format_average(results.averaged)
    alike = [run.validates_alike for run in results.runs if LIKE_LOSS in run.values]
    like = ["held-out documents"] * any(alike) + ["training text, last tenth of tokens"] * (not all(alike))
    others = {OTHER_LOSS: "held-out documents of another kind", LOSS: "held-out documents of an unknown kind"}
    return "; ".join(like) if measure == LIKE_LOSS else others.get(measure, "")


def runs_table(results: ExperimentValues) -> Table:
    """Return the table of the budgets: their models, seeds and cost."""
    rows = []
    for budget in results.budgets:
        runs = [run for run in results.runs if run.budget == budget]
        whole = [run for run in runs if not run.arm.half]
        seeds = [len(results.at(budget, arm)) for arm in results.arms_at(budget)]
        row = {
            "budget": budget,
            "tokens consumed": _range([run.tokens for run in whole]),
            "steps": ", ".join(f"{n:,}" for n in sorted({run.steps for run in whole if run.steps})),
            "models": f"{len(seeds)}",
            "seeds per model": _range(seeds),
            "runs": f"{len(runs)}",
            "parameters": _range([run.parameters for run in runs if run.parameters]),
            "time": duration(sum(run.seconds for run in runs)),
        }
        rows.append(row)
    return table_of(rows, "Time of the runs with all measures.")


def _range(numbers: Sequence[int]) -> str:
    """Return the smallest and the largest number, once if they are equal."""
    return " to ".join(f"{number:,}" for number in sorted({min(numbers), max(numbers)})) if numbers else ""


def claim_table(results: ExperimentValues, found: Sequence[Gain], what: str) -> Table:
    """Return the table of gains that were judged together, one line per budget."""
    measures = list(dict.fromkeys(gain.measure for gain in found))
    rows = []
    for gain in found:
        measure = gain.measure
        row = {
            what: gain.text,
            "measure": measure if len(measures) > 1 else "",
            "the paper": gain.paper,
            "budget": format_budget(gain.budget, results.budgets[gain.budget]) if len(results.budgets) > 1 else "",
            "gain": format_value(measure, gain.seeds.mean, "+"),
            "95 % over seeds": format_interval(measure, gain.seeds.interval),
            "95 % over items": format_interval(measure, gain.items),
            "n": str(len(gain.seeds.values)),
            "judgement": gain.word,
            "seeds needed": format_needed(gain.seeds),
        }
        rows.append(row)
    named = [f"{name} ({basis})" if (basis := basis_of(results, name)) else name for name in measures]
    unit = "Gains in nats" if set(measures) <= set(LOSSES) else "Gains as in the tables of values"
    return table_of(
        rows, f"{', '.join(named)}. {unit}, paired by seed." if named else "", ("measure", "budget", "judgement")
    )


def score_table(results: ExperimentValues, budget: str, is_inside: bool = False) -> Table:
    """Return the table of all arms of a budget with their measures: those of the inside, or all others."""
    measures = [name for name in results.measures if (name in INSIDE) == is_inside]
    found = [(arm, _values(results, measures, arm, budget)) for arm in results.arms_at(budget)]
    rows = [
        {"model": arm.label, **values, "seeds": str(len(results.at(budget, arm)))} for arm, values in found if values
    ]
    caption = f"{format_budget(budget, results.budgets[budget])}: mean ± standard deviation over the seeds."
    return table_of(rows, " ".join([caption, *bases_of(results, measures)]))


def bases_of(results: ExperimentValues, measures: Iterable[str]) -> list[str]:
    """Return a sentence for each measure about what it is taken on."""
    return [f"{name[0].upper()}{name[1:]}: {basis}." for name in measures if (basis := basis_of(results, name))]


def checks_table(checks: Mapping[ExperimentValues, Sequence[Gain]]) -> Table:
    """Return the table of all side experiments: their scores, and the gains by the loss over the baseline of each."""
    rows = []
    for check, gains in checks.items():
        measures = [name for name in check.measures if name not in INSIDE]
        for budget, tokens in check.budgets.items():
            own = {gain.first: gain for gain in reversed(gains) if gain.budget == budget}  # by the first loss
            for arm in check.arms_at(budget):
                row = {"check": check.check, "budget": format_budget(budget, tokens), "model": arm.label}
                row |= _values(check, measures, arm, budget) | {"gain": "", "95 % over seeds": "", "judgement": ""}
                if gain := own.get(arm):
                    text = {LIKE_LOSS: " (like text)", OTHER_LOSS: " (other text)"}.get(gain.measure, "")
                    row["gain"] = f"{format_value(LOSS, gain.seeds.mean, '+')} over {check.baseline.label}{text}"
                    row |= {"95 % over seeds": format_interval(LOSS, gain.seeds.interval), "judgement": gain.word}
                rows.append(row | {"seeds": str(len(check.at(budget, arm)))})
    caption = "Mean ± standard deviation over the seeds; gains by the first loss that compares, judged per check."
    bases = dict.fromkeys(basis for check in checks for basis in bases_of(check, check.measures))
    return table_of(rows, " ".join([caption, *bases]), ("budget", "model", "gain", "judgement"))


def _values(results: ExperimentValues, measures: Sequence[str], arm: Arm, budget: str) -> dict[str, str]:
    """Return measure → mean ± standard deviation of an arm, and the distance of minimal pairs from chance.

    Undefined fine-tuning runs, which count as 0, are numbered, and so are the seeds if some have no value. Empty if
    nothing is measured.
    """
    runs, cells = list(results.at(budget, arm).values()), {}
    beside = results.baseline if results.at(budget, results.baseline) else results.arms_at(budget)[0]
    last_loss = [name for name in measures if name in LOSSES][-1:]
    for measure in measures:
        values = results.of(measure, arm, budget, beside)
        undefined = sum(run.tasks.get(measure, {}).get("undefined", 0) for run in runs)
        cells[measure] = format_spread(measure, values)
        cells[measure] += f" ({undefined} undefined)" * bool(values and undefined)
        cells[measure] += f" ({len(values)} of {len(runs)} seeds)" * bool(values and len(values) < len(runs))
        if [measure] == last_loss and (times := times_on_plateau(results.at(budget, arm))):
            left = sum(left for _, left in times)
            cells["median onset [million tokens] (left)"] = f"{format_median(times, 2)} ({left}/{len(times)})"
    if not any(cells.values()):
        return {}
    above = above_chance(runs) if MINIMAL_PAIRS in measures else None
    return cells | {ABOVE_CHANCE: "" if above is None else f"{above:+.1f}"}


def above_chance(runs: Sequence[RunRow]) -> float | None:
    """Return (accuracy − 50 %) of minimal pairs in standard errors over pairs; None if these are not known.

    The runs score the same pairs, so the error of their mean is at most the mean of their errors, which counts here.
    """
    scored = [run for run in runs if MINIMAL_PAIRS in run.values]
    errors = [standard_error(list(r.paradigms.values()), [r.pairs.get(p, 0) for p in r.paradigms]) for r in scored]
    known = [error for error in errors if error]
    if not known or len(known) < len(errors):
        return None
    return (statistics.fmean(run.values[MINIMAL_PAIRS] for run in scored) - CHANCE) / statistics.fmean(known)


def cost_table(results: ExperimentValues) -> Table:
    """Return the table of seconds per step, also relative to the baseline, with two columns per budget."""
    rows: dict[str, dict[str, str]] = {}
    for (budget, tokens), arm in itertools.product(results.budgets.items(), results.arms):
        own, base = (results.of(STEP_SECONDS, one, budget) for one in (arm, results.baseline))
        if not own or arm.half:
            continue
        ratio = pair_by_seed(own, base, relative=True)
        cell = f"{1 + ratio.mean:.3f}" if ratio and arm != results.baseline else ""
        if cell and ratio and ratio.interval:
            cell += " ({:.3f} to {:.3f})".format(*(1 + end for end in ratio.interval))
        where = f", {format_budget(budget, tokens)}" * (len(results.budgets) > 1)
        row = rows.setdefault(arm.label, {"model": arm.label})
        row |= {
            f"seconds per step{where}": f"{statistics.fmean(own.values()):.4f}",
            f"÷ {results.baseline.label}{where}": cell,
        }
    caption = "Median over a run's steps without its first tenth, mean over the seeds; ratios with 95 % over seeds."
    return table_of(list(rows.values()), caption)


def throughput_table(runs: Sequence[RunRow]) -> Table:
    """Return the table of tokens per second at inference and memory; a model's last measurement counts."""
    timed: dict[tuple[str, Any], Mapping[str, Any]] = {}
    for run in runs:
        timed |= {(label, one["length"]): one for label, found in run.throughput.items() for one in found}
    rows = [
        {
            "model": label,
            "row length": f"{length:,.0f}",
            "tokens/s": f"{one['tokens_per_second']:,.0f}",
            "quartiles": f"{one['lower_quartile']:,.0f} to {one['upper_quartile']:,.0f}",
            "MiB": "" if one["memory_bytes"] is None else f"{one['memory_bytes'] / 2**20:,.0f}",
        }
        for (label, length), one in timed.items()
    ]
    return table_of(rows, "Forward passes at inference: median and quartiles, and peak memory minus the loaded model.")


def paper_table() -> Table:
    """Return the paper's tables 1 to 3."""
    caption = "The paper's own numbers, not ours: base size, best grid point, median of 5 seeds."
    return Table(["the paper's model", *PAPER_TASKS, "average of 8"], paper_rows(), caption, is_paper=True)
