"""Execution of one command: the plan's missing jobs, and the page."""

from __future__ import annotations

import argparse
import os
import shlex
from functools import partial

from megatron_ddrp.data.preprocess.inputs import find_inputs, is_stream
from megatron_ddrp.errors import FAILURE, WRONG_ARGUMENTS, UserError, need_packages
from megatron_ddrp.lab.compare.claims import load_claims
from megatron_ddrp.lab.compare.experiment import Experiment
from megatron_ddrp.lab.compare.jobs import JobLines, open_store
from megatron_ddrp.lab.compare.plan import Plan
from megatron_ddrp.lab.compare.plan_file import read_plans
from megatron_ddrp.lab.compare.rows import read_rows
from megatron_ddrp.lab.compare.running import Runner, stop_on_sigterm
from megatron_ddrp.tasks.jobs.store import left_to_others, one_at_a_time


def run_here(options: argparse.Namespace) -> int:
    """Do the missing jobs and write the page. Return 1 if a job failed, otherwise 0."""
    if not options.dry_run:
        need_packages("the page", "markdown", "matplotlib")  # before hours of jobs, not after them
    if options.is_rows:
        return _page_of_rows(options)
    experiment = plan_experiment(options)
    if options.claims:
        load_claims(options.claims)  # before hours of jobs, not after them
    if options.page_only:
        return _write_page(experiment, options)
    lines = JobLines(experiment.store, experiment.plan.workers)
    jobs = experiment.jobs()
    print("\n".join([experiment.plan_text(), *lines.plan(jobs), *_remarks(experiment)]), flush=True)
    if options.dry_run:
        for job in jobs:
            print(f"{'done' if job.name in experiment.store else 'to do'}: {job}\n  $ {shlex.join(job.command)}")
        return 0
    stop_on_sigterm()
    runner = Runner(lines, partial(print, flush=True), experiment.record)
    runner.run(making := experiment.data_jobs())  # first, because remarks about the data follow
    if not experiment.store.missing(making):
        for line in _data_remarks(experiment):
            print(f"  {line}", flush=True)
    runner.run(jobs, wait=options.wait)
    if left := len(runner.left(jobs)):
        experiment.record()
        print(left_to_others(left, options.output_dir, options.wait))
    else:
        _write_page(experiment, options)
    return FAILURE if runner.failed else 0


def plan_experiment(options: argparse.Namespace) -> Experiment:
    """Return the experiment of a plan. Raises `UserError` for a mistake in the file."""
    if len(options.plan) > 1:
        raise UserError("one plan at a time; only files of rows (.jsonl) may be several", WRONG_ARGUMENTS)
    plans = read_plans(options.plan[0], options.given)
    for plan in plans:
        check_texts(plan)
    return Experiment(plans, options.output_dir, open_store(options.output_dir), options.rows)


def check_texts(plan: Plan) -> None:
    """Raise `UserError` for texts of a plan that exist, but that its jobs would refuse, each in its log."""
    files = find_inputs(name for name in plan.corpus.input if os.path.exists(name))
    texts, advice = f"{plan.file}: corpus.input", "give --input FILE…"
    for file in files:
        if is_stream(file.path):
            raise UserError(
                f"{texts}: {file.path}: a pipe or a device, but jobs read texts twice; {advice}", WRONG_ARGUMENTS
            )
    if files and not any(os.path.getsize(file.path) for file in files):
        raise UserError(f"{texts}: {files[0].path}: empty; {advice}", WRONG_ARGUMENTS)


def _remarks(experiment: Experiment) -> list[str]:
    """Return what the missing runs will say about their precision on this machine, each line once."""
    from megatron_ddrp.engine.device import precision_remarks  # here, because --help must not import torch
    from megatron_ddrp.tasks.jobs.workers import device_of

    device = device_of(0)
    lines = [f"  {line}" for run in experiment.missing_runs for line in precision_remarks(run.config, device)]
    return list(dict.fromkeys(lines))


def _data_remarks(experiment: Experiment) -> list[str]:
    """Return what the missing runs will say about the division of their data, each line once."""
    from megatron_ddrp.corpus import Corpus  # here, because --help must not import torch

    by_data = {run.config.data: run.config for run in experiment.missing_runs}
    lines = [line for config in by_data.values() for line in Corpus.open(config).split_remarks()]
    remedy = "; in a plan: shuffle: true under corpus" * bool(experiment.plan.corpus.input)
    return [line + remedy for line in lines]


def _write_page(experiment: Experiment, options: argparse.Namespace) -> int:
    from megatron_ddrp.lab.compare.page import Page  # here, because figures import torch

    with one_at_a_time(experiment.folder, "page"):
        experiment.store.refresh()
        page = Page(experiment.finished_runs(), experiment.folder, options.claims)
        if left := len(experiment.store.missing(experiment.jobs())):
            print(f"{experiment.store.path}: {left:,} of the plan's jobs not finished; the page names them")
        print(page.write(experiment.missing, experiment.times()))
    return 0


def _page_of_rows(options: argparse.Namespace) -> int:
    """Write the page of files of rows, and replace the tables of a Markdown file if one is given."""
    from megatron_ddrp.lab.compare.page import Page

    page = Page(read_rows(options.plan), options.output_dir, options.claims)
    if options.tables:
        print(page.replace_tables(options.tables))  # first, because it may refuse the file
    print(page.write())
    return 0
