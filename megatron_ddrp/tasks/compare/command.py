"""`python -m tasks.compare`: do what a plan asks for, as far as it is not done, and write the page."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from megatron_ddrp.errors import FAILURE
from megatron_ddrp.tasks.compare.arguments import parse_arguments
from megatron_ddrp.tasks.compare.forecast import Forecast
from megatron_ddrp.tasks.compare.jobs import open_store
from megatron_ddrp.tasks.compare.plan_file import read_plan
from megatron_ddrp.tasks.compare.running import Runner, stop_on_sigterm
from megatron_ddrp.tasks.compare.work import Work


def main(arguments: Sequence[str] | None = None) -> int:
    """0 where all is there, 1 where a job failed."""
    options = parse_arguments(arguments)
    plan = read_plan(options.plan, options.given)
    store = open_store(options.output_dir)
    work = Work(plan, options.output_dir, store)
    forecast = Forecast(plan, store)
    if options.page_only:
        from megatron_ddrp.tasks.compare.page import write_page

        print(write_page(work))
        return 0
    print(work.describe())
    print("\n".join(forecast.plan_lines(work.jobs(), plan.workers)), flush=True)
    if options.dry_run:
        for job in work.jobs():
            print(f"{'done' if job.name in store else 'to do'}: {job.kind} {job.title}\n  $ {shlex.join(job.command)}")
        return 0
    stop_on_sigterm()
    runner = Runner(options.output_dir, store, plan.workers, forecast, lambda line: print(line, flush=True))
    runner.run(work.first_jobs())  # after them the steps of a budget in minutes are known
    runner.run(work.jobs())
    from megatron_ddrp.tasks.compare.page import write_page  # here, because figures import torch

    print(write_page(work))
    return FAILURE if runner.failed else 0
