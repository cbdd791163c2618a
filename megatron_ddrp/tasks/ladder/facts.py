"""Facts about the runs of a ladder that no table shows: flags, versions, hardware, values that are not finite."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import starmap
from typing import Any

from megatron_ddrp.config import flag_words
from megatron_ddrp.tasks.ladder.ladder import Ladder
from megatron_ddrp.tasks.ladder.rows import Run


def facts(ladder: Ladder) -> list[str]:
    """Return one sentence per fact."""
    runs = ladder.runs
    if not runs:
        return []
    shared = _shared(runs)
    lines = [f"Flags of every run: `{' '.join(flag_words(shared.items()))}`."] if shared else []
    lines += [_difference(name, runs) for name in _flags(runs) if name not in shared]
    versions = dict.fromkeys(", ".join(map(" ".join, run.facts.versions.items())) for run in runs)
    lines += [f"Versions: {line}." for line in versions if line]
    lines += [f"Hardware: {line}." for line in dict.fromkeys(run.facts.hardware for run in runs) if line]
    workers = max(run.facts.workers for run in runs)
    if workers > 1:
        lines.append(
            f"Up to {workers} runs shared the machine, so their times are no benchmark: `benchmarks/step.py` "
            "measures steps alone."
        )
    return lines + not_finite(runs)


def not_finite(runs: Sequence[Run]) -> list[str]:
    """Return a sentence about the values that are not finite; none without such values."""
    left_out = [f"{', '.join(run.undefined)} of {run.name}" for run in runs if run.undefined]
    return [f"Values that are not finite are left out: {'; '.join(left_out)}."] if left_out else []


def _flags(runs: Sequence[Run]) -> list[str]:
    """Return the names of all common flags."""
    return list(dict.fromkeys(name for run in runs for name in run.facts.common))


def _shared(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the common flags with the same value in all runs."""
    first, *others = [run.facts.common for run in runs]
    return {name: value for name, value in first.items() if all(other.get(name) == value for other in others)}


def _difference(name: str, runs: Sequence[Run]) -> str:
    """Return a sentence about a flag whose value differs between runs, with the rungs of each value.

    Where it differs within a rung, but all models of a seed have one value, the sentence names the seeds: no paired
    difference comes from the flag. Otherwise it names the models, whose differences may come from it.
    """
    found: dict[str, dict[int, list[Run]]] = {}  # value → rung → runs
    for run in runs:
        value = str(run.facts.common.get(name, "not given"))
        found.setdefault(value, {}).setdefault(run.rung, []).append(run)

    def place(rung: int, own: Sequence[Run]) -> str:
        values = [rungs[rung] for rungs in found.values() if rung in rungs]
        if len(values) == 1:
            return f"{rung:,}"
        seeds = Counter(seed for of_value in values for seed in {run.seed for run in of_value})
        if max(seeds.values()) == 1:
            of_value = sorted({run.seed for run in own})
            return f"{rung:,} (seed{'s' * (len(of_value) > 1)} {', '.join(map(str, of_value))})"
        return f"{rung:,} ({', '.join(dict.fromkeys(run.arm.label for run in own))})"

    values = [f"{value} at {', '.join(starmap(place, rungs.items()))} tokens" for value, rungs in found.items()]
    return f"Flag that differs: `--{name.replace('_', '-')}` is {'; '.join(values)}."
