"""GLUE tasks, one row each: files, columns, labels and metric, in the layout of the official TSV release.

Tabs alone separate cells: quotation marks are text, also QQP's doubled ones. Files have a header line except CoLA's
train.tsv and dev.tsv; MRPC's begin with a byte-order mark. The first development file gives a task's score. The labels
are in alphabetical order, which fixes the class numbers.

Numbers and comparisons of the DDRP+MTH paper (base size). Tables show its numbers apart from our own.
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
        GlueTask(name="RTE", labels=_ENTAILMENT, dev_examples=277),
        GlueTask(
            name="STS-B",
            metric="pearson",
            kind="regression",
            labels=(),
            label_column="score",
            label_range=(0.0, 5.0),
            dev_examples=1500,
        ),
        GlueTask(name="MRPC", text_columns=("#1 String", "#2 String"), label_column="Quality", dev_examples=408),
        GlueTask(
            name="CoLA",
            metric="matthews",
            text_columns=("sentence",),
            columns=("source", "label", "star", "sentence"),
            dev_examples=1043,
        ),
        GlueTask(name="SST-2", text_columns=("sentence",), dev_examples=872),
        GlueTask(name="QNLI", labels=_ENTAILMENT, text_columns=("question", "sentence"), dev_examples=5463),
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
        GlueTask(name="WNLI", dev_examples=71, in_average=False),
    )
}
"""Tasks by name, in the order of the paper's tables; WNLI, which is in no average, comes last."""

PAPER_TASKS = tuple(name for name, task in TASKS.items() if task.in_average)


def averaged_tasks(scores: Collection[Mapping[str, float]]) -> list[str]:
    """Return the tasks of an average that all of `scores` (task → score) have, so that all averages are comparable."""
    return [task for task in PAPER_TASKS if scores and all(task in found for found in scores)]


PAPER_ROWS: tuple[tuple[str, tuple[float, ...], float], ...] = (
    ("BERT (MLM) 500k steps", (68.23, 88.92, 86.74, 57.05, 91.97, 90.41, 90.74, 83.41), 82.18),
    ("BERT (MTH) 500k steps", (71.84, 89.41, 86.76, 61.40, 92.08, 90.59, 90.76, 83.61), 83.31),
    ("BERT (MLM) 1M steps", (70.75, 89.66, 87.50, 59.65, 92.20, 91.23, 91.00, 84.33), 83.29),
    ("BERT-R (MLM) 1M steps", (71.84, 89.68, 87.99, 60.82, 92.66, 91.54, 91.13, 85.45), 83.89),
    ("TUPE (MLM) 1M steps", (68.59, 89.61, 86.02, 62.82, 92.66, 91.26, 91.04, 84.88), 83.36),
    ("DeBERTa (MLM) 1M steps", (73.28, 89.14, 87.99, 60.60, 92.66, 92.14, 91.00, 85.93), 84.09),
    ("DDRP (MLM) 1M steps", (72.20, 90.01, 88.25, 62.82, 92.41, 92.31, 91.24, 86.02), 84.41),
    ("BERT (MTH) 1M steps", (73.64, 90.16, 88.48, 62.31, 92.43, 91.21, 91.12, 84.67), 84.25),
    ("BERT (MTH without HCD) 1M steps", (73.28, 90.41, 87.25, 60.85, 92.23, 91.37, 91.00, 84.22), 83.83),
    ("DDRP (MTH) 1M steps", (75.09, 90.41, 88.72, 63.36, 92.66, 92.24, 91.22, 86.22), 85.00),
)
"""Rows of the paper's Tables 1 to 3: name, scores in the order of `PAPER_TASKS`, average of the eight as printed."""


def paper_rows() -> list[list[str]]:
    """Return a table row per row of `PAPER_ROWS`: the name, its scores and their average."""
    return [[name, *(f"{score:.2f}" for score in (*scores, average))] for name, scores, average in PAPER_ROWS]
