"""The GLUE tasks, one row each: files, columns, labels and metric, in the layout of the official TSV release.

Lines are split at tabs and nowhere else: a quotation mark is text, also QQP's doubled ones. Files have a header line
except CoLA's train.tsv and dev.tsv; MRPC's begin with a byte-order mark. The first development file gives a task's
score. The label order fixes the class numbers and is alphabetical.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_ddrp.tasks.finetune.task import Task


@dataclass(frozen=True, kw_only=True)
class GlueTask(Task):
    """One row of the table; `TASKS` holds them by name."""

    text_columns: tuple[str, ...]
    """Header names of one sentence or of a pair, in the order in which they are encoded."""
    label_column: str
    """Header name of the label."""
    dev_examples: int
    """Rows of the official (first) development file."""
    label_range: tuple[float, float] | None = None
    """Lowest and highest target of a regression."""
    dev_files: tuple[str, ...] = ("dev.tsv",)
    """Development files; the first one's score is the task's."""
    columns: tuple[str, ...] | None = None
    """Names of the columns of train.tsv and dev.tsv where these have no header line; None where they have one."""
    several_tests: dict[str, str] = field(default_factory=dict)
    """Test file → its name in a submission, where test.tsv is not the only one."""
    broken_rows: int = 0
    """Rows of train.tsv that may lack columns: the official QQP file has a few, and they are left out, not repaired."""
    in_average: bool = True
    """Whether the paper's eight-column average counts the task."""

    @property
    def submission_files(self) -> dict[str, str]:
        """Test file → its name in a submission; also test files that other tasks' data hold."""
        return self.several_tests or {"test.tsv": f"{self.name}.tsv"}


_BINARY = ("0", "1")
_ENTAILMENT = ("entailment", "not_entailment")
_SENTENCES = ("sentence1", "sentence2")

TASKS: dict[str, GlueTask] = {
    task.name: task
    for task in (
        GlueTask(
            name="RTE",
            metric="accuracy",
            labels=_ENTAILMENT,
            text_columns=_SENTENCES,
            label_column="label",
            dev_examples=277,
        ),
        GlueTask(
            name="STS-B",
            metric="pearson",
            kind="regression",
            text_columns=_SENTENCES,
            label_column="score",
            label_range=(0.0, 5.0),
            dev_examples=1500,
        ),
        GlueTask(
            name="MRPC",
            metric="accuracy",
            labels=_BINARY,
            text_columns=("#1 String", "#2 String"),
            label_column="Quality",
            dev_examples=408,
        ),
        GlueTask(
            name="CoLA",
            metric="matthews",
            labels=_BINARY,
            text_columns=("sentence",),
            label_column="label",
            columns=("source", "label", "star", "sentence"),
            dev_examples=1043,
        ),
        GlueTask(
            name="SST-2",
            metric="accuracy",
            labels=_BINARY,
            text_columns=("sentence",),
            label_column="label",
            dev_examples=872,
        ),
        GlueTask(
            name="QNLI",
            metric="accuracy",
            labels=_ENTAILMENT,
            text_columns=("question", "sentence"),
            label_column="label",
            dev_examples=5463,
        ),
        GlueTask(
            name="QQP",
            metric="accuracy",
            labels=_BINARY,
            text_columns=("question1", "question2"),
            label_column="is_duplicate",
            dev_examples=40430,
            broken_rows=10,
        ),
        GlueTask(
            name="MNLI",
            metric="accuracy",
            labels=("contradiction", "entailment", "neutral"),
            text_columns=_SENTENCES,
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
            metric="accuracy",
            labels=_BINARY,
            text_columns=_SENTENCES,
            label_column="label",
            dev_examples=71,
            in_average=False,
        ),
    )
}
"""In the order of the paper's tables, WNLI (left out of the averages) last."""

PAPER_TASKS = tuple(name for name, task in TASKS.items() if task.in_average)
