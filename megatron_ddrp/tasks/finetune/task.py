"""A task: what is predicted, by which metric it is scored, and its examples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np


@dataclass(frozen=True)
class Task:
    """Facts on a task that tables, prediction files and heads need."""

    name: str
    metric: str
    """Name in `metrics.METRICS`."""
    kind: str = "classification"
    """Name in `kinds.KINDS`."""
    labels: tuple[str, ...] = ()
    """The labels as they are written, in the order of the class numbers; empty where numbers or answers are wanted."""

    @property
    def facts(self) -> dict[str, Any]:
        """The task as JSON values, which `Task.of` reads."""
        return {"name": self.name, "metric": self.metric, "kind": self.kind, "labels": list(self.labels)}

    @classmethod
    def of(cls, facts: dict[str, Any]) -> Task:
        """Return the task of `facts`. Raises KeyError or TypeError for what is none."""
        return cls(facts["name"], facts["metric"], facts["kind"], tuple(facts["labels"]))


class Example(NamedTuple):
    """One row of a file."""

    texts: tuple[str, ...]
    """One text or a pair; the words of a sentence; question and context."""
    label: Any
    """A class number or a number; nan in a test set. What further kinds put here, their files say."""


class Examples:
    """The rows of a file in its order. They are read anew at every pass, so that they need no memory."""

    def __init__(self, read: Callable[[], Iterable[Example]], lengths: np.ndarray):
        """`lengths` are the characters of each row, `[rows]`."""
        self._read, self.lengths = read, lengths

    @classmethod
    def of(cls, rows: Sequence[Example]) -> Examples:
        """Return rows that are in memory."""
        return cls(lambda: rows, np.array([sum(map(len, row.texts)) for row in rows], dtype=np.int64))

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[Example]:
        return iter(self._read())

    def only(self, rows: np.ndarray) -> Examples:
        """Return the rows with these numbers, in the file's order."""
        wanted = np.zeros(len(self), dtype=bool)
        wanted[rows] = True
        return Examples(lambda: (row for row, kept in zip(self, wanted, strict=True) if kept), self.lengths[wanted])


class Columns(NamedTuple):
    """The columns of a file that a task reads."""

    text: str
    pair: str | None
    """Column of the second text of a pair."""
    label: str


class TaskData(NamedTuple):
    """The files of one task, read and checked."""

    task: Task
    train: Examples
    dev: dict[str, Examples]
    """By the development file's name without its ending, the scoring one first."""
    digest: str
    """Changes when any byte of the files or any setting of the task changes."""
    facts: tuple[str, ...] = ()
    """Sentences about the data that the plan shows."""
    columns: Columns | None = None
    """The columns that were read, where a user named them."""
    baseline: float | None = None
    """Score of always predicting the most frequent label."""

    @property
    def fingerprint(self) -> str:
        """The part of the digest that runs and kept models carry."""
        return self.digest[:16]
