"""Ladder of budgets: which arms ran on which rung, and their values by seed."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from megatron_ddrp.config import ENCODINGS
from megatron_ddrp.tasks.glue.tasks import averaged_tasks
from megatron_ddrp.tasks.ladder.measures import GLUE, INSIDE, LOSS, MINIMAL_PAIRS, NO_MEASURES
from megatron_ddrp.tasks.ladder.phenomena import phenomenon
from megatron_ddrp.tasks.ladder.rows import Arm, Run
from megatron_ddrp.tasks.statistics import BySeed


class Ladder:
    """Runs without a check, or those of one check."""

    def __init__(self, runs: Sequence[Run], check: str = ""):
        self.check = check
        self.runs = [run for run in runs if run.check == check]
        self.rungs = sorted({run.rung for run in self.runs})
        """Planned tokens of the rungs, in growing order."""

    @property
    def is_one_budget(self) -> bool:
        """True for one rung, which then needs no name."""
        return len(self.rungs) == 1

    @cached_property
    def baseline(self) -> Arm:
        """Arm that the others are compared with: the rows' baseline if it ran, otherwise the first arm."""
        names = {run.facts.baseline for run in self.runs}
        arms = [run.arm for run in self.runs]
        return next((arm for arm in arms if arm.name in names and not arm.half), arms[0])

    @cached_property
    def arms(self) -> list[Arm]:
        """Arms in the order of tables: plain masked LM, its variants, plain MTH, its variants, other objectives.

        The arms of a check stand in the order of their rows.
        """
        found = list(dict.fromkeys(run.arm for run in self.runs))
        return found if self.check else sorted(found, key=self._place)

    def _place(self, arm: Arm) -> tuple[object, ...]:
        others = sorted({run.arm.objective for run in self.runs} - {"mlm", "mth"})
        objectives = ["mlm", "mth", *others]
        encodings = list(ENCODINGS)
        encoding = encodings.index(arm.encoding) if arm.encoding in encodings else len(encodings)
        return (arm.half, objectives.index(arm.objective), bool(arm.flags), encoding, arm.encoding, arm.name)

    @cached_property
    def averaged(self) -> list[str]:
        """Tasks of the GLUE average: those that all runs with an average have. Runs of other plans may have more."""
        return averaged_tasks([run.values for run in self.runs if GLUE in run.values])

    @cached_property
    def measures(self) -> list[str]:
        """Measures with a value: the loss, minimal pairs, tasks, the GLUE average, then those of the inside."""
        found = dict.fromkeys(
            [*(name for run in self.runs for name in run.values if name != GLUE), *[GLUE] * bool(self.averaged)]
        )
        tasks = [name for name in found if name not in (LOSS, MINIMAL_PAIRS, GLUE, *NO_MEASURES, *INSIDE)]
        return [name for name in (LOSS, MINIMAL_PAIRS, *tasks, GLUE, *INSIDE) if name in found]

    def on(self, rung: int, arm: Arm) -> dict[int, Run]:
        """Return seed → run of an arm on a rung."""
        return {run.seed: run for run in self.runs if (run.rung, run.arm) == (rung, arm)}

    def arms_on(self, rung: int) -> list[Arm]:
        """Return the arms with a run on a rung."""
        there = {run.arm for run in self.runs if run.rung == rung}
        return [arm for arm in self.arms if arm in there]

    def of(self, measure: str, arm: Arm, rung: int) -> BySeed:
        """Return seed → value of an arm on a rung; empty if nothing is measured.

        The GLUE average is computed here from the tasks that all runs share; the one in the rows may be of others.
        """
        parts = self.averaged if measure == GLUE else [measure]
        runs = {seed: run.values for seed, run in self.on(rung, arm).items()}
        return {
            seed: statistics.fmean(values[part] for part in parts)
            for seed, values in runs.items()
            if parts and all(part in values for part in parts)
        }

    def accuracies(self, arm: Arm, rung: int) -> Mapping[str, float]:
        """Return phenomenon of BLiMP → mean accuracy over its paradigms and the seeds, with "all" first.

        Fields take the place of phenomena if a row has a paradigm that BLiMP lacks. Empty without minimal pairs.
        """
        found = [
            (_by_phenomenon(run), run.values[MINIMAL_PAIRS]) for run in self.on(rung, arm).values() if _has_pairs(run)
        ]
        if not found:
            return {}
        groups = [group for group in found[0][0] if all(group in by_group for by_group, _ in found)]
        means = {
            group: statistics.fmean(by_group[group] for by_group, _ in found) for group in sorted(groups, key=str.lower)
        }
        return {"all": statistics.fmean(average for _, average in found)} | means


def check_ladder(runs: Sequence[Run], check: str) -> Ladder:
    """Return the ladder of a check. Runs of its baseline that have their rows elsewhere join it.

    They may belong to the main ladder or to another check, at the same rungs and seeds and with the same common flags:
    otherwise the flags, not the model, may have made the difference.
    """
    own = [run for run in runs if run.check == check]
    baselines, places = {run.facts.baseline for run in own}, [_setting(run) for run in own]
    shared = [
        replace(run, check=check)
        for run in runs
        if run.check != check and not run.arm.half and run.arm.name in baselines and _setting(run) in places
    ]
    return Ladder([*shared, *own], check)


def _setting(run: Run) -> tuple[object, ...]:
    return run.rung, run.seed, run.facts.common


def _has_pairs(run: Run) -> bool:
    return MINIMAL_PAIRS in run.values and bool(run.paradigms or run.fields)


def _by_phenomenon(run: Run) -> Mapping[str, float]:
    groups: dict[str, list[float]] = {}
    for uid, accuracy in run.paradigms.items():
        name = phenomenon(uid)
        if name is None:
            return run.fields
        groups.setdefault(name, []).append(accuracy)
    return {name: statistics.fmean(values) for name, values in groups.items()} or run.fields
