"""Suite of `megatron-ddrp finetune`: the user's own tasks, whose best models are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_ddrp.errors import UserError
from megatron_ddrp.tasks.finetune.kinds import KINDS
from megatron_ddrp.tasks.finetune.options import TaskFiles
from megatron_ddrp.tasks.finetune.suite import Suite
from megatron_ddrp.tasks.finetune.task import Task, TaskData
from megatron_ddrp.tasks.jobs.store import Store


@dataclass(frozen=True)
class OwnTasks(Suite):
    """Suite of the tasks of a command line."""

    tasks: tuple[TaskFiles, ...] = ()
    keep_models: bool = False
    """True to keep the best model of each task and encoder."""

    program = "megatron-ddrp finetune"
    scales_labels = True
    title = "Fine-tuning scores"
    about = (
        "Each score is the last epoch's on the validation rows at the best grid point, the median over seeds, x 100. "
        "An undefined score (the correlation of a constant guess, or training that diverged) counts as 0, by a "
        "plug-in's metric as -100, and is marked."
    )

    def read(self) -> dict[str, TaskData]:
        """Read and check all files of the tasks."""
        from megatron_ddrp.tasks.finetune.task_files import read_task

        found = [read_task(files) for files in self.tasks]
        for number, data in enumerate(found):
            if data.task.name in [other.task.name for other in found[:number]]:
                raise UserError(f"two tasks are called {data.task.name}: give one of them another name", exit_code=2)
        return {data.task.name: data for data in found}

    def task(self, row: dict[str, Any]) -> Task:
        """Return the task of a line of runs.jsonl."""
        try:
            task = Task.of(row["facts"])
        except (KeyError, TypeError):
            raise UserError(f"its line has no facts about the task {row['task']}") from None
        if task.kind not in KINDS or task.metric not in KINDS[task.kind].metrics:
            raise UserError(f"its kind {task.kind} and metric {task.metric} are a plug-in's: give its --plugin again")
        return task

    def row_facts(self, data: TaskData) -> dict[str, Any]:
        """Return the facts about the task and the score of its most frequent label."""
        return {"facts": data.task.facts, "baseline": data.baseline}

    def finish(self, sweep: Any, store: Store) -> list[str]:
        """Predict the test files without labels; return lines that name the kept models and the predictions."""
        from megatron_ddrp.tasks.finetune.predict import use_models  # here, because it imports torch

        return use_models(sweep, store)

    def keeps_model(self, task: str) -> bool:
        """Return whether to keep the best model: not with --no-keep-models or --random-init."""
        return self.keep_models
