"""Rows of finished runs: a file with one line per run that has all of its measures.

The page of a ladder is made from rows alone, so a run's folder may go once its row is stored. A run is not repeated if
its row has every job of the plan, wherever it ran.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_ddrp.config import load_config
from megatron_ddrp.run.metrics import read_rows
from megatron_ddrp.tasks.compare.jobs import Job, digest
from megatron_ddrp.tasks.compare.plan import Plan
from megatron_ddrp.tasks.compare.results import HEAD_SIMILARITY, TOKEN_SIMILARITY, Results
from megatron_ddrp.tasks.compare.runs import TrainingRun
from megatron_ddrp.tasks.compare.work import Work
from megatron_ddrp.tasks.jobs.store import Row, Store

ROWS = "rows.jsonl"
DIGITS = 5
"""Decimal places of losses and similarities in curves."""


def open_rows(path: Path) -> Store:
    """Open a file of rows."""
    return Store(path, lambda row: f"{row['run']} {digest(row['jobs'])}", "a row of a finished run")


class Rungs:
    """Work of several plans, the rungs of a ladder of budgets, and the rows of its finished runs."""

    def __init__(self, plans: Sequence[Plan], folder: Path, store: Store, rows: Path | None):
        """Plan all jobs. `rows` is the file of rows, by default `ROWS` in the folder."""
        self.plan, self.folder, self.store = plans[0], folder, store
        self.rows = open_rows(rows or folder / ROWS)
        self.works = [Work(plan, folder, store) for plan in plans]

    def jobs(self) -> list[Job]:
        """Return the jobs of all rungs, each once, without those of runs that have a row."""
        found: dict[str, Job] = {}
        for work, run in self._without_row():
            found |= {job.name: job for job in (*work.corpus.jobs, *work.jobs_of(run))}
        return list(found.values())

    @property
    def runs(self) -> set[str]:
        """Names of all runs."""
        return {run.job.name for work in self.works for run in work.runs}

    def record(self) -> None:
        """Append a row for every run whose jobs are all finished."""
        for work, run in self._without_row():
            if not self.store.missing(work.jobs_of(run)):
                self.rows.append(make_row(work, run))

    def _without_row(self) -> list[tuple[Work, TrainingRun]]:
        """Return the runs without a row that has all their jobs, in the order of the rungs.

        A run that a rung and a check share belongs to the rung, which measures more.
        """
        recorded = {row["run"]: set(row["jobs"]) for row in self.rows}
        owners: dict[str, tuple[Work, TrainingRun]] = {}
        for work in sorted(self.works, key=lambda work: bool(work.plan.check)):
            for run in work.runs:
                owners.setdefault(run.job.name, (work, run))
        in_order = dict.fromkeys(run.job.name for work in self.works for run in work.runs)
        return [
            owners[name]
            for name in in_order
            if not recorded.get(name, set()).issuperset(job.name for job in owners[name][0].jobs_of(owners[name][1]))
        ]

    def plan_text(self) -> str:
        """Return the text of the plans, rung by rung."""
        lines = [f"plan {self.plan.file}: {len(self.works)} rungs, into {self.folder}"]
        for work in self.works:
            lines.append(f"{f'check, {work.plan.check}' if work.plan.check else 'rung'}: {work.summary()}")
            lines.append("  " + "; ".join(model.name for model in work.plan.rows))
            if work.plan.half_budget:
                lines.append("  and with half the budget: " + "; ".join(work.plan.half_budget))
        return "\n".join(lines)


def make_row(work: Work, run: TrainingRun) -> Row:
    """Return the row of a run whose jobs are all finished."""
    from megatron_ddrp.model import count_parameters, on_meta_device  # here, because --help must not import torch

    results, jobs, plan = Results(work, run), work.jobs_of(run), work.plan
    config = load_config(run.folder)  # unlike the plan's, it has the size of the vocabulary
    parameters, _ = count_parameters(on_meta_device(config.model, config.objective))
    finished = {row["job"]: row for row in work.store}
    course = finished[run.job.name]
    found: Row = {
        "run": run.job.name,
        "jobs": [job.name for job in jobs],
        "model": run.model.name,
        "half": run.arm.half,
        "encoding": run.model.encoding,
        "objective": run.model.objective,
        "flags": dict(run.model.flags),
        "baseline": plan.baseline,
        "check": plan.check,
        "seed": run.seed,
        "budget": str(plan.budget),
        "planned_tokens": planned_tokens(work, run),
        "steps": run.steps,
        "parameters": parameters,
        "common": dict(plan.flags),
        "hardware": course["hardware"],
        "versions": course["versions"],
        "workers": course["workers"],
        "seconds": sum(finished[job.name]["seconds"] for job in jobs),
    }
    return found | _curves(run, results) | _measured(run, results)


def planned_tokens(work: Work, run: TrainingRun) -> int:
    """Return the tokens of the rung's budget: steps x batch x sequence length."""
    training = run.config.training
    return round(work.steps[run.model.name] * training.global_batch_size * run.config.mean_seq_length)


def _curves(run: TrainingRun, results: Results) -> Row:
    """Return the number of tokens of a run, and its losses and similarities over tokens."""
    rows = read_rows(run.folder)
    consumed = max((row["consumed_tokens"] for row in rows if "consumed_tokens" in row), default=0)
    per_step = consumed / run.steps

    def points(key: str) -> list[list[float]]:
        return [[round(row["iteration"] * per_step), round(row[key], DIGITS)] for row in rows if row.get(key)]

    similar = zip(
        *(results.curves[m][run.arm].get(run.seed, []) for m in (TOKEN_SIMILARITY, HEAD_SIMILARITY)), strict=True
    )
    return {
        "tokens": consumed,
        "curve": points("lm_loss"),
        "validation": points("valid_lm_loss"),
        "similarity": [[round(step * per_step), round(s, DIGITS), round(h, DIGITS)] for (step, s), (_, h) in similar],
    }


def _measured(run: TrainingRun, results: Results) -> dict[str, Any]:
    """Return a run's values by measure, and its accuracy on minimal pairs by paradigm and by field."""
    pairs, paradigms = results.items.count_pairs()
    return {
        "values": {name: by_arm[run.arm][run.seed] for name, by_arm in results.values.items() if run.arm in by_arm},
        "paradigms": results.items.accuracies(run.arm),
        "fields": results.fields.get(run.arm, {}).get(run.seed, {}),
        "pairs": pairs // paradigms if paradigms else 0,
    }
