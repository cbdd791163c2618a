"""Facts about runs that no table shows: flags, sizes, versions, hardware, values that are not finite."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ddrp.config import flag_words
from megatron_ddrp.tasks.compare.rows import Run


def facts(runs: Sequence[Run]) -> list[str]:
    """Return one sentence per fact about some runs."""
    names = list(dict.fromkeys(name for run in runs for name in run.common))
    values = {name: dict.fromkeys(str(run.common.get(name, "not given")) for run in runs) for name in names}
    shared = [(name, runs[0].common[name]) for name in names if len(values[name]) == 1]
    lines = [f"Flags of every run: `{' '.join(flag_words(shared))}`."] * bool(shared)
    lines += [_difference(name, list(values[name]), runs) for name in names if len(values[name]) > 1]
    examples = {f"{name} {one['train_examples']:,} and {one['dev_examples']:,}" for run in runs
                for name, one in run.tasks.items() if {"train_examples", "dev_examples"} <= one.keys()}  # fmt: skip
    lines += [f"Examples for training and for scores: {', '.join(sorted(examples))}."] * bool(examples)
    lines += [f"Hardware: {line}." for line in dict.fromkeys(run.hardware for run in runs) if line]
    versions = dict.fromkeys(", ".join(map(" ".join, run.versions.items())) for run in runs)
    lines += [f"Versions: {line}." for line in versions if line]
    if (workers := max((run.workers for run in runs), default=1)) > 1:
        lines.append(f"Up to {workers} jobs shared the machine, so the times of steps are no benchmark.")
    undefined = [f"{', '.join(run.undefined)} of {run.run}" for run in runs if run.undefined]
    return lines + [f"Values that are not finite are left out: {'; '.join(undefined)}."] * bool(undefined)


def _difference(name: str, values: Sequence[str], runs: Sequence[Run]) -> str:
    """Return a sentence about a flag that differs: the budgets of each value, with the seeds or models it belongs to.

    Where all models of a seed have one value, it names the seeds: then no paired difference comes from the flag.
    """
    parts = []
    for value in values:
        own = [run for run in runs if str(run.common.get(name, "not given")) == value]
        others = [run for run in runs if run not in own]
        places = []
        for budget in dict.fromkeys(run.budget for run in own):
            here, rest = ([run for run in some if run.budget == budget] for some in (own, others))
            seeds = {run.seed for run in here}
            by_seed = f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, sorted(seeds)))}"
            models = ", ".join(dict.fromkeys(run.arm.label for run in here))
            which = by_seed if seeds.isdisjoint(run.seed for run in rest) else models
            places.append(f"{budget} ({which})" if rest else budget)
        parts.append(f"{value} at {', '.join(places)}")
    return f"Flag that differs: `--{name.replace('_', '-')}` is {'; '.join(parts)}."
