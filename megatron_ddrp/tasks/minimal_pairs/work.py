"""Execution of one command: plan, worker processes and progress bar."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tqdm import tqdm

from megatron_ddrp.data.progress import progress
from megatron_ddrp.errors import UserError
from megatron_ddrp.run.log import duration
from megatron_ddrp.tasks.jobs.forecast import Forecast
from megatron_ddrp.tasks.jobs.store import left_to_others, one_at_a_time
from megatron_ddrp.tasks.jobs.workers import SPAWN, device_of, drain, share_out, share_threads
from megatron_ddrp.tasks.minimal_pairs.pairs import Paradigm, published_levels, read_pairs
from megatron_ddrp.tasks.minimal_pairs.report import report_of, write_report
from megatron_ddrp.tasks.minimal_pairs.results import SCORES_FILE, PairJob, PairStore
from megatron_ddrp.tasks.minimal_pairs.scoring import Scorer, Subject, encode_pairs, score_sentences, subjects_of

MOST_WORKERS = 8
"""Largest default number of worker processes on CPUs; each process holds an encoder."""
_PROBE_SECONDS = 0.3


class PairPlan:
    """Encoders and paradigms of a command, and the number of rows of each job."""

    def __init__(self, options: argparse.Namespace):
        """Read all files. Raises `UserError` for the first invalid one."""
        self.options = options
        paradigms = read_pairs(options.data_dir, options.max_pairs)
        seeds = list(range(1, options.seeds + 1)) if options.random_init else [None]
        folders = dict.fromkeys(options.load)
        subjects = [subject for folder in folders for subject in subjects_of(folder, seeds)]
        self.paradigms = {paradigm.uid: paradigm for paradigm in paradigms}
        self.subjects: dict[tuple[str, int | None], Subject] = {}
        self.left_out: list[str] = []
        for subject in subjects:
            twin = self.subjects.setdefault((subject.fingerprint, subject.seed), subject)
            if twin is not subject:
                self.left_out.append(f"{subject.name}: left out, it has the same weights as {twin.name}")
        self.rows: dict[PairJob, int] = {}
        counted: dict[tuple[str, int], list[int]] = {}
        for subject in self.subjects.values():
            tokenizer = (subject.tokenizer.fingerprint, subject.max_length)
            if tokenizer not in counted:
                counted[tokenizer] = [_num_rows(paradigm, subject) for paradigm in paradigms]
            for paradigm, rows in zip(paradigms, counted[tokenizer], strict=True):
                job = (subject.fingerprint, subject.seed, paradigm.uid, paradigm.digest, options.score)
                self.rows[PairJob(*job)] = rows

    @property
    def jobs(self) -> list[PairJob]:
        """All jobs, grouped by encoder."""
        return list(self.rows)

    def num_pairs(self) -> int:
        """Return the number of pairs over all paradigms."""
        return sum(map(len, self.paradigms.values()))


def _num_rows(paradigm: Paradigm, subject: Subject) -> int:
    return sum(map(len, sum(encode_pairs(paradigm, subject.tokenizer, subject.max_length), [])))


class PairForecast(Forecast[PairJob]):
    """Forecast of jobs from an encoder's finished jobs or, without one, from timing some of its sentences."""

    def __init__(self, plan: PairPlan, store: PairStore, device: torch.device):
        super().__init__(store)
        self.plan, self.device = plan, device

    def kind(self, job: PairJob) -> str:
        """Return the encoder's fingerprint."""
        return job.encoder

    def work(self, job: PairJob) -> float:
        """Return the number of rows of a job."""
        return self.plan.rows[job]

    def rates(self, kind: str) -> list[float]:
        """Return seconds per row for the finished jobs of an encoder."""
        return [row["seconds"] / row["rows"] for row in self.store if row["encoder"] == kind]

    def probe(self, job: PairJob) -> float:
        """Return seconds per row, timed on a sample that grows until it takes long enough."""
        subject, whole = self.plan.subjects[job.encoder, job.seed], self.plan.paradigms[job.paradigm]
        scorer = Scorer(self.plan.subjects, {}, self.device, self.plan.options.tokens_per_batch, lambda rows: None)
        model, size = scorer.model(job), 1
        while True:
            sample = whole.sample(size)
            sentences = sum(encode_pairs(sample, subject.tokenizer, subject.max_length), [])
            begin = time.perf_counter()
            score_sentences(model, subject.tokenizer, sentences, job.score, scorer.budget)
            seconds = time.perf_counter() - begin
            if size > 1 and seconds > _PROBE_SECONDS or len(sample) == len(whole):
                return seconds / sum(map(len, sentences))
            size *= 4  # the first sample also warmed up


def run_here(options: argparse.Namespace) -> None:
    """Do the missing jobs, in this process or in worker processes, and write the report."""
    plan, store = PairPlan(options), PairStore(options.output_dir / SCORES_FILE)
    published = published_levels(options.data_dir, plan.paradigms)
    missing = store.missing(plan.jobs)
    workers = min(options.workers or _own_workers(), max(1, len(missing)))
    share_threads(workers)
    print(plan_text(plan, store, workers), flush=True)
    if options.dry_run:
        return
    done = SPAWN.Value("q", 0)
    total = sum(plan.rows[job] for job in missing)
    given = (plan.jobs, plan.subjects, plan.paradigms, options, done)
    with progress("row", total, scale=True) as bar:

        def tell() -> None:
            bar.update(done.value - bar.n)

        if workers > 1:
            share_out(work, given, workers, plan.jobs, store, tell, "megatron-ddrp minimal-pairs")
        else:
            work(0, *given, bar)
    store.refresh()
    if left := len(store.missing(plan.jobs)):
        print(left_to_others(left, options.output_dir, options.wait))
        return
    names = {key: subject.name for key, subject in plan.subjects.items()}
    report = report_of(names, plan.paradigms, plan.jobs, store, published)
    with one_at_a_time(options.output_dir, "report"):
        print(write_report(report, options.output_dir), flush=True)
    if undefined := [f"{result.name} ({result.undefined:,})" for result in report.results if result.undefined]:
        raise UserError(
            f"scores that are not finite, in pairs out of {plan.num_pairs():,}: {', '.join(undefined)}; they count as "
            "wrong, so these accuracies are no results; weights with nan or inf give them: use an earlier checkpoint"
        )


def work(
    number: int,
    jobs: Sequence[PairJob],
    subjects: Mapping[tuple[str, int | None], Subject],
    paradigms: Mapping[str, Paradigm],
    options: argparse.Namespace,
    done: Any,
    bar: tqdm | None = None,
) -> None:
    """Do jobs until the store has all. Finished rows move `bar`; without a bar, they are added to the shared `done`."""

    def advance(rows: int) -> None:
        if bar is not None:
            bar.update(rows)
        else:
            with done.get_lock():
                done.value += rows

    scorer = Scorer(subjects, paradigms, device_of(number), options.tokens_per_batch, advance)
    drain(jobs, PairStore(options.output_dir / SCORES_FILE), scorer.perform, wait=options.wait)


def _own_workers() -> int:
    """Return one worker per GPU, else per core, because several cores do not speed up a small encoder's products."""
    return torch.cuda.device_count() or min(MOST_WORKERS, len(os.sched_getaffinity(0)))


def plan_text(plan: PairPlan, store: PairStore, workers: int) -> str:
    """Return the text of the plan: the missing jobs, the origin of each encoder, and the expected time."""
    device, missing = device_of(0), store.missing(plan.jobs)
    rows = sum(plan.rows[job] for job in missing)
    lines = [
        f"plan: {len(plan.subjects)} encoder{'s' * (len(plan.subjects) > 1)} x {len(plan.paradigms)} paradigms, "
        f"{plan.num_pairs():,} pairs, score {plan.options.score}, on {device.type}; "
        f"{len(missing)} of {len(plan.jobs)} jobs to do, {rows:,} rows"
    ]
    lines += [f"  {subject.name}: {subject.origin}" for subject in plan.subjects.values()]
    lines += [f"  {sentence}" for sentence in plan.left_out]
    if missing:
        seconds = PairForecast(plan, store, device).total(missing)
        assert seconds is not None  # `guess` never returns None
        sharing = f" with {workers} workers" if workers > 1 else ""
        lines.append(f"  expected: {duration(seconds / workers)}{sharing}")
    return "\n".join(lines)
