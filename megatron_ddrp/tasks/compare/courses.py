"""The trainings of a plan: which models, seeds and steps, and the command line of each.

Courses of one seed see the same data in the same order under the same masks, whatever model they train. The arm at
half of the budget is trained afresh with a schedule of half the length, so that its rate too has come to its end.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ddrp.checkpoint import tag
from megatron_ddrp.config import Config, concerns
from megatron_ddrp.run.metrics import read_rows
from megatron_ddrp.tasks.compare.corpus import CorpusFiles
from megatron_ddrp.tasks.compare.flags import Flags, merged, parse_config, words
from megatron_ddrp.tasks.compare.jobs import Job, job_name
from megatron_ddrp.tasks.compare.plan import Model, Plan

LOGGED = 100
"""Rows of metrics.jsonl that a course writes."""
EVAL_ITERS = 20
PROBE_STEPS, PROBE_WARM_UP = 40, 8

_NO_MATTER = {
    "checkpoint": ("save", "load", "keep_last"),
    "logging": ("log_interval", "tensorboard_dir", "wandb_project"),
    "training": ("num_threads",),
    "data": ("data_path", "vocab_file", "tokenizer_model", "index_cache_dir"),
}
"""Settings that do not decide what a course gives; the corpus has a key of its own."""


@dataclass(frozen=True)
class Course:
    """One training."""

    model: Model
    seed: int
    half: bool
    config: Config
    folder: Path
    """Its --save."""
    job: Job

    @property
    def steps(self) -> int:
        """Of the whole course."""
        return self.config.training.train_iters

    @property
    def checkpoints(self) -> list[int]:
        """Steps at which it is saved."""
        return sorted({*range(self._interval, self.steps, self._interval), self.steps})

    @property
    def _interval(self) -> int:
        return self.config.checkpoint.save_interval

    def checkpoint(self, step: int) -> Path:
        """Folder of a checkpoint."""
        return self.folder / tag(step)


def probe_jobs(plan: Plan, corpus: CorpusFiles, folder: Path) -> dict[str, Job]:
    """Model's name → the short course that tells how long its step takes; empty unless the budget is in minutes."""
    if plan.budget.kind != "minutes":
        return {}
    schedule: Flags = (("log-interval", ("4",)), ("eval-interval", ("0",)), ("save-interval", (str(PROBE_STEPS),)))
    probes = {}
    for model in plan.rows:
        course = _course(plan, corpus, folder, "probe", model, plan.seeds[0], PROBE_STEPS, schedule)
        probes[model.name] = course.job
    return probes


def probed_seconds(job: Job) -> float:
    """Median seconds of a step of a finished probe, its first steps left out."""
    rows = read_rows(job.output)
    return statistics.median(r["step_time"] for r in rows if "step_time" in r and r["iteration"] > PROBE_WARM_UP)


def count_steps(plan: Plan, step_seconds: Mapping[str, float]) -> dict[str, int]:
    """Model's name → steps of the full budget. `step_seconds` is needed for a budget in minutes alone."""
    steps = {}
    for model in plan.rows:
        if plan.budget.kind == "minutes":
            if model.name not in step_seconds:
                continue
            count = plan.budget.amount * 60 / step_seconds[model.name]
        elif plan.budget.kind == "tokens":
            config = parse_config(plan.flags + model.flags, str(plan.file))
            count = plan.budget.amount / (config.training.global_batch_size * config.model.seq_length)
        else:
            count = plan.budget.amount
        steps[model.name] = max(2, round(count))
    return steps


def all_courses(plan: Plan, corpus: CorpusFiles, folder: Path, steps: Mapping[str, int]) -> list[Course]:
    """Every course of the plan whose steps are known, seed by seed, without those that are the same as one before."""
    courses: dict[str, Course] = {}
    for seed in plan.seeds:
        grid = plan.grid if seed in plan.grid_seeds else ()
        arms = [(model, False) for model in plan.models]
        arms += [(plan.model(name), True) for name in plan.half_budget]
        arms += [(model, False) for model in grid]
        for model, half in arms:
            if model.name not in steps:
                continue
            count = max(1, steps[model.name] // 2) if half else steps[model.name]
            interval = -(-count // plan.checkpoints)
            schedule = (
                ("log-interval", (str(max(1, count // LOGGED)),)),
                ("eval-interval", (str(interval),)),
                ("eval-iters", (str(EVAL_ITERS),)),
                ("save-interval", (str(interval),)),
            )
            course = _course(plan, corpus, folder, "course", model, seed, count, schedule, half)
            courses.setdefault(course.job.name, course)
    return list(courses.values())


def _course(
    plan: Plan,
    corpus: CorpusFiles,
    folder: Path,
    kind: str,
    model: Model,
    seed: int,
    steps: int,
    schedule: Flags,
    half: bool = False,
) -> Course:
    flags = merged(
        ("data-path", corpus.data_path),
        ("vocab-file", (corpus.vocab_file,)),
        ("tokenizer-type", (corpus.tokenizer_type,)),
        ("position-encoding", (model.encoding,)),
        ("objective", (model.objective,)),
        *schedule,  # a plan may choose other intervals of its own
        *plan.flags,
        *model.flags,
        ("train-iters", (str(steps),)),
        ("seed", (str(seed),)),
    )
    config = parse_config(flags, f"{plan.file}: {model.name}")
    arm = f"{model.name}, half the budget" if half else model.name
    name = job_name(kind, f"{arm} {seed}", [_facts(config), corpus.key])
    output = folder / f"{kind}s" / name.removeprefix(f"{kind}-")
    places = (("save", (str(output),)), ("load", (str(output),)))
    command = (*plan.launcher, "pretrain_bert.py", *words(flags + places))
    needs = tuple(job.name for job in corpus.jobs)
    job = Job(kind, name, f"{arm}, seed {seed}", command, output, needs, float(steps))
    return Course(model, seed, half, config, output, job)


def _facts(config: Config) -> dict[str, dict[str, Any]]:
    """The settings that decide what a course gives, where they are not the default.

    A flag that is new in a later version does not make finished courses strangers.
    """
    facts = {}
    for concern, section in concerns().items():
        ours, default = getattr(config, concern), section()
        facts[concern] = {
            f.name: getattr(ours, f.name)
            for f in dataclasses.fields(section)
            if getattr(ours, f.name) != getattr(default, f.name) and f.name not in _NO_MATTER.get(concern, ())
        }
    return facts
