"""`megatron-ddrp compare`: do the missing jobs of a plan and write the page."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence

from megatron_ddrp.errors import FAILURE, WRONG_ARGUMENTS, UserError
from megatron_ddrp.pages.rendering import require_packages
from megatron_ddrp.tasks.compare.arguments import parse_arguments
from megatron_ddrp.tasks.compare.forecast import JobForecast
from megatron_ddrp.tasks.compare.jobs import open_store
from megatron_ddrp.tasks.compare.plan_file import RUNGS, read_plans
from megatron_ddrp.tasks.compare.rungs import Rungs
from megatron_ddrp.tasks.compare.running import Runner, stop_on_sigterm
from megatron_ddrp.tasks.compare.work import Work
from megatron_ddrp.tasks.jobs.store import left_to_others, one_at_a_time

PAGE_PACKAGES = ("markdown", "matplotlib")


def main(arguments: Sequence[str] | None = None) -> int:
    """Do the missing jobs and write the page. Return 1 if a job failed, otherwise 0."""
    options = parse_arguments(arguments)
    work = plan_work(options)
    if options.page_only:
        return _write_page(work)
    forecast = JobForecast(work.plan, work.store)
    print("\n".join([work.plan_text(), *forecast.plan_lines(work.jobs()), *_remarks(work)]), flush=True)
    if options.dry_run:
        for job in work.jobs():
            print(f"{'done' if job.name in work.store else 'to do'}: {job}\n  $ {shlex.join(job.command)}")
        return 0
    require_packages("compare", *PAGE_PACKAGES)  # before hours of jobs, not after them
    stop_on_sigterm()
    runner = Runner(forecast, _say, *([work.record] if isinstance(work, Rungs) else []))
    runner.run(first := work.first_jobs())
    if isinstance(work, Work):
        work.update()  # the probes have given the steps of a budget in minutes
    if not work.store.missing(first):
        for line in _data_remarks(work):
            _say(f"  {line}")
    runner.run(work.jobs(), wait=not options.no_wait)
    if left := len(runner.left(work.jobs())):
        print(left_to_others(left, options.output_dir))
    else:
        _write_page(work)
    return FAILURE if runner.failed else 0


def plan_work(options: argparse.Namespace) -> Work | Rungs:
    """Return the work of a plan, or of all `rungs` of its file. Raises `UserError` for a mistake in the file."""
    plans = read_plans(options.plan, options.given)
    store = open_store(options.output_dir)
    if plans[0].is_rung:
        return Rungs(plans, options.output_dir, store, options.rows)
    if options.rows:
        raise UserError(f"--rows: {options.plan} has no {RUNGS}, so it has no rows; leave it out", WRONG_ARGUMENTS)
    return Work(plans[0], options.output_dir, store)


def _remarks(work: Work | Rungs) -> list[str]:
    """Return what the missing runs will say about their precision on this machine, each line once."""
    import torch  # here, because --help must not import torch

    from megatron_ddrp.engine.precision import precision_remarks

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lines = [f"  {line}" for run in work.missing_runs for line in precision_remarks(run.config, device)]
    return list(dict.fromkeys(lines))


def _data_remarks(work: Work | Rungs) -> list[str]:
    """Return what the missing runs will say about the division of their data, each line once."""
    from megatron_ddrp.corpus import Corpus  # here, because --help must not import torch

    by_data = {run.config.data: run.config for run in work.missing_runs}
    lines = [line for config in by_data.values() for line in Corpus.open(config).split_remarks()]
    remedy = "; in a plan: shuffle: true under corpus" * bool(work.plan.corpus.input)
    return [line + remedy for line in lines]


def _say(line: str) -> None:
    print(line, flush=True)


def _write_page(work: Work | Rungs) -> int:
    require_packages("compare", *PAGE_PACKAGES)
    # Imported here, because figures import torch.
    from megatron_ddrp.tasks.compare.page import write_page
    from megatron_ddrp.tasks.ladder.page import LadderPage
    from megatron_ddrp.tasks.ladder.rows import read_runs

    with one_at_a_time(work.folder, "page"):
        work.store.refresh()
        if isinstance(work, Work):
            print(write_page(work))
        else:
            print(LadderPage(read_runs([work.rows.path], work.rank), work.folder).write())
            if left_out := work.left_out:
                print(f"left out until they are measured as the plan says: {', '.join(left_out)}")
    return 0
