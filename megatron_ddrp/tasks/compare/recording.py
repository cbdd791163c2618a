"""Row of a finished run: its settings, curves and measures as one JSON object, for the page of a ladder."""

from __future__ import annotations

from typing import Any

from megatron_ddrp.config import load_config
from megatron_ddrp.model import count_parameters, on_meta_device
from megatron_ddrp.run.metrics import read_rows
from megatron_ddrp.tasks.compare.results import Results
from megatron_ddrp.tasks.compare.runs import TrainingRun
from megatron_ddrp.tasks.compare.work import Work
from megatron_ddrp.tasks.jobs.store import Row
from megatron_ddrp.tasks.ladder.measures import HEAD_SIMILARITY, TOKEN_SIMILARITY

DIGITS = 5
"""Decimal places of losses and similarities in curves."""


def make_row(work: Work, run: TrainingRun, results: Results) -> Row:
    """Return the row of a finished run with the results of those of its jobs that are finished."""
    plan = work.plan
    config = load_config(run.folder)  # unlike the plan's, it has the size of the vocabulary
    parameters, _ = count_parameters(on_meta_device(config.model, config.objective))
    finished = {row["job"]: row for row in work.store}
    course = finished[run.job.name]
    jobs = [job for job in work.jobs_of(run) if job.name in finished]
    found: Row = {
        "run": run.job.name,
        "jobs": [job.name for job in jobs],
        "model": run.model.name,
        "half": run.half,
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
    """Return the tokens of the rung's budget, equal for all models of a budget in tokens.

    Other budgets give steps x batch x sequence length.
    """
    if work.plan.budget.kind == "tokens":
        return round(work.plan.budget.amount)
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
    pairs = results.items.pairs_by_paradigm(run.arm, run.seed)
    return {
        "values": {
            name: by_arm[run.arm][run.seed]
            for name, by_arm in results.values.items()
            if run.seed in by_arm.get(run.arm, {})
        }
        | dict.fromkeys(results.not_finite.get((run.arm, run.seed), ())),
        "paradigms": results.items.accuracies(run.arm, run.seed),
        "fields": results.fields.get(run.arm, {}).get(run.seed, {}),
        "pairs": pairs if len(set(pairs.values())) > 1 else max(pairs.values(), default=0),
    }
