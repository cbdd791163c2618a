"""Suite of the GLUE tasks: files, two averages, the paper's scores, and the submission."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_ddrp.pages.markdown import Table
from megatron_ddrp.tasks.finetune.cells import Cell, Cells
from megatron_ddrp.tasks.finetune.suite import Suite
from megatron_ddrp.tasks.finetune.task import Task, TaskData
from megatron_ddrp.tasks.glue.data import read_task, read_test
from megatron_ddrp.tasks.glue.tasks import PAPER_AVERAGES, PAPER_SCORES, PAPER_TASKS, TASKS, paper_rows

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

    def published(self) -> dict[str, dict[str, float]]:
        """Return the paper's scores."""
        return {name: {**row, self.averages[0]: PAPER_AVERAGES[name]} for name, row in PAPER_SCORES.items()}

    def published_table(self, encoders: dict[str, Cells]) -> Table | None:
        """Return a table of the paper's scores if an encoder was scored on a development set of the official size."""
        is_official = any(
            task in PAPER_TASKS and cell.rows[0]["dev_examples"] == TASKS[task].dev_examples
            for cells in encoders.values()
            for task, cell in cells.items()
        )
        rows = [[f"{name} (paper)", *scores] for name, *scores in paper_rows(PAPER_SCORES)]
        return Table(["the paper's encoder", *PAPER_TASKS, self.averages[0]], rows) if is_official else None
