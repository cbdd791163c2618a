"""Facts about the runs of a ladder that no table shows: flags, versions, hardware, values that are not finite."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
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
    undefined = [f"{', '.join(run.undefined)} of {run.name}" for run in runs if run.undefined]
    if undefined:
        lines.append(f"Values that are not finite are left out: {'; '.join(undefined)}.")
    return lines


def _flags(runs: Sequence[Run]) -> list[str]:
    """Return the names of all common flags."""
    return list(dict.fromkeys(name for run in runs for name in run.facts.common))


def _shared(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the common flags with the same value in all runs."""
    first, *others = [run.facts.common for run in runs]
    return {name: value for name, value in first.items() if all(other.get(name) == value for other in others)}


def _difference(name: str, runs: Sequence[Run]) -> str:
    """Return a sentence about a flag whose value differs between runs, with the rungs of each value.

    Where it differs within a rung, the sentence names the models, because their differences may come from the flag.
    """
    models: dict[str, dict[int, dict[str, None]]] = {}  # value → rung → names
    for run in runs:
        value = str(run.facts.common.get(name, "not given"))
        models.setdefault(value, {}).setdefault(run.rung, {})[run.arm.label] = None
    uses = Counter(rung for rungs in models.values() for rung in rungs)

    def place(rung: int, names: Iterable[str]) -> str:
        return f"{rung:,} ({', '.join(names)})" if uses[rung] > 1 else f"{rung:,}"

    values = [f"{value} at {', '.join(starmap(place, rungs.items()))} tokens" for value, rungs in models.items()]
    return f"Flag that differs: `--{name.replace('_', '-')}` is {'; '.join(values)}."
