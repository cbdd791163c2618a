"""A plan of two models and three seeds on the tiny corpus, and an output folder filled as its jobs would fill it."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_ddrp.config import save_config
from megatron_ddrp.data.atomic import object_sum
from megatron_ddrp.lab.compare.experiment import Experiment, PlanJobs
from megatron_ddrp.lab.compare.measures import Measure
from megatron_ddrp.lab.compare.page import Page
from megatron_ddrp.lab.compare.plan import ComparisonPlan, read_plans
from megatron_ddrp.lab.compare.runs import Job, PlannedRun, open_store

HARDWARE = {"hardware": "2 cores of Some CPU", "versions": {"Python": "3.11.0"}, "workers": 2, "threads": "1"}


def read_plan(file, given=None) -> ComparisonPlan:
    (plan,) = read_plans(file, given)
    return plan


@pytest.fixture
def values(tiny_corpus):
    """A whole plan as YAML values; tests change what they are about."""
    names = {"BERT (MLM)": "mlm", "BERT (MTH)": "mth"}
    return {
        "models": [{"name": name, "encoding": "absolute", "objective": own} for name, own in names.items()],
        **{"seeds": 3, "budget": {"steps": 40}, "checkpoints": 2, "half_budget": ["BERT (MTH)"]},
        "corpus": {"data_path": [str(tiny_corpus.prefix)], "vocab_file": str(tiny_corpus.vocab_file)},
        "model": {"num-layers": 1, "hidden-size": 16, "num-attention-heads": 2, "seq-length": 32},
        "training": {"micro-batch-size": 4, "global-batch-size": 4, "lr": 1e-3},
        "analyses": {"self-similarity": 10},
    }


@pytest.fixture
def write(tmp_path):

    def to_file(values) -> Path:
        path = tmp_path / "plan.yaml"
        path.write_text(yaml.safe_dump(values), encoding="utf-8")
        return path

    return to_file


@pytest.fixture
def open_work(write, tmp_path):
    """values → the `PlanJobs` of an output folder."""
    folder = tmp_path / "out"
    return lambda values: PlanJobs(read_plan(write(values)), folder, open_store(folder))


@pytest.fixture
def write_rows(tmp_path):
    """Return a function that writes rows with their sums into a file of this name."""

    def write(rows, name="rows.jsonl") -> Path:
        rows = json.loads(json.dumps(list(rows)))
        return write_lines(tmp_path / name, [row | {"crc32": object_sum(row)} for row in rows])

    return write


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def experiment_of(work: PlanJobs) -> Experiment:
    return Experiment([work.plan], work.folder, work.store)


def page_of_work(work: PlanJobs) -> Page:
    return Page(experiment_of(work).finished_runs(), work.folder)


def write_page(work: PlanJobs) -> str:
    """The text of the page of the jobs finished so far, written with its files."""
    experiment = experiment_of(work)
    page_of_work(work).write(experiment.missing, experiment.times())
    return (work.folder / "page.md").read_text(encoding="utf-8")


def measures_of(work: PlanJobs, *kinds: str) -> list[Measure]:
    return [measure for kind in kinds for measure in work.measures if measure.job.kind == kind]


def record(work: PlanJobs, job: Job) -> None:
    """Put a job into the store as finished."""
    row = {"job": job.name, "kind": job.kind, "title": job.title, "command": " ".join(job.command), "work": job.work}
    work.store.append(row | {"seconds": 10.0, "started": "2020-01-01"} | HARDWARE)


def finish_run(work: PlanJobs, run: PlannedRun, loss: float, step_time: float = 0.5) -> None:
    """A run's folder and line, with its last validation loss and its median time of a step, neither the largest nor the
    smallest nor the mean of the run; its vocabulary has 100 pieces."""
    run.folder.mkdir(parents=True, exist_ok=True)
    save_config(replace(run.config, model=replace(run.config.model, vocab_size=100)), run.folder)
    rows = [{"iteration": 1, "step_time": 60.0, "consumed_tokens": 100}]
    rows += [{"iteration": run.steps // 4, "step_time": step_time * share} for share in (3.0, 0.5, 1.0)]
    rows.append({"iteration": run.steps // 4, "valid_lm_loss": loss - 0.25})
    for step in run.checkpoints:
        rows.append({"iteration": step, "step_time": step_time, "consumed_tokens": 100 * step})
        rows.append({"iteration": step, "valid_lm_loss": loss + (run.steps - step) / 100})
    write_lines(run.folder / "metrics.jsonl", rows)
    record(work, run.job)


def finish_runs(work: PlanJobs, loss: float = 6.5) -> None:
    for run in work.runs:
        finish_run(work, run, loss)


def write_tuning(job: Job, rows: Iterable[dict[str, Any]]) -> None:
    """Write the files of tasks.glue and tasks.finetune but predictions: runs with these parts, and an empty table."""
    usual = {"batch_size": 32, "lr": 3e-5, "epochs": 4, "seed": 1, "max_seq_length": 32, "encoder": job.name}
    usual |= {"data": "d", "micro_batch_size": 16, "layerwise_lr_decay": 1.0, "precision": "fp32", "load": "iter"}
    usual |= {"max_train_examples": None, "train_examples": 9, "dev_examples": 9, "seconds": 1.0, "metric": "m"}
    job.output.parent.mkdir(parents=True, exist_ok=True)
    write_lines(job.output.parent / "runs.jsonl", [usual | row | {"epoch_scores": [row["score"]]} for row in rows])
    (job.output.parent / "table.json").write_text("{}")


def finish_measure(work: PlanJobs, measure: Measure, found: dict[str, Any]) -> None:
    """The output of a measure's job, and its line."""
    measure.job.output.parent.mkdir(parents=True, exist_ok=True)
    measure.job.output.write_text(json.dumps(found), encoding="utf-8")
    record(work, measure.job)


def finish_similarity(work: PlanJobs, run: PlannedRun, tokens: float, heads: float) -> None:
    """A run's self-similarity, as tools/analyze.py writes it."""
    analysis = next(a for a in work.measures if a.run == run and a.job.kind == "self-similarity")
    rows = [{"iteration": 7, "token_similarity": 9.0, "head_similarity": 9.0}]  # where it was stopped once
    for step in run.checkpoints:
        more = 0.05 * (step < run.steps)
        rows.append({"iteration": step, "token_similarity": tokens + more, "head_similarity": heads + more})
    finish_measure(work, analysis, {"checkpoints": rows})
