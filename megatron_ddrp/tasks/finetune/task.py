"""A task with its labels, its metric and its examples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError
from megatron_ddrp.tasks.finetune.table_files import KnownFile


@dataclass(frozen=True)
class Task:
    """Facts about a task that tables, prediction files and heads need."""

    name: str
    metric: str
    """Name among the kind's `metrics`."""
    kind: str = "classification"
    """Name in `kinds.KINDS`."""
    labels: tuple[str, ...] = ()
    """Names of the labels in the order of the class numbers; empty for kinds that predict numbers or answers."""

    @property
    def facts(self) -> dict[str, Any]:
        """JSON form of the task; `Task.of` reads it."""
        return {"name": self.name, "metric": self.metric, "kind": self.kind, "labels": list(self.labels)}

    def most_frequent(self, counts: Mapping[str, int]) -> int:
        """Return the number of the label with the largest of the `counts` by label; the first of equal ones."""
        return max(range(len(self.labels)), key=lambda number: counts.get(self.labels[number], 0))

    @classmethod
    def of(cls, facts: dict[str, Any]) -> Task:
        """Return the task with these `facts`. Raises KeyError or TypeError for invalid facts."""
        return cls(facts["name"], facts["metric"], facts["kind"], tuple(facts["labels"]))


class Example(NamedTuple):
    """One row of a file."""

    texts: tuple[str, ...]
    """One text or a pair; the words of a sentence; question and context."""
    label: Any
    """Class number or number, nan in a test set; other kinds document their own labels."""


class Examples:
    """Rows of a file in its order. Every pass reads them from the file again, so that they need no memory."""

    def __init__(self, read: Callable[[], Iterable[Example]], lengths: np.ndarray):
        """Keep `read`, which starts a pass, and `lengths`, the number of characters per row, `[rows]`."""
        self._read, self.lengths = read, lengths

    @classmethod
    def of(cls, rows: Sequence[Example]) -> Examples:
        """Return examples whose rows are in memory."""
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
    """Columns of a file that a task reads."""

    text: str
    pair: str | None
    """Column of the second text of a pair."""
    label: str

    def check_distinct(self) -> None:
        """Raise `UserError` for a column with two uses, such as a label that is the text as well."""
        flags = {"--text-column": self.text, "--text-pair-column": self.pair, "--label-column": self.label}
        used: dict[str | None, str] = {None: ""}
        for flag, column in flags.items():
            if column and column in used:
                raise UserError(
                    f"column {column!r} is {used[column]} and {flag} at once, expected different columns; name another "
                    "by one of the two flags",
                    WRONG_ARGUMENTS,
                )
            used[column] = flag


class TaskData(NamedTuple):
    """Checked files of one task."""

    task: Task
    train: Examples
    dev: dict[str, Examples]
    """Name of a development file without its ending → its examples; the first file gives the score."""
    digest: str
    """Hash of all bytes of the files and all settings of the task."""
    facts: tuple[str, ...] = ()
    """Sentences about the data, shown in the plan."""
    columns: Columns | None = None
    """Columns of a user's own task; None for GLUE."""
    baseline: float | None = None
    """Score of always predicting the most frequent label."""
    unlabelled: KnownFile | None = None
    """Test file without labels of a user's own task, to be predicted."""
    tests: Mapping[str, Examples] = MappingProxyType({})
    """Name of a test set of GLUE in a submission → its examples, if they are to be predicted."""

    @property
    def fingerprint(self) -> str:
        """First 16 digits of the digest, recorded in runs and kept models."""
        return self.digest[:16]
