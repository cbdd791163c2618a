"""Reader of GLUE's TSV files. It checks everything before training starts; errors name file, line and expectation."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path

from megatron_ddrp.errors import UserError
from megatron_ddrp.tasks.finetune.table_files import check_distinct
from megatron_ddrp.tasks.finetune.task import Example, Examples, TaskData
from megatron_ddrp.tasks.glue.tasks import TASKS, GlueTask


def read_task(task: GlueTask, data_dir: Path) -> TaskData:
    """Read and check train.tsv and the development files of `data_dir/task.name`.

    Raises:
        UserError: a file is missing, truncated, empty, not UTF-8, or has a wrong column or label.
    """
    folder = data_dir / task.name
    names = _files(task)
    for name in names:
        if not (folder / name).is_file():
            raise UserError(
                f"{folder / name}: no such file; {task.name} needs {', '.join(names)} of the GLUE release in {folder}; "
                + _remedy(data_dir)
            )
    digest = hashlib.sha256()
    found = []
    for name in names:  # each file is read once, so that the digest is that of the rows
        raw = (folder / name).read_bytes()
        digest.update(raw)
        broken_rows = task.broken_rows if name == names[0] else 0
        found.append(Examples.of(_examples(task, folder / name, raw, broken_rows)))
    dev = dict(zip((Path(name).stem for name in task.dev_files), found[1:], strict=True))
    return TaskData(task, found[0], dev, digest.hexdigest())


def _files(task: GlueTask) -> tuple[str, ...]:
    return ("train.tsv", *task.dev_files)


def _complete(data_dir: Path) -> list[str]:
    """Return the names of the tasks whose training and development files are in `data_dir`."""
    return [
        task.name for task in TASKS.values() if all((data_dir / task.name / name).is_file() for name in _files(task))
    ]


def _remedy(data_dir: Path) -> str:
    """Return the advice for a task that `data_dir` lacks: the tasks it has, a folder nearby that has some, the site."""
    if tasks := _complete(data_dir):
        return f"complete there: --tasks {' '.join(tasks)}"
    for folder in (*sorted(data_dir.glob("*/")), data_dir.parent):
        if tasks := _complete(folder):
            return f"use --data-dir {folder}, which has {', '.join(tasks)}"
    return "get the files from gluebenchmark.com/tasks"


def read_test(task: GlueTask, data_dir: Path) -> dict[str, Examples]:
    """Read the task's test sets; return name in a submission → examples, whose labels are nan.

    A missing diagnostic set is left out.

    Raises:
        UserError: another file is missing, or a file is not as released.
    """
    found = {}
    for file, name in task.submission_files.items():
        path = data_dir / task.name / file
        if not path.is_file():
            if file.startswith(".."):
                continue
            raise UserError(f"{path}: no such file; --predict-test needs the test sets of the GLUE release")
        found[name] = Examples.of(read_examples(task, path, labelled=False))
    return found


def read_examples(task: GlueTask, path: Path, broken_rows: int = 0, labelled: bool = True) -> list[Example]:
    """Read the rows of one file; leave out up to `broken_rows` rows that lack columns.

    Without `labelled` the file is a test set; test sets always have a header line, and the labels become nan.
    """
    return _examples(task, path, path.read_bytes(), broken_rows, labelled)


def _examples(task: GlueTask, path: Path, raw: bytes, broken_rows: int = 0, labelled: bool = True) -> list[Example]:
    lines = _lines(path, raw)
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
            raise UserError(
                f"{path}, line {number}: {len(cells)} columns, expected {len(columns)} ({', '.join(columns)}); "
                "the file is truncated or not tab-separated"
            )
        label = math.nan
        if labelled:
            label = _parse_label(task, cells[columns.index(task.label_column)], f"{path}, line {number}")
        examples.append(Example(tuple(cells[index] for index in texts_at), label))
    if not examples:
        raise UserError(f"{path}: no examples, expected at least one {'labelled ' * labelled}row")
    return examples


def _header(path: Path, lines: list[str], wanted: Sequence[str]) -> tuple[str, ...]:
    header = tuple(lines[0].split("\t")) if lines else ()
    check_distinct(f"{path}, line 1", [name for name in header if name in wanted])
    if missing := [name for name in wanted if name not in header]:
        raise UserError(
            f"{path}, line 1: no column {missing[0]!r} among {list(header)}; expected a tab-separated header line "
            f"with {', '.join(map(repr, wanted))}"
        )
    return header


def _lines(path: Path, raw: bytes) -> list[str]:
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise UserError(f"{path}, line {line}: not valid UTF-8 ({error.reason}), expected UTF-8 text") from None
    # Not str.splitlines: U+0085, U+2028 and similar characters are text.
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    return lines[:-1] if lines[-1] == "" else lines


def _parse_label(task: GlueTask, text: str, where: str) -> float:
    if task.labels:
        if text not in task.labels:
            raise UserError(f"{where}: label {text!r}, expected one of {', '.join(task.labels)}")
        return task.labels.index(text)
    assert task.label_range is not None
    lowest, highest = task.label_range
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not lowest <= value <= highest:
        raise UserError(f"{where}: label {text!r}, expected a number from {lowest:g} to {highest:g}")
    return value
