"""The GLUE tasks, one row each: files, columns, labels and metric, in the layout of the official TSV release.

Lines are split at tabs and nowhere else: a quotation mark is text, also QQP's doubled ones. Files have a header line
except CoLA's train.tsv and dev.tsv; MRPC's begin with a byte-order mark. The first development file gives a task's
score. The label order fixes the class numbers and is alphabetical.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Task:
    """One row of the table; `TASKS` holds them by name."""

    name: str
    """The official name, also the folder below --data-dir."""
    metric: str
    """Name in `metrics.METRICS`."""
    text_columns: tuple[str, ...]
    """Header names of one sentence or of a pair, in the order in which they are encoded."""
    label_column: str
    """Header name of the label."""
    dev_examples: int
    """Rows of the official (first) development file."""
    labels: tuple[str, ...] = ("0", "1")
    """The labels as they are written; empty for a regression."""
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
    def is_regression(self) -> bool:
        """True where the target is a number."""
        return not self.labels

    @property
    def submission_files(self) -> dict[str, str]:
        """Test file → its name in a submission; also test files that other tasks' data hold."""
        return self.several_tests or {"test.tsv": f"{self.name}.tsv"}

    @property
    def num_outputs(self) -> int:
        """Width of the classifier's last layer."""
        return max(1, len(self.labels))


_ENTAILMENT = ("entailment", "not_entailment")


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("RTE", "accuracy", ("sentence1", "sentence2"), "label", 277, _ENTAILMENT),
        Task("STS-B", "pearson", ("sentence1", "sentence2"), "score", 1500, labels=(), label_range=(0.0, 5.0)),
        Task("MRPC", "accuracy", ("#1 String", "#2 String"), "Quality", 408),
        Task("CoLA", "matthews", ("sentence",), "label", 1043, columns=("source", "label", "star", "sentence")),
        Task("SST-2", "accuracy", ("sentence",), "label", 872),
        Task("QNLI", "accuracy", ("question", "sentence"), "label", 5463, _ENTAILMENT),
        Task("QQP", "accuracy", ("question1", "question2"), "is_duplicate", 40430, broken_rows=10),
        Task(
            "MNLI",
            "accuracy",
            ("sentence1", "sentence2"),
            "gold_label",
            9815,
            ("contradiction", "entailment", "neutral"),
            dev_files=("dev_matched.tsv", "dev_mismatched.tsv"),
            several_tests={
                "test_matched.tsv": "MNLI-m.tsv",
                "test_mismatched.tsv": "MNLI-mm.tsv",
                "../diagnostic/diagnostic.tsv": "AX.tsv",
            },
        ),
        Task("WNLI", "accuracy", ("sentence1", "sentence2"), "label", 71, in_average=False),
    )
}
"""In the order of the paper's tables, WNLI (left out of the averages) last."""

PAPER_TASKS = tuple(name for name, task in TASKS.items() if task.in_average)
