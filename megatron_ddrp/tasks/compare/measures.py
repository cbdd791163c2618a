"""What is measured on the checkpoints of courses: GLUE scores, and the analyses of tools/analyze.py."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from megatron_ddrp.config import encoding_class
from megatron_ddrp.tasks.compare.corpus import CorpusFiles, fingerprint, is_weight
from megatron_ddrp.tasks.compare.courses import Course
from megatron_ddrp.tasks.compare.flags import words
from megatron_ddrp.tasks.compare.jobs import Job, digest, job_name
from megatron_ddrp.tasks.compare.plan import Plan


class Score(NamedTuple):
    """One checkpoint on GLUE."""

    course: Course
    step: int
    job: Job


class Analysis(NamedTuple):
    """One course looked into."""

    course: Course
    job: Job


def glue_scores(plan: Plan, courses: list[Course], folder: Path) -> list[Score]:
    """The last checkpoint of every course; of the models of figure 3b every checkpoint, the earlier ones at the end."""
    if plan.glue is None:
        return []
    data = [fingerprint(plan, "glue", f"{plan.glue.data_dir}/{task}") for task in plan.glue.tasks]
    last = [_score(plan, course, course.steps, data, folder) for course in courses]
    curves = [course for course in courses if course.model.name in plan.glue.curve and not course.half]
    earlier = [_score(plan, c, step, data, folder) for c in curves for step in c.checkpoints if step != c.steps]
    return last + earlier


def _score(plan: Plan, course: Course, step: int, data: list[object], folder: Path) -> Score:
    assert plan.glue is not None
    # A task added to the plan later joins the runs of the others: the folder is the same.
    facts = [course.job.name, step, plan.glue.flags]
    title = f"{course.job.title}, step {step:,}"
    output = folder / "glue" / f"{course.folder.name}-{step}-{digest(facts)}"
    command = (
        *("python", "-m", "tasks.glue", "--tasks", *plan.glue.tasks, "--data-dir", plan.glue.data_dir),
        *("--load", str(course.checkpoint(step)), "--output-dir", str(output), *words(plan.glue.flags)),
    )
    name = job_name("glue", title, [facts, plan.glue.tasks, data])
    return Score(course, step, Job("glue", name, title, command, output / "table.json", (course.job.name,)))


def analyses(plan: Plan, courses: list[Course], corpus: CorpusFiles, folder: Path) -> list[Analysis]:
    """Of the courses at the full budget; attention maps of the first seed alone."""
    wanted = plan.analyses
    found = []
    for course in courses:
        if course.half:
            continue
        if wanted.self_similarity:
            found.append(_analysis(course, "self-similarity", wanted.self_similarity, ".json", corpus, folder))
        if wanted.triangle and encoding_class(course.model.encoding).is_relative:
            found.append(_analysis(course, "triangle", wanted.triangle, ".json", corpus, folder))
        if wanted.attention_maps and course.seed == plan.seeds[0] and course.model in plan.models:
            found.append(_analysis(course, "attention-maps", wanted.attention_maps, ".png", corpus, folder))
    return found


def _analysis(course: Course, kind: str, sentences: int, end: str, corpus: CorpusFiles, folder: Path) -> Analysis:
    name = job_name(kind, course.job.title, [course.job.name, sentences])
    output = folder / "analyses" / f"{name}{end}"
    prefixes = [word for word in corpus.data_path if not is_weight(word)]
    command = (
        *("python", "tools/analyze.py", kind, "--load", str(course.folder), "--data-path", *prefixes),
        *("--sentences", str(sentences), "--output", str(output)),
    )
    work = float(len(course.checkpoints)) if kind == "self-similarity" else 1.0
    return Analysis(course, Job(kind, name, course.job.title, command, output, (course.job.name,), work))
