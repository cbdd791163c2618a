"""A suite of tasks, such as those of `glue` and of `finetune`: the source of its data and the content of its page."""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from megatron_ddrp.tasks.finetune.cells import Cell, Cells
from megatron_ddrp.tasks.finetune.task import Task, TaskData
from megatron_ddrp.tasks.markdown import Table

if TYPE_CHECKING:
    from megatron_ddrp.tasks.finetune.runs import RunStore
    from megatron_ddrp.tasks.finetune.sweep import Sweep


class Suite(ABC):
    """A set of tasks. Instances hold no state, so that worker processes get them with the command line."""

    program: ClassVar[str]
    """Name in messages."""
    title: ClassVar[str]
    """Heading of the page."""
    about: ClassVar[str]
    """Explanation of the scores in Markdown, shown above the tables."""
    head: ClassVar[str] = "family"
    """`Run.head` of its runs."""
    known: Container[str] | None = None
    """The only tasks that its runs.jsonl may hold; None for any."""
    order: Sequence[str] = ()
    """Tasks in the order of the tables; others follow."""
    averages: tuple[str, ...] = ()
    """Names of the means over tasks that its table has."""

    @abstractmethod
    def read(self, options: argparse.Namespace) -> dict[str, TaskData]:
        """Read and check all files that the command line asks for. Raises `UserError` for what is wrong with them."""

    @abstractmethod
    def task(self, row: dict[str, Any]) -> Task:
        """Return the task of a line of runs.jsonl. Raises `UserError` where it is not known."""

    def row_facts(self, data: TaskData) -> dict[str, Any]:
        """Return what a line of runs.jsonl says of its task beyond the common keys."""
        return {}

    def keeps_model(self, task: str, options: argparse.Namespace) -> bool:
        """Return whether the fine-tuned model of a task's best run is kept."""
        return False

    def next_stage(self, sweep: Sweep) -> argparse.Namespace | None:
        """Return the options of a second sweep that runs after this one, before the report; None without one."""
        return None

    def finish(self, sweep: Sweep, store: RunStore) -> list[str]:
        """Do what comes after the last run, on every rank; return lines to print."""
        return []

    def means(self, cells: Cells) -> dict[str, float | None]:
        """Return the means named by `averages`, None where a task is missing."""
        return dict.fromkeys(self.averages)

    def official_size(self, task: str) -> int | None:
        """Return how many rows the development file of a task should have, where somebody says so."""
        return None

    def combined(self, cell: Cell) -> dict[str, list[float]]:
        """Return further scores of a cell that are made of several files: label → one score per seed."""
        return {}

    def published(self) -> dict[str, dict[str, float]]:
        """Return published scores for table.json: system → task → score."""
        return {}

    def published_table(self, encoders: dict[str, Cells]) -> Table | None:
        """Return published scores that the encoders' may be compared with."""
        return None
