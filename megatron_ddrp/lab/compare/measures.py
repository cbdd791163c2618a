"""Jobs that measure checkpoints: GLUE, minimal pairs, other tasks, and analyses by megatron-ddrp analyze."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from megatron_ddrp.config import encoding_class, flag_words
from megatron_ddrp.data.batches.blend import read_blend
from megatron_ddrp.errors import UserError
from megatron_ddrp.lab.compare.jobs import Job, job_name
from megatron_ddrp.lab.compare.plan import NUM_SEEDS, Plan
from megatron_ddrp.lab.compare.runs import (
    CorpusFiles,
    TrainingRun,
    all_runs,
    count_steps,
    fingerprint,
    open_corpus,
)
from megatron_ddrp.lab.compare.scoring import Flags, TaskPlan
from megatron_ddrp.tasks.jobs.store import Store, digest
from megatron_ddrp.tasks.minimal_pairs.pairs import read_pairs

ANALYSES = ("self-similarity", "triangle", "attention-maps", "space", "direction")
"""Kinds of analyses of single runs; the plan has the number of sentences of each."""


class Measure(NamedTuple):
    """Job that measures a checkpoint of a run."""

    run: TrainingRun
    step: int
    job: Job
    task: str = ""
    """Name of the plan's own task that it scores; empty for other measures."""


def all_measures(plan: Plan, runs: list[TrainingRun], corpus: CorpusFiles, folder: Path) -> list[Measure]:
    """Return the measures of all runs: GLUE comes last, and that of earlier checkpoints at the end.

    Raises `UserError` for missing or unreadable data.
    """
    found = [*_minimal_pairs(plan, runs, folder / "minimal-pairs"), *_analyses(plan, runs, corpus, folder / "analyses")]
    found += _throughput(plan, runs, folder / "analyses")
    return [*found, *_own_tasks(plan, runs, folder / "tasks"), *_glue(plan, runs, folder / "glue")]


def _score(
    run: TrainingRun, step: int, job: Job, start: Sequence[str], flags: Sequence[str], task: str = ""
) -> Measure:
    """Return the measure by a command that scores a checkpoint of a run. The `job` lacks only its command and needs."""
    where = ("--load", str(run.checkpoint(step)), "--output-dir", str(job.output.parent))
    command = ("megatron-ddrp", job.kind, *start, *where, *flags, *run.plugin_words)
    return Measure(run, step, replace(job, command=command, needs=(run.job.name,)), task)


def _flag_facts(flags: Flags) -> list[object]:
    return [[name.replace("_", "-"), flag_words([(name, value)])[1:]] for name, value in flags]


def _glue(plan: Plan, runs: list[TrainingRun], folder: Path) -> list[Measure]:
    """Return the GLUE jobs of every last checkpoint, then of the other checkpoints of `glue.checkpoints_of`."""
    glue = plan.glue
    if glue is None:
        return []
    data = [fingerprint(plan, "glue", f"{glue.data_dir}/{task}") for task in glue.tasks]
    curves = [run for run in runs if run.model.name in glue.checkpoints_of and not run.half]
    earlier = [(run, step) for run in curves for step in run.checkpoints if step != run.steps]
    found = []
    for run, step in [*((run, run.steps) for run in runs), *earlier]:
        # The folder does not depend on the tasks, so a task that is added to the plan later joins the others' runs.
        facts = [run.job.name, step, _flag_facts(glue.flags)]
        title = f"{run.job.title}, step {step:,}"
        output = folder / f"{run.folder.name}-{step}-{digest(facts)}" / "table.json"
        job = Job("glue", job_name("glue", title, [facts, glue.tasks, data]), title, (), output)
        start = ("--tasks", *glue.tasks, "--data-dir", glue.data_dir)
        found.append(_score(run, step, job, start, flag_words(glue.flags)))
    return found


def _minimal_pairs(plan: Plan, runs: list[TrainingRun], folder: Path) -> list[Measure]:
    """Return the minimal-pair jobs of every last checkpoint. Raises `UserError` for unreadable pairs."""
    pairs = plan.minimal_pairs
    if pairs is None:
        return []
    try:
        data, work = _pair_facts(pairs.data_dir, pairs.max_pairs)
    except UserError as error:
        raise UserError(f"{plan.file}: minimal_pairs: {error}; or give --no-minimal-pairs", 2) from None
    # By default the command uses all cores; with several jobs at once it must not.
    flags = [*flag_words(pairs.flags), *(() if plan.workers == 1 else ("--workers", "1"))]
    found = []
    for run in runs:
        name = job_name("minimal-pairs", run.job.title, [run.job.name, run.steps, _flag_facts(pairs.flags), data])
        output = folder / name.removeprefix("minimal-pairs-") / "results.json"
        job = Job("minimal-pairs", name, run.job.title, (), output, work=work)
        found.append(_score(run, run.steps, job, ("--data-dir", pairs.data_dir), flags))
    return found


@lru_cache(maxsize=1)
def _pair_facts(folder: str, max_pairs: int | None) -> tuple[list[list[str]], float]:
    """Return what identifies each paradigm of a folder, and the number of pairs; all plans of a file share them."""
    paradigms = read_pairs(Path(folder), max_pairs)
    return [[paradigm.uid, paradigm.digest] for paradigm in paradigms], float(sum(map(len, paradigms)))


def _own_tasks(plan: Plan, runs: list[TrainingRun], folder: Path) -> list[Measure]:
    """Return the jobs that score every last checkpoint on every task. Raises `UserError` for missing data."""
    facts = [(task, _task_facts(plan, task)) for task in plan.tasks]
    found = []
    for run, (task, data) in itertools.product(runs, facts):
        title = f"{task.name}, {run.job.title}"
        name = job_name("finetune", title, [run.job.name, run.steps, data])
        output = folder / name.removeprefix("finetune-") / "table.json"
        job = Job("finetune", name, title, (), output, work=float(task.epochs))
        start = ("--task-file", task.file, "--no-keep-models")
        found.append(_score(run, run.steps, job, start, flag_words(task.flags), task.name))
    return found


def _task_facts(plan: Plan, task: TaskPlan) -> list[object]:
    """Return everything but the checkpoint that determines a score: the data, the task's settings and the flags."""
    data = [fingerprint(plan, "tasks", name) for name in task.data]
    asked = {name: value for name, value in vars(task.task).items() if name not in ("train", "valid", "test")}
    return [data, asked, _flag_facts(task.flags)]


def _analyses(plan: Plan, runs: list[TrainingRun], corpus: CorpusFiles, folder: Path) -> list[Measure]:
    """Return the analyses of the runs at the full budget; attention maps only for the first seed."""
    prefixes = read_blend(corpus.data_path, "corpus.data_path").prefixes
    first, found = _first_runs(plan, runs), []
    for run, kind in itertools.product([run for run in runs if not run.half], ANALYSES):
        sentences = getattr(plan.analyses, kind.replace("-", "_"))
        of_distances = encoding_class(run.model.encoding).is_relative
        if sentences and (kind != "triangle" or of_distances) and (kind != "attention-maps" or run in first):
            name = job_name(kind, run.job.title, [run.job.name, sentences])
            output = folder / f"{name}{'.png' if kind == 'attention-maps' else '.json'}"
            command = (
                *("megatron-ddrp", "analyze", kind, "--load", str(run.folder), "--data-path", *prefixes),
                *("--sentences", str(sentences), "--output", str(output)),
                *(("--random-init",) if kind == "direction" else ()),
                *run.plugin_words,
            )
            work = float(len(run.checkpoints)) if kind in ("self-similarity", "space") else 1.0
            found.append(
                Measure(run, run.steps, Job(kind, name, run.job.title, command, output, (run.job.name,), work))
            )
    return found


def _throughput(plan: Plan, runs: list[TrainingRun], folder: Path) -> list[Measure]:
    """Return one job that times all models of the first seed together; its `run` is the last of their runs."""
    lengths, timed = plan.analyses.throughput, _first_runs(plan, runs)
    if not lengths or not timed:
        return []
    needs = tuple(run.job.name for run in timed)
    title = f"{len(timed)} models, seed {plan.seeds[0]}"
    name = job_name("throughput", title, [needs, lengths])
    output = folder / f"{name}.json"
    command = (
        *("megatron-ddrp", "analyze", "throughput", "--load", *(str(run.folder) for run in timed)),
        *("--lengths", *map(str, lengths), "--output", str(output)),
        *dict.fromkeys(word for run in timed for word in run.plugin_words),
    )
    job = Job("throughput", name, title, command, output, needs, float(len(timed)))
    return [Measure(timed[-1], timed[-1].steps, job)]


def _first_runs(plan: Plan, runs: list[TrainingRun]) -> list[TrainingRun]:
    """Return the runs of the plan's models with the first seed at the full budget."""
    return [run for run in runs if run.seed == plan.seeds[0] and run.model in plan.models and not run.half]


class Work:
    """Jobs of a plan in an output folder."""

    def __init__(self, plan: Plan, folder: Path, store: Store):
        """Plan all jobs. Raises `UserError` for missing inputs and for flags that pre-training would refuse."""
        self.plan, self.folder, self.store = plan, folder, store
        self.corpus = open_corpus(plan, folder)
        self.steps = {model.name: count_steps(plan, model) for model in plan.models}
        """Model's name → steps of the full budget."""
        self.runs = all_runs(plan, self.corpus, folder, self.steps)
        self.measures = all_measures(plan, self.runs, self.corpus, folder)

    def jobs_of(self, run: TrainingRun) -> list[Job]:
        """Return a run's job and those that measure its checkpoints, the last one first."""
        return [run.job, *(measure.job for measure in self.measures if measure.run == run)]

    def summary(self) -> str:
        """Return the numbers of models and seeds, and the budget, in words."""
        models, seeds = len(self.plan.models), self.plan.seeds
        few = f" (fewer than {NUM_SEEDS}: too few for a reliable spread)" if len(seeds) < NUM_SEEDS else ""
        counts = f"{models} model{'s' * (models > 1)} x {len(seeds)} seed{'s' * (len(seeds) > 1)}"
        return f"{counts} ({', '.join(map(str, seeds))}){few}, {self.plan.budget} each"
