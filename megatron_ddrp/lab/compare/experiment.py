"""Jobs of an experiment: those of its plans, one per budget or side experiment, and the rows of its finished runs.

The page is made from rows alone, so a run's folder may go once its row is stored. A run is not repeated if its row has
every job of the plan, wherever it ran.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_ddrp.data.progress import track
from megatron_ddrp.lab.compare.jobs import Job, log_file
from megatron_ddrp.lab.compare.measures import Work
from megatron_ddrp.lab.compare.plan import Plan
from megatron_ddrp.lab.compare.rows import RunRow, as_run, open_rows, samples_file, write_samples
from megatron_ddrp.lab.compare.running import last_line
from megatron_ddrp.lab.compare.runs import TrainingRun
from megatron_ddrp.tasks.jobs.store import Row, Store

ROWS = "rows.jsonl"


class Experiment:
    """All plans of a file with their jobs and rows."""

    def __init__(self, plans: Sequence[Plan], folder: Path, store: Store, rows: Path | None = None):
        """Plan all jobs. `rows` is the file of rows, by default `ROWS` in the folder."""
        self.plan, self.folder, self.store = plans[0], folder, store
        self.rows = open_rows(rows or folder / ROWS)
        self.works = [Work(plan, folder, store) for plan in plans]
        self._owners: dict[str, tuple[Work, TrainingRun]] = {}
        """Name of each run → its plan, which measures more than a side experiment that shares the run."""
        for work in sorted(self.works, key=lambda work: bool(work.plan.check)):
            for run in work.runs:
                self._owners.setdefault(run.job.name, (work, run))
        self._wanted = {name: {job.name for job in work.jobs_of(run)} for name, (work, run) in self._owners.items()}
        """Name of each run → names of its jobs."""

    def data_jobs(self) -> list[Job]:
        """Return the jobs that make the data of the runs without a row."""
        return list({job.name: job for work, _ in self._without_row() for job in work.corpus.jobs}.values())

    def jobs(self) -> list[Job]:
        """Return all jobs, each once and behind those that it needs, without those of runs that have a row.

        GLUE on earlier checkpoints comes last.
        """
        known = {job.name: job for work in self.works for run in work.runs for job in work.jobs_of(run)}
        later = {one.job.name for work in self.works for one in work.measures if one.step != one.run.steps}
        wanted = [(job, work) for work, run in self._without_row() for job in work.jobs_of(run)]
        found = {job.name: job for job in self.data_jobs()}
        for job, work in sorted(wanted, key=lambda item: item[0].name in later):
            needed = [known[name] for name in job.needs if name in known and name not in self.store]
            found |= {one.name: one for one in (*work.corpus.jobs, *needed, job)}
        return list(found.values())

    @property
    def missing_runs(self) -> list[TrainingRun]:
        """Runs that are still to be trained."""
        return [run for _, run in self._without_row() if run.job.name not in self.store]

    def record(self) -> None:
        """Append a row for every run whose jobs are all finished."""
        from megatron_ddrp.lab.compare.recording import make_row  # here, because --help must not import torch

        for work, run in self._without_row():
            if not self.store.missing(work.jobs_of(run)):
                self.rows.append(make_row(work, run))

    def finished_runs(self) -> list[RunRow]:
        """Return the runs that are trained, from their rows, or from the jobs finished so far.

        What is missing beside the rows, scores on resampled test items, is drawn and stored, if the jobs' outputs are
        still there.
        """
        from megatron_ddrp.lab.compare.recording import draw_samples, make_row

        self.rows.refresh()
        self.record()
        found: dict[str, Row] = {}
        unfinished = [make_row(work, run) for work, run in self._without_row() if run.job.name in self.store]
        for row in filter(self.rank, (*self.rows, *unfinished)):
            best = found.get(row["run"], row)  # of two rows of the same worth the later one
            found[row["run"]] = max(row, best, key=lambda one: (self.rank(one), len(one["jobs"])))
        folder = self.rows.path.parent
        for row in track(list(found.values()), "run", "resampling items"):
            if not samples_file(folder, row).is_file() and (samples := draw_samples(*self._owners[row["run"]])):
                write_samples(folder, row, samples)
        return [as_run(row, folder) for row in found.values()]

    def rank(self, row: Row) -> int:
        """Return what a row is worth to the plans: 2 with all jobs of its run, 1 with some of them and no others.

        0 is for a run of another plan, and for one that was measured in another way.
        """
        wanted, has = self._wanted.get(row["run"]), set(row.get("jobs", ()))
        if wanted is None:
            return 0
        return 2 if has >= wanted else int(has <= wanted)

    @property
    def missing(self) -> list[str]:
        """One sentence per job that is not finished, and per run left out."""
        items = [f"{job}: {self._why(job)}" for job in self.store.missing(self.jobs())]
        return items + [f"left out until it is measured as the plan says: {name}" for name in self.left_out]

    def _why(self, job: Job) -> str:
        log = log_file(self.folder, job)
        if not log.is_file():
            return "not started"
        return f"started, not finished; its log {log.relative_to(self.folder)} ends: {last_line(log)}"

    @property
    def left_out(self) -> list[str]:
        """Runs of the plans all of whose rows were measured in another way, and which the store does not have."""
        others = {row["run"] for row in self.rows} - {row["run"] for row in self.rows if self.rank(row)}
        return [name for name in self._wanted if name in others and name not in self.store]

    def _without_row(self) -> list[tuple[Work, TrainingRun]]:
        """Return the runs without a row that has all their jobs, in the order of the plans."""
        recorded = {row["run"] for row in self.rows if self.rank(row) == 2}
        in_order = dict.fromkeys(run.job.name for work in self.works for run in work.runs)
        return [self._owners[name] for name in in_order if name not in recorded]

    def plan_text(self) -> str:
        """Return the text of the plans: budgets, seeds, models and steps."""
        lines = [f"plan {self.plan.file}: {len(self.works)} budget{'s' * (len(self.works) > 1)}, into {self.folder}"]
        for work in self.works:
            plan = work.plan
            lines.append(f"{f'check, {plan.check}: ' if plan.check else ''}{work.summary()}")
            for model in plan.models:
                steps = f"{work.steps[model.name]:,} steps{', and half of it' * (model.name in plan.half_budget)}"
                lines.append(f"  {model.name}: {model.encoding}, {model.objective}, {steps}")
            lines += ["  no GLUE in this plan"] * (plan.glue is None)
        return "\n".join(lines)

    def times(self) -> dict[str, tuple[int, float]]:
        """Return kind of job → number and wall time in seconds of its finished jobs, those of these plans alone."""
        names = {job.name for work in self.works for job in work.corpus.jobs}
        names = names.union(*self._wanted.values())
        found: dict[str, tuple[int, float]] = {}
        for row in self.store:
            if row["job"] in names:
                count, seconds = found.get(row["kind"], (0, 0.0))
                found[row["kind"]] = count + 1, seconds + row["seconds"]
        return found
