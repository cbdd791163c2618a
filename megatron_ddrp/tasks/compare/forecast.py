"""How long jobs take, from the finished ones of their kind or else by the plan's own word, and lines that say so."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterable, Sequence

from megatron_ddrp.run.log import duration
from megatron_ddrp.run.metrics import read_rows
from megatron_ddrp.tasks.compare.jobs import KINDS, Job
from megatron_ddrp.tasks.compare.plan import Plan
from megatron_ddrp.tasks.store import Store

_USUAL = {"vocabulary": 60.0, "dataset": 120.0, "probe": 30.0, "self-similarity": 30.0, "triangle": 15.0}
_USUAL["attention-maps"] = 15.0
"""Seconds of the small jobs, until some of them are done."""


class Forecast:
    """Seconds that jobs will take."""

    def __init__(self, plan: Plan, store: Store[str]):
        self.plan, self.store = plan, store

    def seconds(self, job: Job) -> float | None:
        """Of one job; None where nothing is known yet."""
        rates = [row["seconds"] / row["work"] for row in self.store.rows if row["kind"] == job.kind]
        if rates:
            return statistics.median(rates) * job.work
        expected = self.plan.expected
        if job.kind == "course":
            if self.plan.budget.kind == "minutes":
                return self.plan.budget.amount * 60
            return expected.step_seconds * job.work if expected.step_seconds else None
        if job.kind == "glue":
            return expected.glue_minutes * 60 if expected.glue_minutes else None
        return _USUAL[job.kind]

    def total(self, jobs: Iterable[Job]) -> float | None:
        """Of several, one after the other."""
        each = [self.seconds(job) for job in jobs]
        known = [seconds for seconds in each if seconds is not None]
        return sum(known) if len(known) == len(each) else None

    def eta(self, left: Sequence[Job], workers: int, spent: float = 0.0) -> str:
        """Time until `left` are done, of which `spent` seconds are done already."""
        total = self.total(left)
        return "not known yet" if total is None else duration(max(0.0, total - spent) / workers)

    def plan_lines(self, jobs: Sequence[Job], workers: int) -> list[str]:
        """What is to do and how long it will take, by kind."""
        missing = [job for job in jobs if job.name not in self.store]
        lines = [f"{len(missing)} of {len(jobs)} jobs to do, {workers} at once"]
        for kind, count in sorted(Counter(job.kind for job in missing).items(), key=lambda item: KINDS.index(item[0])):
            total = self.total(job for job in missing if job.kind == kind)
            told = "time not known before one is done" if total is None else f"{total / 3600:.2f} hours of one worker"
            lines.append(f"  {count:4} x {kind}: {told}")
        total = self.total(missing)
        if total is None:
            lines.append("  expected: not known; the plan's `expected` may say it, or the first finished jobs will")
        else:
            source = "measured" if any(row["kind"] == "course" for row in self.store.rows) else "the plan's own word"
            lines.append(f"  expected: {total / 3600:.2f} hours of one worker, {duration(total / workers)} ({source})")
        return lines

    def line(self, job: Job, seconds: float, left: Sequence[Job], workers: int) -> str:
        """A finished job."""
        loss = ""
        if job.kind == "course":
            losses = [row["valid_lm_loss"] for row in read_rows(job.output) if "valid_lm_loss" in row]
            loss = f", validation masked-LM loss {losses[-1]:.4f}" if losses else ""
        return f"{job.kind} {job.title}: {duration(seconds)}{loss}, eta {self.eta(left, workers)}"

    def status(self, running: Sequence[tuple[Job, float]], left: Sequence[Job], workers: int) -> str:
        """What runs, where it stands, and how long all of it will take."""
        now = time.monotonic()
        parts = []
        for job, began in running:
            rows = read_rows(job.output) if job.kind == "course" else []
            step = f" step {rows[-1]['iteration']:,} of {job.work:,.0f}" if rows else ""
            parts.append(f"{job.kind} {job.title}{step} since {duration(now - began)}")
        spent = sum(min(now - began, self.seconds(job) or 0.0) for job, began in running)
        return f"{'; '.join(parts)}; eta {self.eta(left, workers, spent)}"
