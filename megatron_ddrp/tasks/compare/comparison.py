"""Differences of all models to the baseline under each measure, with intervals over seeds and over items."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from megatron_ddrp.data.progress import tracked
from megatron_ddrp.tasks.compare.items import Interval
from megatron_ddrp.tasks.compare.results import Results
from megatron_ddrp.tasks.ladder.measures import GLUE, LOSS, MINIMAL_PAIRS
from megatron_ddrp.tasks.ladder.rows import Arm
from megatron_ddrp.tasks.statistics import Difference, Spread, paired, spread


class Compared(NamedTuple):
    """Values of one model under one measure, compared with the baseline."""

    measure: str
    arm: Arm
    values: Spread
    """Values of the model, one per seed."""
    difference: Difference | None
    """This model − the baseline at each common seed; None for the baseline and without a common seed."""
    over_items: Interval | None
    """95 % interval of the mean difference from resampling test items; None if nothing is stored per item."""


def measures(results: Results) -> list[str]:
    """Return the measures of the plan's comparison, in the order of the table."""
    plan = results.plan
    pairs = [MINIMAL_PAIRS] if plan.minimal_pairs else []
    return [LOSS, *pairs, *(task.name for task in plan.tasks), *([GLUE] if results.averaged else [])]


def compare_all(results: Results) -> dict[str, list[Compared]]:
    """Return measure → models with a value, for the measures of the table and then for GLUE's single tasks."""
    tasks = results.plan.glue.tasks if results.plan.glue else ()
    every = (*measures(results), *tasks)
    return {measure: compare(results, measure) for measure in tracked(every, "measure", "resampling items")}


def compare(results: Results, measure: str) -> list[Compared]:
    """Return the models that have a value of the measure, in the plan's order."""
    found = []
    for arm in results.arms:
        if values := spread(results.of(measure, arm)):
            difference, over_items = None, None
            if arm != results.baseline:
                difference = paired(results.of(measure, arm), results.of(measure, results.baseline))
                over_items = _over_items(results, measure, arm)
            found.append(Compared(measure, arm, values, difference, over_items))
    return found


def _over_items(results: Results, measure: str, arm: Arm) -> Interval | None:
    seeds = sorted(results.of(measure, arm).keys() & results.of(measure, results.baseline).keys())
    if measure == MINIMAL_PAIRS:
        return results.items.of_pairs(arm, results.baseline, seeds)
    return results.items.of_tasks(_tasks(results, measure), arm, results.baseline, seeds)


def _tasks(results: Results, measure: str) -> Collection[str]:
    """Return the tasks whose rows make up a measure."""
    if measure == GLUE:
        return results.averaged
    return [measure] if measure != LOSS else []


def count_items(results: Results, measure: str) -> str:
    """Return the number of test items of a measure, in words; empty if they are not counted."""
    if measure == MINIMAL_PAIRS:
        pairs, paradigms = results.items.count_pairs()
        return f"{pairs:,} pairs, {paradigms} paradigm{'s' * (paradigms > 1)}" if pairs else ""
    rows = results.items.count_rows(_tasks(results, measure))
    return f"{rows:,} rows" if rows else ""


def as_json(results: Results, compared: dict[str, list[Compared]]) -> list[dict[str, Any]]:
    """Return the result of `compare_all` as JSON values."""
    return [
        {
            "measure": row.measure,
            "model": row.arm.label,
            "mean": row.values.mean,
            "deviation": row.values.deviation,
            "baseline": results.baseline.label,
            "difference": row.difference.mean if row.difference else None,
            "over_seeds": row.difference.interval if row.difference else None,
            "over_items": row.over_items,
            "seeds": len(row.difference.values if row.difference else row.values.values),
            "items": count_items(results, row.measure),
        }
        for rows in compared.values()
        for row in rows
    ]
