"""Execution of one command: plan, worker processes and progress bar."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tqdm import tqdm

from megatron_ddrp.data.progress import progress
from megatron_ddrp.errors import UserError
from megatron_ddrp.tasks.jobs.store import left_to_others, one_at_a_time
from megatron_ddrp.tasks.jobs.workers import SPAWN, device_of, drain, share_out, share_threads
from megatron_ddrp.tasks.minimal_pairs.pairs import Paradigm, published_levels, read_pairs
from megatron_ddrp.tasks.minimal_pairs.report import report_of, write_report
from megatron_ddrp.tasks.minimal_pairs.results import SCORES_FILE, PairJob, PairStore
from megatron_ddrp.tasks.minimal_pairs.scoring import Scorer, Subject, encode_pairs, subjects_of

MOST_WORKERS = 8
"""Largest default number of worker processes on CPUs; each process holds an encoder."""


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


def run_here(options: argparse.Namespace) -> None:
    """Do the missing jobs, in this process or in worker processes, and write the report."""
    plan, store = PairPlan(options), PairStore(options.output_dir / SCORES_FILE)
    published = published_levels(options.data_dir, plan.paradigms)
    missing = store.missing(plan.jobs)
    workers = min(options.workers or _own_workers(), max(1, len(missing)))
    share_threads(workers)
    print(plan_text(plan, missing), flush=True)
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


def plan_text(plan: PairPlan, missing: Sequence[PairJob]) -> str:
    """Return the text of the plan: the missing jobs and the origin of each encoder."""
    lines = [
        f"plan: {len(plan.subjects)} encoder{'s' * (len(plan.subjects) > 1)} x {len(plan.paradigms)} paradigms, "
        f"{plan.num_pairs():,} pairs, score {plan.options.score}, on {device_of(0).type}; "
        f"{len(missing)} of {len(plan.jobs)} jobs to do, {sum(plan.rows[job] for job in missing):,} rows"
    ]
    lines += [f"  {subject.name}: {subject.origin}" for subject in plan.subjects.values()]
    return "\n".join([*lines, *(f"  {sentence}" for sentence in plan.left_out)])
