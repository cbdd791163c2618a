"""Rows of runs, as `megatron-ddrp compare` writes them: one JSON line per run with all its measures."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megatron_ddrp.errors import UserError
from megatron_ddrp.tasks.jobs.store import Row, Store

Points = tuple[tuple[float, ...], ...]
"""Points of a curve: consumed tokens, then one value or several."""


class Arm(NamedTuple):
    """A model at the full or half budget."""

    name: str
    encoding: str
    objective: str
    flags: tuple[tuple[str, str], ...]
    """Further flags of the model in the order of their names, with values as text."""
    half: bool = False

    @classmethod
    def of(cls, name: str, encoding: str, objective: str, flags: Mapping[str, Any], half: bool = False) -> Arm:
        """Return the arm of a model with these flags, of whatever type their values are."""
        texts = sorted((flag.replace("-", "_"), _text(value)) for flag, value in flags.items())
        return cls(name, encoding, objective, tuple(texts), half)

    @property
    def label(self) -> str:
        """Name in tables."""
        return f"{self.name}, half the budget" if self.half else self.name

    @property
    def is_plain(self) -> bool:
        """True for a model without further flags at the full budget."""
        return not self.flags and not self.half

    @property
    def objective_name(self) -> str:
        """Name of the objective in sentences; MTH without one of its terms is "TCD alone" or "HCD alone"."""
        without = {"hcd_weight": "TCD alone", "tcd_weight": "HCD alone"}
        names = [without[flag] for flag, value in self.flags if flag in without and value == "0"]
        is_one_term = self.objective == "mth" and len(names) == len(self.flags) == 1
        return names[0] if is_one_term else {"mlm": "MLM", "mth": "MTH"}.get(self.objective, self.objective)


@dataclass(frozen=True)
class Facts:
    """Circumstances of a run; 0 or empty if the row does not tell."""

    budget: str
    """Budget of the rung in words."""
    baseline: str
    """Name of the model to compare the others with."""
    steps: int
    parameters: int
    common: Mapping[str, Any]
    """Flags of all models of the plan."""
    hardware: str
    versions: Mapping[str, str]
    workers: int
    """Largest number of runs that shared the machine."""
    seconds: float
    """Time of training and of all measures."""


@dataclass(frozen=True)
class Run:
    """One row: a finished training run with its measures."""

    name: str
    arm: Arm
    seed: int
    rung: int
    """Planned tokens of the rung. An arm at half the budget trains for half of them."""
    tokens: int
    """Tokens that the run consumed."""
    check: str
    """Name of a side experiment; empty for a run of the ladder."""
    values: Mapping[str, float]
    """Measure → finite value."""
    undefined: tuple[str, ...]
    """Measures whose value is not finite, which JSON has as null."""
    curve: Points
    """Pairs of consumed tokens and training masked-LM loss."""
    similarity: Points
    """Triples of consumed tokens, f(S) and f(H)."""
    paradigms: Mapping[str, float]
    """Paradigm of minimal pairs → accuracy."""
    pairs: Mapping[str, int]
    """Paradigm of minimal pairs → number of its pairs; empty if they are unknown."""
    fields: Mapping[str, float]
    """Field of minimal pairs → accuracy."""
    facts: Facts


def read_runs(paths: Sequence[Path], rank: Callable[[Row], int] = lambda row: 1) -> list[Run]:
    """Return the runs of some files in the order of their rows.

    Of the rows of a run, that with the highest rank counts, of equal ones the last. Rows of rank 0 are left out.

    Raises:
        UserError: a file is missing or empty or has a damaged line, or two runs claim the same place.
    """
    found: dict[str, tuple[int, Row]] = {}
    for path in paths:
        if not path.is_file():
            raise UserError(f"{path}: no such file; give the rows.jsonl that megatron-ddrp compare writes")
        store = Store(path, lambda row: str(row["run"]), "a row of a run", _checked, on_damage=_refuse)
        for row in store:
            number = rank(row)
            if number and number >= found.get(row["run"], (0, row))[0]:
                found[row["run"]] = (number, row)
    if not found:
        raise UserError(f"no row in {', '.join(map(str, paths))}; train a run of the plan first")
    runs = [as_run(row) for _, row in found.values()]
    _check_places(runs)
    return runs


def as_run(row: Mapping[str, Any]) -> Run:
    """Return a row as a run. Raises KeyError, TypeError or ValueError for another object."""
    half = bool(row.get("half", False))
    arm = Arm.of(row["model"], row["encoding"], row["objective"], row.get("flags", {}), half)
    values = {str(name): math.nan if value is None else float(value) for name, value in row["values"].items()}
    finite = {name: value for name, value in values.items() if math.isfinite(value)}
    return Run(
        name=str(row["run"]),
        arm=arm,
        seed=int(row["seed"]),
        rung=int(row["planned_tokens"]),
        tokens=int(row["tokens"]),
        check=row.get("check", ""),
        values=finite,
        undefined=tuple(name for name in values if name not in finite),
        curve=_points(row.get("curve", ()), 2),
        similarity=_points(row.get("similarity", ()), 3),
        paradigms={name: float(value) for name, value in row.get("paradigms", {}).items()},
        pairs=_pairs(row),
        fields={name: float(value) for name, value in row.get("fields", {}).items()},
        facts=_facts(row),
    )


def _facts(row: Mapping[str, Any]) -> Facts:
    return Facts(
        budget=str(row.get("budget") or f"{int(row['planned_tokens']):,} tokens"),
        baseline=str(row.get("baseline") or ""),
        steps=int(row.get("steps") or 0),
        parameters=int(row.get("parameters") or 0),
        common=dict(row.get("common") or {}),
        hardware=str(row.get("hardware") or ""),
        versions={name: str(version) for name, version in (row.get("versions") or {}).items()},
        workers=int(row.get("workers") or 1),
        seconds=float(row.get("seconds") or 0.0),
    )


def _checked(row: dict[str, Any]) -> dict[str, Any]:
    try:
        as_run(row)
    except AttributeError as error:  # a list where an object should be
        raise TypeError(str(error)) from None
    return row


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def _pairs(row: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of pairs by paradigm; in a row one number stands for all paradigms."""
    pairs = row.get("pairs", 0)
    by_paradigm = pairs if isinstance(pairs, dict) else dict.fromkeys(row.get("paradigms", {}), pairs)
    return {str(name): int(count) for name, count in by_paradigm.items() if count}


def _points(points: Iterable[Sequence[float]], size: int) -> Points:
    """Return the points whose values are all finite. Raises `ValueError` for a point without `size` values."""
    found = [tuple(map(float, point)) for point in points]
    if any(len(point) != size for point in found):
        raise ValueError(f"expected points of {size} values")
    return tuple(point for point in found if all(map(math.isfinite, point)))


def _refuse(sentence: str) -> None:
    raise UserError(f"{sentence}; delete this line, and let megatron-ddrp compare write it again")


def _check_places(runs: Sequence[Run]) -> None:
    """Check that no two runs have the same model, seed and rung, and that a name means one model, of one size."""
    places: dict[tuple[object, ...], Run] = {}
    models: dict[tuple[str, str], Arm] = {}
    sizes: dict[tuple[object, ...], Run] = {}
    for run in runs:
        place = (run.check, run.arm.label, run.seed, run.rung)
        other = places.setdefault(place, run)
        if other is not run:
            raise UserError(
                f"two runs of {run.arm.label}, seed {run.seed}, {run.rung:,} tokens: {other.name} and {run.name}"
                f"{_different(other, run)}; delete the row of one"
            )
        first = models.setdefault((run.check, run.arm.name), run.arm)
        if first._replace(half=run.arm.half) != run.arm:
            raise UserError(
                f"two models are called {run.arm.name!r}: {_description(first)} and {_description(run.arm)}; give each "
                "model of the plans its own name"
            )
        if not run.facts.parameters:
            continue
        like = sizes.setdefault((run.check, run.arm.label, run.rung), run)
        if like.facts.parameters != run.facts.parameters:
            raise UserError(
                f"the runs {like.name} and {run.name} of {run.arm.label}, {run.rung:,} tokens, have "
                f"{like.facts.parameters:,} and {run.facts.parameters:,} parameters: they are not one model; delete "
                "the rows of one, or give it another name"
            )


def _different(first: Run, second: Run) -> str:
    """Return the names of the common flags in which two runs differ, in words; empty if there are none."""
    flags, others = first.facts.common, second.facts.common
    names = [name for name in {**flags, **others} if flags.get(name) != others.get(name)]
    return f", which differ in {', '.join(names)}" if names else ""


def _description(arm: Arm) -> str:
    flags = ", ".join(f"{name} {value}" for name, value in arm.flags)
    return " ".join(filter(None, [arm.encoding, arm.objective, f"({flags})" if flags else ""]))
