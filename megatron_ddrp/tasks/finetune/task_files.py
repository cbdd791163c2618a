"""Reader of the files of a user's own task.

Each file is read twice: first to check it before training starts, then to make the model's rows. Only lengths and
labels stay in memory, a few bytes per row. A file that has changed in between is refused.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import re
import unicodedata
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ddrp.config import registry
from megatron_ddrp.data.preprocess.inputs import InputFile, is_stream
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError, shown_names
from megatron_ddrp.tasks.finetune.kinds import KINDS
from megatron_ddrp.tasks.finetune.kinds.contract import PREDICTION, Kind
from megatron_ddrp.tasks.finetune.options import TaskFiles
from megatron_ddrp.tasks.finetune.table_files import (
    Columns,
    Example,
    Examples,
    FileRow,
    KnownFile,
    Task,
    TaskData,
    at_row,
    columns_of,
    read_rows,
)

_LOOKED_AT = 1000
"""Number of rows that decide the kind of a task without --kind."""
SHOWN_LABELS = 10
_NUMBER = re.compile(r"[+-]?(\d+\.?|\d*\.\d+)(e[+-]?\d{1,3})?", re.ASCII | re.IGNORECASE)
_QUOTED = re.compile(r'"(?:[^"]|"")*""(?:[^"]|"")*"', re.DOTALL)
"""Text as a program quotes it: in quotation marks, with doubled ones inside."""


def read_task(files: TaskFiles) -> TaskData:
    """Read and check the files of a task. A test file without the column of labels is to be predicted, not scored.

    Raises:
        UserError: a file, a column or a label is missing or wrong; the message names file and line.
    """
    files.require()
    assert files.train is not None and files.valid is not None
    for path in filter(None, (files.train, files.valid, files.test)):
        if is_stream(str(path)):
            raise UserError(f"{path}: a pipe, but training reads its files several times; write it to the disk first")
    known = columns_of(str(files.train))
    kind = KINDS[files.kind] if files.kind else _likely_kind(files, known)
    columns = _columns(files, known, kind)
    train = _Reading(files.train, kind, columns)
    task = Task(files.task_name, files.metric or next(iter(kind.metrics)), kind.name, _sort_labels(train.counts))
    with _at_file(files.train):
        kind.check_labels(task, is_guessed=files.kind is None)
    kind.check_metric(task.metric, task.labels)
    dev = {"valid": _Reading(files.valid, kind, columns, task)}
    unlabelled, to_predict = [], None
    if files.test is not None:
        if columns.label in (found := columns_of(str(files.test))):
            dev["test"] = _Reading(files.test, kind, columns, task)
        else:
            to_predict = KnownFile.of(files.test)
            count = count_unlabelled(to_predict, kind, columns)
            missing = f"no column {columns.label!r}, it has {shown_names(found)}"
            unlabelled.append(f"test: {count:,} rows without labels, to be predicted ({missing})")
    baseline = kind.baseline(task, train.counts, kind.answers(task, dev["valid"].labels))
    told_anew = [scheme for scheme in [kind.scheme(task)] if scheme not in ("", "IOB2")]  # earlier versions knew one
    code = [*registry.KINDS.code(kind.name), *registry.METRICS.code(task.metric)]
    digest = hashlib.sha256(json.dumps([task.facts, list(columns), *told_anew, *code]).encode())
    for reading in (train, *dev.values()):
        digest.update(reading.file.digest)
    with _at_file(files.valid):
        remarks = list(kind.remarks(task, {name: reading.labels for name, reading in dev.items()}))
    return TaskData(
        task,
        train.examples(task),
        {name: reading.examples(task) for name, reading in dev.items()},
        digest.hexdigest(),
        (*_facts(task, columns, train, dev, baseline), *_hints(files, kind, train, dev), *remarks, *unlabelled),
        columns,
        baseline,
        to_predict,
    )


@contextmanager
def _at_file(path: Path) -> Iterator[None]:
    """Turn a ValueError of the block into a `UserError` that names a file."""
    try:
        yield
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None


@dataclass
class _Reading:
    """Counts, lengths and labels of a checked file."""

    path: Path
    kind: Kind
    columns: Columns
    task: Task | None = None
    """Task whose labels the file must have; None for the training file, which defines them."""
    counts: Counter[str] = field(default_factory=Counter)
    """Number of rows per label, or of words per tag."""
    labels: list[Any] = field(default_factory=list)
    """Labels of the rows; empty for the training file."""
    quoted: int = 0
    """Number of rows of a .tsv with a text in quotation marks that doubles the marks inside."""

    def __post_init__(self) -> None:
        self.file = KnownFile.of(self.path)
        self.lengths = array("q")
        is_tsv = InputFile(str(self.path), str(self.path)).ending == ".tsv"
        for row in self._rows():
            cell = row.cells[self.columns.label]
            with at_row(row):
                texts = self.kind.texts(row.cells, self.columns)
                names = self.kind.label_names(cell)
                self.kind.check(texts, cell)
                if self.task is not None:
                    self.labels.append(self.kind.label(cell, self.task))
            self.counts.update(names)
            self.quoted += is_tsv and any(map(_QUOTED.fullmatch, texts))
            self.lengths.append(sum(map(len, texts)))

    def _rows(self) -> Iterator[FileRow]:
        return self.file.rows([name for name in self.columns if name])

    def examples(self, task: Task) -> Examples:
        """Return the rows as examples of the task."""

        def read() -> Iterable[Example]:
            for row in self._rows():
                cell = row.cells[self.columns.label]
                yield Example(self.kind.texts(row.cells, self.columns), self.kind.label(cell, task))

        return Examples(read, np.frombuffer(self.lengths, np.int64))


def _usual_labels() -> list[str]:
    """Return the usual names of the column of labels, of all kinds."""
    return list(
        dict.fromkeys(name for kind in KINDS.values() for name in (kind.usual_columns.label, *kind.label_columns))
    )


def _likely_kind(files: TaskFiles, known: Sequence[str]) -> Kind:
    """Guess the kind from the columns and from the labels of the first rows."""
    label = files.label_column or next((name for name in _usual_labels() if name in known), None)

    @functools.cache
    def cells() -> list[Any]:
        if label is None or label not in known:  # finding the columns then raises an error that names the flag
            return []
        return [row.cells.get(label) for row in itertools.islice(read_rows(str(files.train), None), _LOOKED_AT)]

    return next(kind for kind in reversed([*KINDS.values()]) if kind.is_likely(known, cells))


def _columns(files: TaskFiles, known: Sequence[str], kind: Kind) -> Columns:
    """Return the columns to read: those named by flags, else usual ones that the file has."""

    def find(given: str | None, usual: Sequence[str], flag: str) -> str:
        if given is not None:
            return given  # if the file lacks it, reading raises an error with the file's columns
        for name in usual:
            if name in known:
                return name
        raise UserError(
            f"{files.train}: its columns are {shown_names(known)}, and none of them has a usual name "
            f"({', '.join(dict.fromkeys(usual))}); name the column to read by {flag}",
            WRONG_ARGUMENTS,
        )

    texts = [name for own in (kind, *KINDS.values()) for name in (own.usual_columns.text, *own.text_columns)]
    text = find(files.text_column, texts, "--text-column")
    labels = [kind.usual_columns.label, *kind.label_columns, *_usual_labels()]
    label = find(files.label_column, labels, "--label-column")
    pair = files.text_pair_column or kind.usual_columns.pair
    if pair is None and files.text_column is None:
        pair = next((name for name in kind.pair_columns.get(text, ()) if name in known), None)
    columns = Columns(text, pair, label)
    columns.check_distinct()
    return columns


def _sort_labels(counts: Counter[str]) -> tuple[str, ...]:
    """Return the labels sorted by name, or by number if all of them are numbers, such as 10, +1 or 1.0."""
    is_number = all(_NUMBER.fullmatch(name) for name in counts)
    return tuple(sorted(counts, key=lambda name: (Decimal(name if is_number else 0), name)))


def _facts(
    task: Task, columns: Columns, train: _Reading, dev: dict[str, _Reading], baseline: float | None
) -> Iterator[str]:
    """Yield sentences about the data for the plan."""
    read = " + ".join(filter(None, (columns.text, columns.pair)))
    kind = KINDS[task.kind]
    scheme = f" ({kind.scheme(task)})" if kind.scheme(task) else ""
    yield f"{task.kind}, {kind.score_name(task)}{scheme}; text from {read}, label from {columns.label}"
    for name, reading in {"train": train, **dev}.items():
        if task.labels:
            few = ", ".join(f"{label} {reading.counts[label]:,}" for label in task.labels[:SHOWN_LABELS])
            more = len(task.labels) - SHOWN_LABELS
            yield f"{name}: {few}" + (f" and {more} more labels" if more > 0 else "")
    alike: dict[str, list[str]] = {}
    for label in task.labels:
        alike.setdefault(unicodedata.normalize("NFC", label).strip(), []).append(label)
    for same in alike.values():
        if len(same) > 1:
            told = ", ".join(map(ascii, same))
            yield f"WARNING, labels that differ only in blanks or Unicode form are different classes: {told}"
    if baseline is not None:
        yield f"score of always the most frequent label: {100 * baseline:.2f}"


def _hints(files: TaskFiles, kind: Kind, train: _Reading, dev: dict[str, _Reading]) -> Iterator[str]:
    """Yield warnings about files that are as another program writes them, or are there twice."""
    seen = {train.file.digest: "train"}
    for name, reading in dev.items():
        if (same := seen.setdefault(reading.file.digest, name)) != name:
            yield f"{name}: WARNING, the same file as {same}; its score says nothing about new rows"
    for name, reading in {"train": train, **dev}.items():
        if reading.quoted:
            yield (
                f"{name}: WARNING, {reading.quoted:,} rows have texts in quotation marks with doubled marks inside; in "
                ".tsv they are text; save the file as .csv if a program has added them"
            )
    if files.kind is None and kind.predicts_numbers and all(float(label).is_integer() for label in dev["valid"].labels):
        yield f"valid: all labels are whole numbers; if they are classes, name another --kind than {kind.name}"


def text_columns(columns: Columns) -> list[str]:
    """Return the columns that a row without a label must have."""
    return [name for name in (columns.text, columns.pair) if name]


def texts_to_predict(row: FileRow, kind: Kind, columns: Columns) -> tuple[str, ...]:
    """Return the texts of a row.

    Raises:
        UserError: a cell holds no text, or the row has a column of predictions already.
    """
    with at_row(row):
        texts = kind.texts(row.cells, columns)
    if PREDICTION in row.cells:
        raise UserError(f"{row.where}: there is a column {PREDICTION!r} already; rename it")
    return texts


def count_unlabelled(file: KnownFile, kind: Kind, columns: Columns) -> int:
    """Read a file that is to be predicted and return its number of rows.

    Raises:
        UserError: a row cannot be predicted; the message names file and line.
    """
    count = 0
    for row in file.rows(text_columns(columns)):
        texts_to_predict(row, kind, columns)
        count += 1
    return count
