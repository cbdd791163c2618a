"""Base class of a suite of tasks, such as GLUE or the user's own tasks: its data and the content of its page."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Sequence
from typing import Any, ClassVar

from megatron_ddrp.pages.markdown import Table
from megatron_ddrp.tasks.finetune.cells import Cell, Cells
from megatron_ddrp.tasks.finetune.task import Task, TaskData
from megatron_ddrp.tasks.jobs.store import Store


class Suite(ABC):
    """Set of tasks. Instances hold only what the command line says about them, and are sent to worker processes."""

    program: ClassVar[str]
    """Name of the command in messages."""
    title: ClassVar[str]
    """Heading of the page."""
    about: ClassVar[str]
    """Explanation of the scores in Markdown, shown above the tables."""
    head: ClassVar[str] = "family"
    """Value of `Run.head` for its runs."""
    scales_labels: ClassVar[bool] = False
    """Value of `Run.scales_labels` for its regressions."""
    known: Container[str] | None = None
    """Tasks that its runs.jsonl may contain; None for any."""
    order: Sequence[str] = ()
    """Tasks in the order of the tables; others follow."""
    averages: tuple[str, ...] = ()
    """Names of the means over tasks in its table."""

    @abstractmethod
    def read(self) -> dict[str, TaskData]:
        """Read and check all files of the tasks. Raises `UserError` for invalid files."""

    @abstractmethod
    def task(self, row: dict[str, Any]) -> Task:
        """Return the task of a line of runs.jsonl. Raises `UserError` for an unknown task."""

    def row_facts(self, data: TaskData) -> dict[str, Any]:
        """Return additional keys for the lines of a task in runs.jsonl."""
        return {}

    def keeps_model(self, task: str) -> bool:
        """Return whether to keep the fine-tuned model of a task's best run."""
        return False

    def next_stage(self, sweep: Any, store: Store) -> Any:
        """Return the `SweepOptions` of a second sweep that runs after this `Sweep`; None without one."""
        return None

    def finish(self, sweep: Any, store: Store) -> list[str]:
        """Finish a `Sweep` after its report, on every rank; return lines to print."""
        return []

    def means(self, cells: Cells) -> dict[str, float | None]:
        """Return name in `averages` → mean; None if a task is missing."""
        return dict.fromkeys(self.averages)

    def official_size(self, task: str) -> int | None:
        """Return the official number of rows of a task's development file; None if there is none."""
        return None

    def combined(self, cell: Cell) -> dict[str, list[float]]:
        """Return scores that combine several development files of a cell: label → one score per seed."""
        return {}

    def published_table(self, encoders: dict[str, Cells]) -> Table | None:
        """Return a table of published scores to compare the encoders with; None without one."""
        return None
