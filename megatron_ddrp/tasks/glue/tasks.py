"""GLUE tasks, one row each: files, columns, labels and metric, in the layout of the official TSV release.

Tabs alone separate cells: quotation marks are text, also QQP's doubled ones. Files have a header line except CoLA's
train.tsv and dev.tsv; MRPC's begin with a byte-order mark. The first development file gives a task's score. The labels
are in alphabetical order, which fixes the class numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from megatron_ddrp.tasks.finetune.task import Task


@dataclass(frozen=True, kw_only=True)
class GlueTask(Task):
    """Row of the table `TASKS`, which states what differs from most tasks."""

    metric: str = "accuracy"
    labels: tuple[str, ...] = ("0", "1")
    text_columns: tuple[str, ...] = ("sentence1", "sentence2")
    """Columns of one sentence or of a pair, in the order in which they are encoded."""
    label_column: str = "label"
    """Column of the label."""
    dev_examples: int
    """Number of rows of the official (first) development file."""
    label_range: tuple[float, float] | None = None
    """Lowest and highest label of a regression."""
    dev_files: tuple[str, ...] = ("dev.tsv",)
    """Development files; the first one gives the task's score."""
    columns: tuple[str, ...] | None = None
    """Columns of train.tsv and dev.tsv if these have no header line; None if they have one."""
    several_tests: dict[str, str] = field(default_factory=dict)
    """Test file → its name in a submission, for a task with other files than test.tsv."""
    broken_rows: int = 0
    """Number of rows of train.tsv that may lack columns and are left out: the official QQP file has a few."""
    in_average: bool = True
    """True if the paper's eight-column average counts the task."""

    @property
    def submission_files(self) -> dict[str, str]:
        """Test file → its name in a submission; a file may be in another task's folder."""
        return self.several_tests or {"test.tsv": f"{self.name}.tsv"}


_ENTAILMENT = ("entailment", "not_entailment")

TASKS: dict[str, GlueTask] = {
    task.name: task
    for task in (
        GlueTask(
            name="RTE",
            labels=_ENTAILMENT,
            dev_examples=277,
        ),
        GlueTask(
            name="STS-B",
            metric="pearson",
            kind="regression",
            labels=(),
            label_column="score",
            label_range=(0.0, 5.0),
            dev_examples=1500,
        ),
        GlueTask(
            name="MRPC",
            text_columns=("#1 String", "#2 String"),
            label_column="Quality",
            dev_examples=408,
        ),
        GlueTask(
            name="CoLA",
            metric="matthews",
            text_columns=("sentence",),
            columns=("source", "label", "star", "sentence"),
            dev_examples=1043,
        ),
        GlueTask(
            name="SST-2",
            text_columns=("sentence",),
            dev_examples=872,
        ),
        GlueTask(
            name="QNLI",
            labels=_ENTAILMENT,
            text_columns=("question", "sentence"),
            dev_examples=5463,
        ),
        GlueTask(
            name="QQP",
            text_columns=("question1", "question2"),
            label_column="is_duplicate",
            dev_examples=40430,
            broken_rows=10,
        ),
        GlueTask(
            name="MNLI",
            labels=("contradiction", "entailment", "neutral"),
            label_column="gold_label",
            dev_examples=9815,
            dev_files=("dev_matched.tsv", "dev_mismatched.tsv"),
            several_tests={
                "test_matched.tsv": "MNLI-m.tsv",
                "test_mismatched.tsv": "MNLI-mm.tsv",
                "../diagnostic/diagnostic.tsv": "AX.tsv",
            },
        ),
        GlueTask(
            name="WNLI",
            dev_examples=71,
            in_average=False,
        ),
    )
}
"""Tasks by name, in the order of the paper's tables; WNLI, which is in no average, comes last."""

PAPER_TASKS = tuple(name for name, task in TASKS.items() if task.in_average)


def averaged_tasks(scores: Collection[Mapping[str, float]]) -> list[str]:
    """Return the tasks of an average that all of `scores` (task → score) have, so that all averages are comparable."""
    return [task for task in PAPER_TASKS if scores and all(task in found for found in scores)]
