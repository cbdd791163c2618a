"""Jobs that measure checkpoints: GLUE, minimal pairs, other tasks, and analyses by megatron-ddrp analyze."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from megatron_ddrp.config import encoding_class, flag_words
from megatron_ddrp.data.batches.blend import read_blend
from megatron_ddrp.errors import UserError
from megatron_ddrp.tasks.compare.corpus import CorpusFiles, fingerprint
from megatron_ddrp.tasks.compare.flags import Flags
from megatron_ddrp.tasks.compare.jobs import Job, job_name
from megatron_ddrp.tasks.compare.plan import Plan
from megatron_ddrp.tasks.compare.runs import TrainingRun
from megatron_ddrp.tasks.compare.scoring import GluePlan, TaskPlan
from megatron_ddrp.tasks.jobs.store import digest
from megatron_ddrp.tasks.minimal_pairs.pairs import read_pairs


class Measure(NamedTuple):
    """Job that measures a checkpoint of a run."""

    run: TrainingRun
    step: int
    job: Job


class TaskMeasure(NamedTuple):
    """Job that fine-tunes the last checkpoint of a run on a task."""

    run: TrainingRun
    task: TaskPlan
    job: Job


def glue_scores(plan: Plan, runs: list[TrainingRun], folder: Path) -> list[Measure]:
    """Return the GLUE jobs of every last checkpoint, then of the other checkpoints of `glue.checkpoints_of`."""
    glue = plan.glue
    if glue is None:
        return []
    data = [fingerprint(plan, "glue", f"{glue.data_dir}/{task}") for task in glue.tasks]
    steps = [(run, run.steps) for run in runs]
    curves = [run for run in runs if run.model.name in glue.checkpoints_of and not run.half]
    steps += [(run, step) for run in curves for step in run.checkpoints if step != run.steps]
    return [Measure(run, step, _score(glue, run, step, data, folder / "glue")) for run, step in steps]


def _score(glue: GluePlan, run: TrainingRun, step: int, data: list[object], folder: Path) -> Job:
    flags = _flag_facts(glue.flags)
    # The folder does not depend on the tasks, so a task that is added to the plan later joins the others' runs.
    facts = [run.job.name, step, flags]
    title = f"{run.job.title}, step {step:,}"
    output = folder / f"{run.folder.name}-{step}-{digest(facts)}"
    command = (
        *("megatron-ddrp", "glue", "--tasks", *glue.tasks, "--data-dir", glue.data_dir),
        *("--load", str(run.checkpoint(step)), "--output-dir", str(output), *flag_words(glue.flags)),
        *run.model.plugin_words,
    )
    name = job_name("glue", title, [facts, glue.tasks, data])
    return Job("glue", name, title, command, output / "table.json", (run.job.name,))


def _flag_facts(flags: Flags) -> list[object]:
    return [[name.replace("_", "-"), flag_words([(name, value)])[1:]] for name, value in flags]


def minimal_pair_scores(plan: Plan, runs: list[TrainingRun], folder: Path) -> list[Measure]:
    """Return the minimal-pair jobs of every last checkpoint. Raises `UserError` for unreadable pairs."""
    pairs = plan.minimal_pairs
    if pairs is None:
        return []
    try:
        data, work = _pair_facts(pairs.data_dir, pairs.max_pairs)
    except UserError as error:
        raise UserError(f"{plan.file}: minimal_pairs: {error}; or give --no-minimal-pairs", 2) from None
    # By default the command uses all cores; with several jobs at once it must not.
    share = () if plan.workers == 1 else ("--workers", "1")
    found = []
    for run in runs:
        name = job_name("minimal-pairs", run.job.title, [run.job.name, run.steps, _flag_facts(pairs.flags), data])
        output = folder / "minimal-pairs" / name.removeprefix("minimal-pairs-")
        command = (
            *("megatron-ddrp", "minimal-pairs", "--data-dir", pairs.data_dir),
            *("--load", str(run.checkpoint(run.steps)), "--output-dir", str(output), *flag_words(pairs.flags), *share),
            *run.model.plugin_words,
        )
        job = Job("minimal-pairs", name, run.job.title, command, output / "results.json", (run.job.name,), work)
        found.append(Measure(run, run.steps, job))
    return found


@lru_cache(maxsize=1)
def _pair_facts(folder: str, max_pairs: int | None) -> tuple[list[list[str]], float]:
    """Return what identifies each paradigm of a folder, and the number of pairs; all rungs of a plan share them."""
    paradigms = read_pairs(Path(folder), max_pairs)
    return [[paradigm.uid, paradigm.digest] for paradigm in paradigms], float(sum(map(len, paradigms)))


def task_scores(plan: Plan, runs: list[TrainingRun], folder: Path) -> list[TaskMeasure]:
    """Return the jobs that score every last checkpoint on every task. Raises `UserError` for missing data."""
    facts = [(task, _task_facts(plan, task)) for task in plan.tasks]
    return [
        TaskMeasure(run, task, _task_job(task, run, data, folder / "tasks")) for run in runs for task, data in facts
    ]


def _task_facts(plan: Plan, task: TaskPlan) -> list[object]:
    """Return everything but the checkpoint that determines a score: the data, the task's settings and the flags."""
    data = [fingerprint(plan, "tasks", name) for name in task.data]
    asked = {name: value for name, value in vars(task.task).items() if name not in ("train", "valid", "test")}
    return [data, asked, _flag_facts(task.flags)]


def _task_job(task: TaskPlan, run: TrainingRun, facts: list[object], folder: Path) -> Job:
    title = f"{task.name}, {run.job.title}"
    name = job_name("finetune", title, [run.job.name, run.steps, facts])
    output = folder / name.removeprefix("finetune-")
    command = (
        *("megatron-ddrp", "finetune", "--task-file", task.file, "--no-keep-models"),
        *("--load", str(run.checkpoint(run.steps)), "--output-dir", str(output), *flag_words(task.flags)),
        *run.model.plugin_words,
    )
    return Job("finetune", name, title, command, output / "table.json", (run.job.name,), float(task.epochs))


def analyses(plan: Plan, runs: list[TrainingRun], corpus: CorpusFiles, folder: Path) -> list[Measure]:
    """Return the analyses of the runs at the full budget; attention maps and throughput only for the first seed."""
    wanted = plan.analyses
    prefixes = read_blend(corpus.data_path, "corpus.data_path").prefixes
    found = []
    for run in runs:
        if run.half:
            continue
        is_first = run.seed == plan.seeds[0] and run.model in plan.models
        for kind, sentences, applies, end in (
            ("self-similarity", wanted.self_similarity, True, ".json"),
            ("triangle", wanted.triangle, encoding_class(run.model.encoding).is_relative, ".json"),
            ("attention-maps", wanted.attention_maps, is_first, ".png"),
            ("space", wanted.space, True, ".json"),
            ("direction", wanted.direction, True, ".json"),
        ):
            if not sentences or not applies:
                continue
            name = job_name(kind, run.job.title, [run.job.name, sentences])
            output = folder / "analyses" / f"{name}{end}"
            command = (
                *("megatron-ddrp", "analyze", kind, "--load", str(run.folder), "--data-path", *prefixes),
                *("--sentences", str(sentences), "--output", str(output)),
                *(("--random-init",) if kind == "direction" else ()),
                *run.model.plugin_words,
            )
            work = float(len(run.checkpoints)) if kind in ("self-similarity", "space") else 1.0
            job = Job(kind, name, run.job.title, command, output, (run.job.name,), work)
            found.append(Measure(run, run.steps, job))
    return found + throughput(plan, runs, folder)


def throughput(plan: Plan, runs: list[TrainingRun], folder: Path) -> list[Measure]:
    """Return one job that times all models of the first seed together; its `run` is the last of their runs."""
    lengths = plan.analyses.throughput
    timed = [run for run in runs if run.seed == plan.seeds[0] and run.model in plan.models and not run.half]
    if not lengths or not timed:
        return []
    needs = tuple(run.job.name for run in timed)
    title = f"{len(timed)} models, seed {plan.seeds[0]}"
    name = job_name("throughput", title, [needs, lengths])
    output = folder / "analyses" / f"{name}.json"
    command = (
        *("megatron-ddrp", "analyze", "throughput", "--load", *(str(run.folder) for run in timed)),
        *("--lengths", *map(str, lengths), "--output", str(output)),
        *dict.fromkeys(word for run in timed for word in run.model.plugin_words),
    )
    job = Job("throughput", name, title, command, output, needs, float(len(timed)))
    return [Measure(timed[-1], timed[-1].steps, job)]
