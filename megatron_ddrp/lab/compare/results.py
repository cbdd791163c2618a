"""Values of an experiment by budget, arm and seed, from its rows alone."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from operator import attrgetter

import numpy as np

from megatron_ddrp.config import ENCODINGS
from megatron_ddrp.errors import UserError
from megatron_ddrp.lab.compare.rows import Arm, RunRow
from megatron_ddrp.tasks.glue.tasks import averaged_tasks
from megatron_ddrp.tasks.measures import GLUE, INSIDE, LOSS, MINIMAL_PAIRS, NO_MEASURES, ONSET
from megatron_ddrp.tasks.statistics import BySeed

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
    for results in (Results(runs), *checks_of(runs)):
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


class Results:
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
