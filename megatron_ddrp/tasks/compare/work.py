"""All jobs of a plan: data, probes, runs, and measures of the runs' checkpoints."""

from __future__ import annotations

from pathlib import Path

from megatron_ddrp.tasks.compare.corpus import open_corpus
from megatron_ddrp.tasks.compare.jobs import Job
from megatron_ddrp.tasks.compare.measures import (
    Measure,
    TaskMeasure,
    analyses,
    glue_scores,
    minimal_pair_scores,
    task_scores,
)
from megatron_ddrp.tasks.compare.plan import NUM_SEEDS, Plan
from megatron_ddrp.tasks.compare.runs import TrainingRun, all_runs, count_steps, probe_jobs, probed_seconds
from megatron_ddrp.tasks.jobs.store import Store


class Work:
    """Jobs of a plan in an output folder. `update` repeats the planning after the probes have finished."""

    steps: dict[str, int]
    """Model's name → steps of the full budget; only models whose steps are known."""
    runs: list[TrainingRun]
    scores: list[Measure]
    """GLUE jobs."""
    pairs: list[Measure]
    """Minimal-pair jobs."""
    tasks: list[TaskMeasure]
    """Jobs of the plan's own tasks."""
    analyses: list[Measure]
    """Jobs that analyse runs."""

    def __init__(self, plan: Plan, folder: Path, store: Store):
        """Plan all jobs. Raises `UserError` for missing inputs and for flags that pre-training would refuse."""
        self.plan, self.folder, self.store = plan, folder, store
        self.corpus = open_corpus(plan, folder)
        self.probes = probe_jobs(plan, self.corpus, folder)
        self.update()

    def update(self) -> None:
        """Plan the runs whose steps are known, and their measures."""
        finished = {name: job for name, job in self.probes.items() if job.name in self.store}
        self.steps = count_steps(self.plan, {name: probed_seconds(job) for name, job in finished.items()})
        self.runs = all_runs(self.plan, self.corpus, self.folder, self.steps)
        self.scores = glue_scores(self.plan, self.runs, self.folder)
        self.pairs = minimal_pair_scores(self.plan, self.runs, self.folder)
        self.tasks = task_scores(self.plan, self.runs, self.folder)
        self.analyses = analyses(self.plan, self.runs, self.corpus, self.folder)

    def jobs_of(self, run: TrainingRun) -> list[Job]:
        """Return a run's job and those that measure its checkpoints, the last one first."""
        scores = sorted(self.scores, key=lambda score: score.step != score.run.steps)
        measured: list[Measure | TaskMeasure] = [*self.pairs, *self.analyses, *self.tasks, *scores]
        return [run.job, *(measure.job for measure in measured if measure.run == run)]

    def plan_text(self) -> str:
        """Return the text of the plan: models, steps, seeds and budget."""
        lines = [f"plan {self.plan.file}: {self.summary()}, into {self.folder}"]
        for model in self.plan.rows:
            count = f"as many steps as fit into {self.plan.budget}"
            if model.name in self.steps:
                count = f"{self.steps[model.name]:,} steps"
            half = ", and half of it" if model.name in self.plan.half_budget else ""
            lines.append(f"  {model.name}: {model.encoding}, {model.objective}, {count}{half}")
        if not self.plan.glue:
            lines.append("  no GLUE in this plan")
        return "\n".join(lines)

    def summary(self) -> str:
        """Return the numbers of models and seeds, and the budget, in words."""
        models, seeds = len(self.plan.models), self.plan.seeds
        few = f" (fewer than {NUM_SEEDS}: too few for a reliable spread)" if len(seeds) < NUM_SEEDS else ""
        counts = f"{models} model{'s' * (models > 1)} x {len(seeds)} seed{'s' * (len(seeds) > 1)}"
        return f"{counts} ({', '.join(map(str, seeds))}){few}, {self.plan.budget} each"
