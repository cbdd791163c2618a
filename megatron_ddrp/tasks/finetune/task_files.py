"""Reader of the files of a user's own task.

Each file is read twice: first to check it before training starts, then to make the model's rows. Only lengths and
labels stay in memory, a few bytes per row. A file that has changed in between is refused.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import unicodedata
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ddrp.data.preprocess.inputs import is_stream
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError
from megatron_ddrp.tasks.finetune.entities import SCHEMES, STRICT, prefix_groups, rules, scheme_of
from megatron_ddrp.tasks.finetune.kinds import KINDS
from megatron_ddrp.tasks.finetune.kinds.contract import Kind
from megatron_ddrp.tasks.finetune.known_files import KnownFile
from megatron_ddrp.tasks.finetune.metrics import METRICS, check_metric
from megatron_ddrp.tasks.finetune.table_files import Row, blamed_on, columns_of, read_rows
from megatron_ddrp.tasks.finetune.task import Columns, Example, Examples, Task, TaskData
from megatron_ddrp.tasks.finetune.task_options import TaskFiles
from megatron_ddrp.tasks.finetune.unlabelled import count_unlabelled

_LOOKED_AT = 1000
"""Number of rows that decide the kind of a task without --kind."""
SHOWN_LABELS = 10


TEXT_COLUMNS = ("text", "sentence", "sentence1", "premise", "question", "tokens")
PAIR_COLUMNS = {"sentence1": "sentence2", "premise": "hypothesis", "text": "text_pair", "question": "context"}
LABEL_COLUMNS = ("label", "labels", "score", "target", "tags", "ner_tags", "answers")


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
    kind_name = files.kind or _likely_kind(files, known)
    kind, columns = KINDS[kind_name], _columns(files, known, KINDS[kind_name])
    metric = files.metric or next(iter(METRICS[kind_name]))
    train = _Reading(files.train, kind, columns)
    labels = _ordered(train.counts)
    _check_labels(files, kind_name, metric, labels)
    task = Task(files.called, metric, kind_name, labels)
    dev = {"valid": _Reading(files.valid, kind, columns, task)}
    unlabelled, to_predict = [], None
    if files.test is not None:
        if columns.label in (found := columns_of(str(files.test))):
            dev["test"] = _Reading(files.test, kind, columns, task)
        else:
            to_predict = KnownFile.of(files.test)
            count = count_unlabelled(to_predict, kind, columns)
            missing = f"no column {columns.label!r}, it has {', '.join(found)}"
            unlabelled.append(f"test: {count:,} rows without labels, to be predicted ({missing})")
    baseline = kind.baseline(task, train.counts, dev["valid"].labels)
    scheme = scheme_of(labels) if metric == STRICT else "IOB2"
    told_anew = [] if scheme == "IOB2" else [scheme]  # earlier versions scored all tags as IOB2
    digest = hashlib.sha256(json.dumps([task.facts, list(columns), *told_anew]).encode())
    for reading in (train, *dev.values()):
        digest.update(reading.file.digest)
    return TaskData(
        task,
        train.examples(task),
        {name: reading.examples(task) for name, reading in dev.items()},
        digest.hexdigest(),
        (*_facts(task, columns, train, dev, baseline), *_stray_tags(files, task, dev), *unlabelled),
        columns,
        baseline,
        to_predict,
    )


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

    def __post_init__(self) -> None:
        self.file = KnownFile.of(self.path)
        self.lengths = array("q")
        for row in self._rows():
            cell = row.cells[self.columns.label]
            with blamed_on(row):
                texts = self.kind.texts(row.cells, self.columns)
                names = self.kind.label_names(cell)
                self.kind.check(texts, cell)
                if self.task is not None:
                    self.labels.append(self.kind.label(cell, self.task))
            self.counts.update(names)
            self.lengths.append(sum(map(len, texts)))

    def _rows(self) -> Iterator[Row]:
        return self.file.rows([name for name in self.columns if name])

    def examples(self, task: Task) -> Examples:
        """Return the rows as examples of the task."""

        def read() -> Iterable[Example]:
            for row in self._rows():
                cell = row.cells[self.columns.label]
                yield Example(self.kind.texts(row.cells, self.columns), self.kind.label(cell, task))

        return Examples(read, np.frombuffer(self.lengths, np.int64))


def _likely_kind(files: TaskFiles, known: Sequence[str]) -> str:
    """Guess the kind from the columns and from the labels of the first rows."""
    label = files.label_column or next((name for name in LABEL_COLUMNS if name in known), None)
    if {"tokens", "tags"} <= set(known):
        return "tokens"
    if {"context", "answers"} <= set(known):
        return "qa"
    if label is None or label not in known:
        return "classification"  # finding its columns then raises an error that names the flag
    cells = [row.cells.get(label) for row in itertools.islice(read_rows(str(files.train)), _LOOKED_AT)]
    if all(isinstance(cell, list) for cell in cells):
        return "multi-label"
    if any(_is_fraction(cell) for cell in cells) and all(_is_number(cell) for cell in cells):
        return "regression"
    return "classification"


def _is_number(cell: Any) -> bool:
    try:
        float(cell)
    except (TypeError, ValueError):
        return False
    return not isinstance(cell, bool)


def _is_fraction(cell: Any) -> bool:
    return isinstance(cell, float) or (isinstance(cell, str) and "." in cell and _is_number(cell))


def _columns(files: TaskFiles, known: Sequence[str], kind: Kind) -> Columns:
    """Return the columns to read: those named by flags, else usual ones that the file has."""

    def find(given: str | None, usual: Sequence[str], flag: str) -> str:
        if given is not None:
            return given  # if the file lacks it, reading raises an error with the file's columns
        for name in usual:
            if name in known:
                return name
        raise UserError(
            f"{files.train}: its columns are {', '.join(known)}, and none of them has a usual name "
            f"({', '.join(dict.fromkeys(usual))}); name the column to read by {flag}",
            WRONG_ARGUMENTS,
        )

    text = find(files.text_column, (kind.usual_columns.text, *TEXT_COLUMNS), "--text-column")
    label = find(files.label_column, (kind.usual_columns.label, *LABEL_COLUMNS), "--label-column")
    pair = files.text_pair_column or kind.usual_columns.pair
    if pair is None and files.text_column is None and PAIR_COLUMNS.get(text) in known:
        pair = PAIR_COLUMNS[text]
    columns = Columns(text, pair, label)
    columns.check_distinct()
    return columns


def _ordered(counts: Counter[str]) -> tuple[str, ...]:
    """Return the labels sorted by name, or by number if all of them are whole numbers."""
    is_whole = all(re.fullmatch(r"-?\d+", name) for name in counts)
    return tuple(sorted(counts, key=int if is_whole else str))  # type: ignore[arg-type]


def _check_labels(files: TaskFiles, kind: str, metric: str, labels: tuple[str, ...]) -> None:
    if kind == "classification" and len(labels) < 2:
        raise UserError(f"{files.train}: all rows have the label {labels[0]!r}, expected two labels or more")
    if files.kind is None and kind == "classification" and all(re.fullmatch(r"-?\d+,\d+", name) for name in labels):
        raise UserError(
            f"{files.train}: labels look like numbers with a decimal comma, such as {labels[0]}; write "
            f"{labels[0].replace(',', '.')}, or name the kind by --kind classification"
        )
    if kind == "multi-label" and not labels:
        raise UserError(f"{files.train}: no row has a label, expected one label or more")
    check_metric(metric, kind, len(labels))
    if metric.startswith("seqeval"):
        try:
            rules(labels, metric == STRICT)
        except ValueError as error:
            raise UserError(f"{files.train}: {error}") from None


def _stray_tags(files: TaskFiles, task: Task, dev: dict[str, _Reading]) -> Iterator[str]:
    """Yield a warning for each file with tags that the strict rules count as O.

    Raises `UserError` for validation tags of IOB1 or IOE1, whose prefixes are those of IOB2 or IOE2.
    """
    if task.metric != STRICT:
        return
    name = scheme_of(task.labels)
    other, alike = SCHEMES[name].alike
    for file, reading in dev.items():
        groups = prefix_groups([task.labels[int(number)] for number in row] for row in reading.labels)
        broken = [prefixes for prefixes in groups if not re.fullmatch(SCHEMES[name].entities, prefixes)]
        if file == "valid" and groups and all(re.fullmatch(alike, prefixes) for prefixes in groups):
            raise UserError(
                f"{files.valid}: its tags are of {other}, for which --metric {STRICT} is not defined; use --metric "
                f"seqeval, or write them as {name}"
            )
        if broken:
            yield (
                f"{file}: WARNING, {len(broken):,} of {len(groups):,} groups of neighbouring tags of one type break "
                f"the rules of {name}, such as {' '.join(f'{prefix}-' for prefix in broken[0][:SHOWN_LABELS])}; their "
                "tags outside whole entities count as O"
            )


def _facts(
    task: Task, columns: Columns, train: _Reading, dev: dict[str, _Reading], baseline: float | None
) -> Iterator[str]:
    """Yield sentences about the data for the plan."""
    read = " + ".join(filter(None, (columns.text, columns.pair)))
    scheme = f" ({scheme_of(task.labels)})" if task.metric == STRICT else ""
    yield f"{task.kind}, {task.score_name}{scheme}; text from {read}, label from {columns.label}"
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
    for name, reading in dev.items():
        if reading.file.digest == train.file.digest:
            yield f"{name}: WARNING, the same file as train; its score says nothing about new rows"
    if baseline is not None:
        yield f"score of always the most frequent label: {100 * baseline:.2f}"
