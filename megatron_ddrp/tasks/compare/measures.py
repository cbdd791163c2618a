"""What is measured on the checkpoints of runs: GLUE scores, and the analyses of tools/analyze.py."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from megatron_ddrp.config import encoding_class
from megatron_ddrp.tasks.compare.corpus import CorpusFiles, fingerprint, is_weight
from megatron_ddrp.tasks.compare.flags import words
from megatron_ddrp.tasks.compare.jobs import Job, digest, job_name
from megatron_ddrp.tasks.compare.plan import GluePlan, Plan
from megatron_ddrp.tasks.compare.runs import TrainingRun


class Measure(NamedTuple):
    """A job on a checkpoint of a run."""

    run: TrainingRun
    step: int
    job: Job


def glue_scores(plan: Plan, runs: list[TrainingRun], folder: Path) -> list[Measure]:
    """Return a score of every last checkpoint, then those of the other checkpoints of figure 3b's models."""
    glue = plan.glue
    if glue is None:
        return []
    data = [fingerprint(plan, "glue", f"{glue.data_dir}/{task}") for task in glue.tasks]
    steps = [(run, run.steps) for run in runs]
    curves = [run for run in runs if run.model.name in glue.checkpoints_of and not run.arm.half]
    steps += [(run, step) for run in curves for step in run.checkpoints if step != run.steps]
    return [Measure(run, step, _score(glue, run, step, data, folder / "glue")) for run, step in steps]


def _score(glue: GluePlan, run: TrainingRun, step: int, data: list[object], folder: Path) -> Job:
    flags = [[name.replace("_", "-"), words([(name, value)])[1:]] for name, value in glue.flags]
    # A task added to the plan later joins the runs of the others: the folder is the same.
    facts = [run.job.name, step, flags]
    title = f"{run.job.title}, step {step:,}"
    output = folder / f"{run.folder.name}-{step}-{digest(facts)}"
    command = (
        *("python", "-m", "tasks.glue", "--tasks", *glue.tasks, "--data-dir", glue.data_dir),
        *("--load", str(run.checkpoint(step)), "--output-dir", str(output), *words(glue.flags)),
    )
    name = job_name("glue", title, [facts, glue.tasks, data])
    return Job("glue", name, title, command, output / "table.json", (run.job.name,))


def analyses(plan: Plan, runs: list[TrainingRun], corpus: CorpusFiles, folder: Path) -> list[Measure]:
    """Return the analyses of the runs at the full budget; attention maps and throughput of the first seed alone."""
    wanted = plan.analyses
    prefixes = [word for word in corpus.data_path if not is_weight(word)]
    found = []
    for run in runs:
        if run.arm.half:
            continue
        is_first = run.seed == plan.seeds[0] and run.model in plan.models
        for kind, sentences, applies, end in (
            ("self-similarity", wanted.self_similarity, True, ".json"),
            ("triangle", wanted.triangle, encoding_class(run.model.encoding).is_relative, ".json"),
            ("attention-maps", wanted.attention_maps, is_first, ".png"),
            ("space", wanted.space, True, ".json"),
        ):
            if not sentences or not applies:
                continue
            name = job_name(kind, run.job.title, [run.job.name, sentences])
            output = folder / "analyses" / f"{name}{end}"
            command = (
                *("python", "tools/analyze.py", kind, "--load", str(run.folder), "--data-path", *prefixes),
                *("--sentences", str(sentences), "--output", str(output)),
            )
            work = float(len(run.checkpoints)) if kind in ("self-similarity", "space") else 1.0
            job = Job(kind, name, run.job.title, command, output, (run.job.name,), work)
            found.append(Measure(run, run.steps, job))
    return found + throughput(plan, runs, folder)


def throughput(plan: Plan, runs: list[TrainingRun], folder: Path) -> list[Measure]:
    """Return the one job that times the models of the first seed beside each other, under the last of their runs."""
    lengths = plan.analyses.throughput
    timed = [run for run in runs if run.seed == plan.seeds[0] and run.model in plan.models and not run.arm.half]
    if not lengths or not timed:
        return []
    needs = tuple(run.job.name for run in timed)
    title = f"{len(timed)} models, seed {plan.seeds[0]}"
    name = job_name("throughput", title, [needs, lengths])
    output = folder / "analyses" / f"{name}.json"
    command = (
        *("python", "tools/analyze.py", "throughput", "--load", *(str(run.folder) for run in timed)),
        *("--lengths", *map(str, lengths), "--output", str(output)),
    )
    job = Job("throughput", name, title, command, output, needs, float(len(timed)))
    return [Measure(timed[-1], timed[-1].steps, job)]
