"""Facts about the runs of a ladder that no table shows: flags, versions, hardware, values that are not finite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_ddrp.tasks.compare.flags import words
from megatron_ddrp.tasks.ladder.ladder import Ladder


def facts(ladder: Ladder) -> list[str]:
    """Return one sentence per fact."""
    rows = [run.raw for run in ladder.runs]
    if not rows:
        return []
    shared = _shared(rows)
    lines = [f"Flags of every run: `{' '.join(words(shared.items()))}`."] if shared else []
    lines += [_difference(name, rows) for name in _flags(rows) if name not in shared]
    versions = dict.fromkeys(", ".join(map(" ".join, row.get("versions", {}).items())) for row in rows)
    lines += [f"Versions: {line}." for line in versions if line]
    lines += [f"Hardware: {line}." for line in dict.fromkeys(row.get("hardware") for row in rows) if line]
    workers = max(int(row.get("workers", 1)) for row in rows)
    if workers > 1:
        lines.append(
            f"Up to {workers} runs shared the machine, so the seconds of a step are no benchmark: `benchmarks/step.py` "
            "measures steps alone."
        )
    undefined = [f"{', '.join(sorted(run.undefined))} of {run.name}" for run in ladder.runs if run.undefined]
    if undefined:
        lines.append(f"Values that are not finite are left out: {'; '.join(undefined)}.")
    return lines


def _flags(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of all flags that rows call common."""
    return list(dict.fromkeys(name for row in rows for name in row.get("common", {})))


def _shared(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the common flags with the same value in all rows."""
    first, *others = [row.get("common", {}) for row in rows]
    return {name: value for name, value in first.items() if all(other.get(name) == value for other in others)}


def _difference(name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a sentence about a flag whose value differs between rows, with the rungs of each value."""
    rungs: dict[str, dict[int, None]] = {}
    for row in rows:
        value = str(row.get("common", {}).get(name, "not given"))
        rungs.setdefault(value, {})[int(row["planned_tokens"])] = None
    values = [f"{value} at {', '.join(f'{rung:,}' for rung in found)} tokens" for value, found in rungs.items()]
    return f"Flag that differs: `--{name.replace('_', '-')}` is {'; '.join(values)}."
