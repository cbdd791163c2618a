"""Suite of the GLUE tasks: files, two averages, the paper's scores, and the submission.

The reader of GLUE's TSV files checks everything before training starts; errors name file, line and expectation.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_ddrp.errors import UserError
from megatron_ddrp.foreign import refuse_stand_in
from megatron_ddrp.pages.markdown import Table
from megatron_ddrp.tasks.finetune.cells import Cell, Cells
from megatron_ddrp.tasks.finetune.suite import Suite
from megatron_ddrp.tasks.finetune.table_files import checked_rows, decode, tsv_rows
from megatron_ddrp.tasks.finetune.task import Example, Examples, Task, TaskData
from megatron_ddrp.tasks.glue.tasks import PAPER_TASKS, TASKS, GlueTask, paper_rows
from megatron_ddrp.tasks.jobs.store import Store


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
        found.append(Examples.of(read_examples(task, folder / name, raw, broken_rows)))
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
        found[name] = Examples.of(read_examples(task, path, path.read_bytes(), labelled=False))
    return found


def read_examples(task: GlueTask, path: Path, raw: bytes, broken_rows: int = 0, labelled: bool = True) -> list[Example]:
    """Return the rows of a file with the content `raw`, without up to `broken_rows` rows that lack columns.

    Without `labelled` the file is a test set; test sets always have a header line, and the labels become nan.
    """
    refuse_stand_in(raw, path)
    lines = decode(str(path), raw).removeprefix("\ufeff").removesuffix("\n").split("\n")
    header = task.columns or () if labelled else ()
    columns = (*task.text_columns, *[task.label_column] * labelled)
    return [
        Example(
            tuple(row.cells[name] for name in task.text_columns),
            _parse_label(task, row.cells[task.label_column], row.where) if labelled else math.nan,
        )
        for row in checked_rows(str(path), tsv_rows(str(path), lines, header, broken_rows), columns)
    ]


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


MISMATCHED = "dev_mismatched"
STARTED = ("RTE", "MRPC", "STS-B")
"""Tasks that --start-from-task starts from another task's model, as RoBERTa (arXiv:1907.11692) did from MNLI's."""


@dataclass(frozen=True)
class Glue(Suite):
    """Suite of the nine GLUE tasks.

    The tables have two averages, each shown only if all of its tasks are there: of 8 numbers, as the paper prints it,
    with MNLI as one number (the matched set), and of 9, with matched and mismatched as two. The paper's scores follow
    in a table of their own if a development set has the official size. All encoders get the same head, so that a
    comparison measures pre-training.
    """

    tasks: tuple[str, ...] = PAPER_TASKS
    data_dir: Path = Path()
    """Folder of the released files."""
    predict_test: bool = False
    """True to predict the test sets at the end."""
    start_from_task: str | None = None
    """Task from whose best model those in `STARTED` start, in a second stage."""
    made_from: Mapping[Path, str] = field(default_factory=dict)
    """Folder of an encoder of the second stage → fingerprint of the encoder that it was made from."""

    program = "megatron-ddrp glue"
    title = "GLUE development scores"
    about = (
        "Each score is the last epoch's at the best grid point, the median over seeds, x 100: Matthews' correlation "
        "for CoLA, Pearson's for STS-B, accuracy otherwise; MNLI is the matched set. The average of 8 is defined as in "
        "the DDRP+MTH paper. An undefined score (a constant guess, or training that diverged) counts as 0 and is "
        "marked."
    )
    head = "common"
    known = TASKS
    order = tuple(TASKS)
    averages = ("average of 8", "average of 9")

    @property
    def started(self) -> tuple[str, ...]:
        """Tasks of the second stage."""
        first = self.start_from_task
        return tuple(task for task in dict.fromkeys(self.tasks) if first and task in STARTED and task != first)

    def read(self) -> dict[str, TaskData]:
        """Read and check all files of this stage's tasks; with --predict-test the test sets too."""
        first = (self.start_from_task,) if self.start_from_task else ()
        tasks = [TASKS[name] for name in dict.fromkeys((*self.tasks, *first)) if name not in self.started]
        tests = {task.name: read_test(task, self.data_dir) for task in tasks} if self.predict_test else {}
        return {task.name: read_task(task, self.data_dir)._replace(tests=tests.get(task.name, {})) for task in tasks}

    def task(self, row: dict[str, Any]) -> Task:
        """Return the task of a line of runs.jsonl."""
        return TASKS[row["task"]]

    def next_stage(self, sweep: Any, store: Store) -> Any:
        """Return the options of the sweep over tasks that start from another task's best model; None without one."""
        from megatron_ddrp.tasks.finetune.saving import better_run, model_folder  # here, because it imports torch

        if self.start_from_task is None:
            return None
        before, data = sweep.options, sweep.data[self.start_from_task]
        task, output = data.task, before.output_dir
        made = {
            encoder.folder if before.machine.dry_run else model_folder(output, task, encoder, data.fingerprint): encoder
            for encoder in sweep.encoders.values()
        }
        for folder, encoder in made.items():
            if not before.machine.dry_run and (better := better_run(store, encoder, data, folder)):
                raise UserError(
                    f"--start-from-task {task.name}: the best run of {encoder.name}, {better}, kept no model in "
                    f"{folder}; delete its line in runs.jsonl to repeat it, or give another --output-dir"
                )
        names = {folder: f"{encoder.name}, from {task.name}" for folder, encoder in made.items()}
        made_from = {folder: encoder.fingerprint for folder, encoder in made.items()}
        started = replace(self, tasks=self.started, start_from_task=None, made_from=made_from)
        return replace(before, suite=started, load=tuple(names), names=names, random_init=False)

    def finish(self, sweep: Any, store: Store) -> list[str]:
        """Write the submissions if --predict-test is set; return lines that name them."""
        from megatron_ddrp.tasks.glue.submission import write_submissions  # here, because it imports torch

        return write_submissions(sweep, store, self.made_from) if self.predict_test else []

    def keeps_model(self, task: str) -> bool:
        """Return whether other tasks start from this task's best model."""
        return task == self.start_from_task

    def means(self, cells: Cells) -> dict[str, float | None]:
        """Return the two averages over the paper's tasks, each None if one of its scores is missing."""
        if not cells.keys() >= set(PAPER_TASKS):
            return dict.fromkeys(self.averages)
        eight = [cells[task].median for task in PAPER_TASKS]
        mismatched = cells["MNLI"].others.get(MISMATCHED)
        nine = None if mismatched is None else statistics.fmean([*eight, statistics.median(mismatched)])
        return dict(zip(self.averages, (statistics.fmean(eight), nine), strict=True))

    def official_size(self, task: str) -> int:
        """Return the number of rows of the released development file."""
        return TASKS[task].dev_examples

    def combined(self, cell: Cell) -> dict[str, list[float]]:
        """Return the mean of MNLI's two development files, one value per seed."""
        if MISMATCHED not in cell.others:
            return {}
        pairs = zip(cell.scores, cell.others[MISMATCHED], strict=True)
        return {f"{cell.task} (mean of both)": [statistics.fmean(pair) for pair in pairs]}

    def published_table(self, encoders: dict[str, Cells]) -> Table | None:
        """Return a table of the paper's scores if an encoder was scored on a development set of the official size."""
        is_official = any(
            task in PAPER_TASKS and cell.rows[0]["dev_examples"] == TASKS[task].dev_examples
            for cells in encoders.values()
            for task, cell in cells.items()
        )
        rows = [[f"{name} (paper)", *scores] for name, *scores in paper_rows()]
        return Table(["the paper's encoder", *PAPER_TASKS, self.averages[0]], rows) if is_official else None
