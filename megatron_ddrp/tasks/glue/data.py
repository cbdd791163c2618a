"""GLUE's TSV files → examples → padded batches.

Reading checks everything before any training starts and says which file, which line and what was expected. Pairs are
`[CLS] a [SEP] b [SEP]` with segments 0 and 1; a row that is too long loses pieces from the end of its longer side.
Batches hold rows of similar length, so that little of them is padding; their order is a pure function of
(seed, epoch), and in evaluation every example comes exactly once.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron_ddrp.data.batches.batch import IGNORED_LABEL, Batch
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer
from megatron_ddrp.errors import UserError
from megatron_ddrp.tasks.glue.tasks import Task

_ROWS_TO_SORT = 64
"""Batches' worth of shuffled rows that are sorted by length together before they are cut into batches."""


class GlueDataError(UserError):
    """A task's files are not as the official release has them; the message names file, line and expectation."""


class Example(NamedTuple):
    """One labelled row of a file."""

    texts: tuple[str, ...]
    label: float


class TaskData(NamedTuple):
    """The files of one task, read."""

    task: Task
    train: list[Example]
    dev: dict[str, list[Example]]
    """By the development file's name without its ending, the scoring one first."""
    digest: str
    """Changes when any byte of the files changes."""


@dataclass(frozen=True)
class Encoded:
    """Rows ready to be padded: piece ids, segment ids, targets; one entry an example, in the file's order."""

    pieces: list[list[int]]
    segments: list[list[int]]
    targets: np.ndarray
    """`[examples]`: class numbers (int64), or floats of a regression; nan in a test set."""
    pad_id: int

    def __len__(self) -> int:
        return len(self.pieces)


def read_task(task: Task, data_dir: Path) -> TaskData:
    """Read and check train.tsv and the development files of `data_dir/task.name`.

    Raises:
        GlueDataError: a file is missing, truncated, empty, not UTF-8, or has a wrong column or label.
    """
    folder = data_dir / task.name
    names = ("train.tsv", *task.dev_files)
    for name in names:
        if not (folder / name).is_file():
            raise GlueDataError(
                f"{folder / name}: no such file; {task.name} needs {', '.join(names)} of the GLUE release in {folder}"
            )
    digest = hashlib.sha256()
    for name in names:
        digest.update((folder / name).read_bytes())
    train = read_examples(task, folder / "train.tsv", task.broken_rows)
    dev = {Path(name).stem: read_examples(task, folder / name) for name in task.dev_files}
    return TaskData(task, train, dev, digest.hexdigest())


def read_test(task: Task, data_dir: Path) -> dict[str, list[Example]]:
    """Read the task's test sets; return them by their names in a submission. Their labels are nan.

    Raises:
        GlueDataError: a file is missing or not as released. The diagnostic set is left out where it is not there.
    """
    found = {}
    for file, name in task.submission_files.items():
        path = data_dir / task.name / file
        if not path.is_file():
            if file.startswith(".."):
                continue
            raise GlueDataError(f"{path}: no such file; --predict-test needs the test sets of the GLUE release")
        found[name] = read_examples(task, path, labelled=False)
    return found


def read_examples(task: Task, path: Path, broken_rows: int = 0, labelled: bool = True) -> list[Example]:
    """Read the rows of one file; at most `broken_rows` of them may lack columns and are left out.

    Without `labelled` the file is a test set, which always has a header line, and the labels are nan.
    """
    lines = _read_lines(path)
    wanted = (*task.text_columns, task.label_column) if labelled else task.text_columns
    has_header = not labelled or task.columns is None
    columns = _header(path, lines, wanted) if has_header else task.columns or ()
    texts_at = [columns.index(name) for name in task.text_columns]

    examples: list[Example] = []
    skipped = 0
    for number, line in enumerate(lines[has_header:], 1 + has_header):
        cells = line.split("\t")
        if len(cells) != len(columns):
            skipped += 1
            if skipped <= broken_rows:
                continue
            raise GlueDataError(
                f"{path}, line {number}: {len(cells)} columns, expected {len(columns)} ({', '.join(columns)}); "
                "the file is truncated or not tab-separated"
            )
        label = math.nan
        if labelled:
            label = _parse_label(task, cells[columns.index(task.label_column)], f"{path}, line {number}")
        examples.append(Example(tuple(cells[index] for index in texts_at), label))
    if not examples:
        raise GlueDataError(f"{path}: no examples, expected at least one {'labelled ' * labelled}row")
    return examples


def _header(path: Path, lines: list[str], wanted: Sequence[str]) -> tuple[str, ...]:
    header = tuple(lines[0].split("\t")) if lines else ()
    if missing := [name for name in wanted if name not in header]:
        raise GlueDataError(
            f"{path}, line 1: no column {missing[0]!r} among {list(header)}; expected a tab-separated header line "
            f"with {', '.join(map(repr, wanted))}"
        )
    return header


def _read_lines(path: Path) -> list[str]:
    raw = path.read_bytes()
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise GlueDataError(f"{path}, line {line}: not valid UTF-8 ({error.reason}), expected UTF-8 text") from None
    # Not str.splitlines: U+0085, U+2028 and their kin are text.
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    return lines[:-1] if lines[-1] == "" else lines


def _parse_label(task: Task, text: str, where: str) -> float:
    if task.labels:
        if text not in task.labels:
            raise GlueDataError(f"{where}: label {text!r}, expected one of {', '.join(task.labels)}")
        return task.labels.index(text)
    assert task.label_range is not None
    lowest, highest = task.label_range
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not lowest <= value <= highest:
        raise GlueDataError(f"{where}: label {text!r}, expected a number from {lowest:g} to {highest:g}")
    return value


def encode(
    task: Task, examples: Sequence[Example], tokenizer: Tokenizer, max_length: int, pair_separators: int = 1
) -> Encoded:
    """Return pieces and segments of each example, cut to `max_length` with the special tokens.

    `pair_separators` stand between the two texts of a pair: 2 in the RoBERTa family.
    """
    pieces: list[list[int]] = []
    segments: list[list[int]] = []
    encoded_sides = [
        tokenizer.encode_batch(texts) for texts in zip(*(example.texts for example in examples), strict=True)
    ]
    for row_sides in zip(*encoded_sides, strict=True):
        sides = [list(side) for side in row_sides]
        between = pair_separators - 1 if len(sides) > 1 else 0
        truncate(sides, max_length - 1 - len(sides) - between)
        row, row_segments = [tokenizer.cls_id], [0]
        for segment, side in enumerate(sides):
            ends = 1 + (between if segment == 0 else 0)
            row += [*side, *[tokenizer.sep_id] * ends]
            row_segments += [segment] * (len(side) + ends)
        pieces.append(row)
        segments.append(row_segments)
    targets = np.array([example.label for example in examples], dtype=np.float64)
    if not task.is_regression and not np.isnan(targets).any():
        targets = targets.astype(np.int64)
    return Encoded(pieces, segments, targets, tokenizer.pad_id)


def truncate(sides: list[list[int]], budget: int) -> None:
    """Drop last pieces of the longer side (the later one of equals), in place, until `budget` pieces are left."""
    while sum(map(len, sides)) > budget:
        longest = max(reversed(sides), key=len)
        longest.pop()


def train_order(encoded: Encoded, batch_size: int, seed: int, epoch: int) -> list[np.ndarray]:
    """Return batches of row numbers for one epoch: all rows once, shuffled, rows of similar length together."""
    random = np.random.default_rng([seed, epoch])
    lengths = np.array([len(row) for row in encoded.pieces])
    shuffled = random.permutation(len(encoded))
    pool = batch_size * _ROWS_TO_SORT
    pools = [shuffled[start : start + pool] for start in range(0, len(shuffled), pool)]
    rows = np.concatenate([part[np.argsort(lengths[part], kind="stable")] for part in pools])
    batches = [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]
    return [batches[index] for index in random.permutation(len(batches))]


def dev_order(encoded: Encoded, batch_size: int) -> list[np.ndarray]:
    """Return batches of row numbers, every row exactly once, by length."""
    rows = np.argsort([len(row) for row in encoded.pieces], kind="stable")
    return [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]


def pad_batch(encoded: Encoded, rows: np.ndarray) -> Batch:
    """Return the named rows as one Batch `[batch, longest row]`; nothing in it is masked."""
    lengths = np.array([len(encoded.pieces[row]) for row in rows])
    positions = np.arange(lengths.max())
    valid = positions < lengths[:, None]  # [batch, seq]
    shape = valid.shape
    input_ids = np.full(shape, encoded.pad_id, dtype=np.int64)
    segment_ids = np.zeros(shape, dtype=np.int64)
    input_ids[valid] = np.concatenate([encoded.pieces[row] for row in rows])
    segment_ids[valid] = np.concatenate([encoded.segments[row] for row in rows])
    return Batch(
        input_ids=input_ids,
        labels=np.full(shape, IGNORED_LABEL, dtype=np.int64),
        document_ids=valid.astype(np.int64),
        position_ids=np.where(valid, positions, 0),
        segment_ids=segment_ids,
        sequence_ids=np.where(valid, np.asarray(rows)[:, None], 0),
    )
