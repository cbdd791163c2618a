"""Suite of `megatron-ddrp finetune`: the user's own tasks, whose best models are kept."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_ddrp.errors import UserError
from megatron_ddrp.tasks.finetune.suite import Suite
from megatron_ddrp.tasks.finetune.task import Task, TaskData

if TYPE_CHECKING:
    from megatron_ddrp.encoders.encoder import Encoder
    from megatron_ddrp.tasks.finetune.runs import RunStore
    from megatron_ddrp.tasks.finetune.sweep import Sweep
    from megatron_ddrp.tasks.finetune.task_options import TaskFiles


NOT_KEPT = "its runs diverged, or used --no-keep-models (to repeat them, delete their lines in runs.jsonl)"


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
        "An undefined score (the correlation of a constant guess, or training that diverged) counts as 0 and is marked."
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
            return Task.of(row["facts"])
        except (KeyError, TypeError):
            raise UserError(f"its line has no facts about the task {row['task']}") from None

    def row_facts(self, data: TaskData) -> dict[str, Any]:
        """Return the facts about the task and the score of its most frequent label."""
        return {"facts": data.task.facts, "baseline": data.baseline}

    def keeps_model(self, task: str) -> bool:
        """Return whether to keep the best model: not with --no-keep-models or --random-init."""
        return self.keep_models

    def finish(self, sweep: Sweep, store: RunStore) -> list[str]:
        """Predict the test files without labels; return lines that name the kept models and the predictions.

        Other commands with the same output folder wait meanwhile.
        """
        from megatron_ddrp.tasks.finetune.saving import model_name
        from megatron_ddrp.tasks.jobs.store import one_at_a_time

        lines = []
        for encoder in sweep.encoders.values() if sweep.speaks else ():
            for files in self.tasks:
                data = sweep.data[files.called]
                with one_at_a_time(sweep.options.output_dir, model_name(data.task, encoder)):
                    lines += self._finished(sweep, data, encoder)
        return lines

    def _finished(self, sweep: Sweep, data: TaskData, encoder: Encoder) -> list[str]:
        from megatron_ddrp.tasks.finetune.predict import predict_file
        from megatron_ddrp.tasks.finetune.saving import kept, model_folder, model_name

        name, output = data.task.name, sweep.options.output_dir
        folder = model_folder(output, data.task, encoder, data.fingerprint)
        if not self.keep_models or kept(folder) is None:
            why = f"; {NOT_KEPT}" if self.keep_models else ""
            if data.unlabelled:
                why += f"; {data.unlabelled.path} is not predicted"
            return [f"{name}: no model of {encoder.name} was kept{why}"]
        use = f"megatron-ddrp finetune predict --load {shlex.quote(str(folder))} --input FILE --output LABELLED"
        plain = folder.with_name(model_name(data.task, encoder))
        other = f" ({plain} keeps that of other files or settings)" if folder != plain and kept(plain) else ""
        lines = [f"{name}: the best model of {encoder.name} is in {folder}{other}; to use it: {use}"]
        if data.unlabelled:
            data.unlabelled.check()
            predicted = output / "predictions" / f"{folder.name}-test.jsonl"
            predict_file(folder, data.unlabelled.path, predicted, sweep.device)
            lines.append(f"{name}: predictions for {data.unlabelled.path} are in {predicted}")
        return lines
