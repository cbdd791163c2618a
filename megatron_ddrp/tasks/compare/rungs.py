"""Work of several plans, and the file of rows: one line per finished run that has all of its measures.

The page of a ladder is made from rows alone, so a run's folder may go once its row is stored. A run is not repeated if
its row has every job of the plan, wherever it ran.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_ddrp.tasks.compare.jobs import Job
from megatron_ddrp.tasks.compare.plan import Plan
from megatron_ddrp.tasks.compare.runs import TrainingRun
from megatron_ddrp.tasks.compare.work import Work
from megatron_ddrp.tasks.jobs.store import Row, Store, digest

ROWS = "rows.jsonl"


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
        self._owners: dict[str, tuple[Work, TrainingRun]] = {}
        """Name of each run → its rung, which measures more than a check that shares the run."""
        for work in sorted(self.works, key=lambda work: bool(work.plan.check)):
            for run in work.runs:
                self._owners.setdefault(run.job.name, (work, run))
        self._wanted = {name: {job.name for job in work.jobs_of(run)} for name, (work, run) in self._owners.items()}
        """Name of each run → names of its jobs."""

    def first_jobs(self) -> list[Job]:
        """Return the jobs that make the data of runs without a row."""
        return list({job.name: job for work, _ in self._without_row() for job in work.corpus.jobs}.values())

    def jobs(self) -> list[Job]:
        """Return the jobs of all rungs, each once, without those of runs that have a row."""
        found: dict[str, Job] = {}
        for work, run in self._without_row():
            found |= {job.name: job for job in (*work.corpus.jobs, *work.jobs_of(run))}
        return list(found.values())

    @property
    def missing_runs(self) -> list[TrainingRun]:
        """Runs that are still to be trained."""
        return [run for _, run in self._without_row() if run.job.name not in self.store]

    def record(self) -> None:
        """Append a row for every run whose jobs are all finished."""
        from megatron_ddrp.tasks.compare.recording import make_row  # here, because --help must not import torch
        from megatron_ddrp.tasks.compare.results import Results

        for work, run in self._without_row():
            if not self.store.missing(work.jobs_of(run)):
                self.rows.append(make_row(work, run, Results(work, run)))

    def rank(self, row: Row) -> int:
        """Return what a row is worth to the plan: 2 with all jobs of its run, 1 with some of them and no others.

        0 is for a run of another plan, and for one that was measured in another way.
        """
        wanted, has = self._wanted.get(row["run"]), set(row["jobs"])
        if wanted is None:
            return 0
        return 2 if has >= wanted else int(has <= wanted)

    @property
    def left_out(self) -> list[str]:
        """Runs of the plan all of whose rows were measured in another way."""
        ranks: dict[str, int] = {}
        for row in self.rows:
            ranks[row["run"]] = max(ranks.get(row["run"], 0), self.rank(row))
        return [name for name in self._wanted if ranks.get(name) == 0]

    def _without_row(self) -> list[tuple[Work, TrainingRun]]:
        """Return the runs without a row that has all their jobs, in the order of the rungs."""
        recorded = {row["run"] for row in self.rows if self.rank(row) == 2}
        in_order = dict.fromkeys(run.job.name for work in self.works for run in work.runs)
        return [self._owners[name] for name in in_order if name not in recorded]

    def plan_text(self) -> str:
        """Return the text of the plans, rung by rung."""
        lines = [f"plan {self.plan.file}: {len(self.works)} rungs, into {self.folder}"]
        for work in self.works:
            lines.append(f"{f'check, {work.plan.check}' if work.plan.check else 'rung'}: {work.summary()}")
            lines.append("  " + "; ".join(model.name for model in work.plan.rows))
            if work.plan.half_budget:
                lines.append("  and with half the budget: " + "; ".join(work.plan.half_budget))
        return "\n".join(lines)
