"""Rows: one JSON line per finished run. Tables, figures and results.json are made from rows and nothing else.

`TYPES` is the schema. A row of an earlier version is read too: it has `curve`, `validation` and
`similarity` for `curves`. What was measured per test item stands beside the rows, see `samples.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ddrp.errors import UserError
from megatron_ddrp.tasks.compare.arms import Arm
from megatron_ddrp.tasks.compare.samples import read_samples
from megatron_ddrp.tasks.jobs.store import Damaged, Row, Store, digest
from megatron_ddrp.tasks.measures import HEAD_SIMILARITY, LOSS, TOKEN_SIMILARITY, TRAINING_LOSS

Curve = Sequence[Sequence[float]]
"""Points (tokens, value)."""
Check = Callable[[Any], bool]
LARGEST = 1e15
"""Bound of all numbers of a row."""


def _number(value: Any, low: float = -LARGEST) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value < LARGEST


def _count(value: Any) -> bool:
    return isinstance(value, int) and _number(value, 0)


def _share(value: Any) -> bool:
    return _number(value, 0) and value <= 1


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _name(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _value(value: Any) -> bool:
    return value is None or _number(value)


def _setting(value: Any) -> bool:
    values = value if isinstance(value, list) else [value]
    return all(one is None or isinstance(one, str | bool) or _number(one) for one in values)


def _point(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(map(_number, value)) and value[0] >= 0


def _list(check: Check) -> Check:
    return lambda value: isinstance(value, list | tuple) and all(map(check, value))


def _object(check: Check) -> Check:
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


_NAME = ("some text that is not empty", _name)
_TEXT = ("some text", _text)
_COUNT = ("a whole number of at least 0", _count)
_FLAGS = ("an object of flags with text, finite numbers, true or false", _object(_setting))
_SHARES = ("an object of numbers from 0 to 1", _object(_share))
TYPES: dict[str, tuple[str, Check]] = {
    "run": _NAME, "model": _NAME, "encoding": _NAME, "objective": _NAME, "seed": _COUNT, "planned_tokens": _COUNT,
    "values": ("an object of finite numbers, with null for a value that is not finite", _object(_value)),
    "jobs": ("a list of names", _list(_name)), "flags": _FLAGS, "common": _FLAGS,
    "half": ("true or false", lambda value: isinstance(value, bool)),
    "budget": _TEXT, "check": _TEXT, "baseline": _TEXT, "hardware": _TEXT, "maps": _TEXT,
    "tokens": _COUNT, "steps": _COUNT, "parameters": _COUNT, "workers": _COUNT,
    "seconds": ("a number of at least 0", lambda value: _number(value, 0)),
    "versions": ("an object of text", _object(_text)),
    "curves": ("an object of lists of points [tokens, value] of finite numbers", _object(_list(_point))),
    "paradigms": _SHARES, "fields": _SHARES,
    "pairs": ("a whole number of at least 0, or an object of them", lambda v: _count(v) or _object(_count)(v)),
    "tasks": ("an object of objects of whole numbers", _object(_object(_count))),
    "throughput": ("an object of lists of objects of numbers", _object(_list(_object(_value)))),
}  # fmt: skip
"""Key of a row → what its value is, in words and as a check. docs/compare.md explains the keys."""
REQUIRED = ("run", "model", "encoding", "objective", "seed", "planned_tokens", "values")


@dataclass(frozen=True)
class Run:
    """One row: a finished training run with its measures. Whatever the row does not tell is 0 or empty."""

    run: str
    arm: Arm
    seed: int
    planned_tokens: int
    """Tokens of the budget. An arm at half the budget trains for half of them."""
    budget: str
    """Budget in words, which runs that are compared share."""
    values: Mapping[str, float]
    """Measure → finite value."""
    undefined: tuple[str, ...] = ()
    """Measures whose value is not finite, which JSON has as null."""
    check: str = ""
    """Side experiment that the run belongs to; empty for a run of the main one."""
    baseline: str = ""
    """Name of the model to compare the others with."""
    jobs: Sequence[str] = ()
    """Names of its jobs."""
    tokens: int = 0
    """Tokens that the run consumed."""
    steps: int = 0
    parameters: int = 0
    seconds: float = 0.0
    """Time of training and of all measures."""
    common: Mapping[str, Any] = field(default_factory=dict)
    """Flags of all models of the plan."""
    hardware: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    workers: int = 1
    """Number of jobs that shared the machine."""
    curves: Mapping[str, Curve] = field(default_factory=dict)
    """Measure → its curve over tokens."""
    paradigms: Mapping[str, float] = field(default_factory=dict)
    """Paradigm of minimal pairs → accuracy."""
    pairs: Mapping[str, int] = field(default_factory=dict)
    """Paradigm of minimal pairs → number of its pairs, if it is known."""
    fields: Mapping[str, float] = field(default_factory=dict)
    """Field of minimal pairs → accuracy."""
    tasks: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Task → train_examples, dev_examples and the number of undefined fine-tuning runs."""
    maps: str = ""
    """File of its attention maps, beside the rows."""
    throughput: Mapping[str, Sequence[Mapping[str, float | None]]] = field(default_factory=dict)
    """Name of each model that was timed with it → results by row length."""
    samples: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Measure → its value on each bootstrap sample of its test items; empty without their file."""


def as_run(row: Mapping[str, Any], folder: Path | None = None) -> Run:
    """Return a row as a run, with its samples if they stand in the folder. Raises `Damaged` for another object."""
    found = {key: value for key, value in _as_written_now(row).items() if value is not None and key in TYPES}
    for key, value in found.items():
        expected, fits = TYPES[key]
        if not fits(value):
            raise Damaged(f"{key}: got {repr(value)[:60]}, expected {expected}")
    if missing := [key for key in REQUIRED if key not in found]:
        raise Damaged(f"not a row of a run: {missing[0]} is missing")
    name, encoding, objective = (found.pop(key) for key in ("model", "encoding", "objective"))
    arm = Arm.of(name, encoding, objective, found.pop("flags", {}), found.pop("half", False))
    values, pairs = found.pop("values"), found.pop("pairs", {})
    pairs = pairs if isinstance(pairs, dict) else dict.fromkeys(found.get("paradigms", {}), pairs)
    found["budget"] = found.get("budget") or f"{found['planned_tokens']:,} tokens"
    return Run(
        arm=arm,
        values={name: float(value) for name, value in values.items() if value is not None},
        undefined=tuple(name for name, value in values.items() if value is None),
        pairs={name: count for name, count in pairs.items() if count},
        samples=read_samples(folder, row) if folder else {},
        **found,
    )


def _as_written_now(row: Mapping[str, Any]) -> Row:
    """Return a row of any version with the keys of this one."""
    found = dict(row)
    old = {name: found.pop(name, None) or [] for name in ("curve", "validation", "similarity")}
    if not any(old.values()):
        return found
    try:
        curves = {
            TRAINING_LOSS: old["curve"],
            LOSS: old["validation"],
            TOKEN_SIMILARITY: [[tokens, value] for tokens, value, _ in old["similarity"]],
            HEAD_SIMILARITY: [[tokens, value] for tokens, _, value in old["similarity"]],
        }
    except (TypeError, ValueError):
        raise Damaged("similarity: expected points [tokens, f(S), f(H)]") from None
    return found | {"curves": {name: points for name, points in curves.items() if points}}


def open_rows(path: Path) -> Store:
    """Open a file of rows. Raises `UserError` with the line that is damaged or has a value of a wrong type or range."""

    def check(row: Row) -> Row:
        as_run(row)
        return row

    def refuse(sentence: str) -> None:
        raise UserError(f"{sentence}; delete this line, and let megatron-ddrp compare write it again")

    return Store(path, lambda row: f"{row['run']} {digest(row.get('jobs', []))}", "a row of a run", check, refuse)


def read_rows(paths: Iterable[Path]) -> list[Run]:
    """Return the runs of some files; a later row of a run replaces an earlier one.

    Raises:
        UserError: a file is missing or empty or has a damaged line, or two runs claim the same place.
    """
    found: dict[str, Run] = {}
    for path in paths:
        if not path.is_file():
            raise UserError(f"{path}: no such file; give the rows.jsonl that megatron-ddrp compare writes")
        found |= {row["run"]: as_run(row, path.parent) for row in open_rows(path)}
    if not found:
        raise UserError(f"no row in {', '.join(map(str, paths))}; train a run of the plan first")
    return list(found.values())
