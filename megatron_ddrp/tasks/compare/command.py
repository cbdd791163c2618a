"""`megatron-ddrp compare`: do the missing jobs of a plan and write the page."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from megatron_ddrp.errors import FAILURE
from megatron_ddrp.tasks.compare.arguments import parse_arguments
from megatron_ddrp.tasks.compare.forecast import JobForecast
from megatron_ddrp.tasks.compare.jobs import open_store
from megatron_ddrp.tasks.compare.plan import read_plan
from megatron_ddrp.tasks.compare.running import Runner, stop_on_sigterm
from megatron_ddrp.tasks.compare.work import Work
from megatron_ddrp.tasks.jobs.store import left_to_others, one_at_a_time
from megatron_ddrp.tasks.pages import require_packages

PAGE_PACKAGES = ("markdown", "matplotlib")


def main(arguments: Sequence[str] | None = None) -> int:
    """Do the missing jobs and write the page. Return 1 if a job failed, otherwise 0."""
    options = parse_arguments(arguments)
    plan = read_plan(options.plan, options.given)
    store = open_store(options.output_dir)
    work = Work(plan, options.output_dir, store)
    failed = False
    if not options.page_only:
        forecast = JobForecast(plan, store)
        print("\n".join([work.plan_text(), *forecast.plan_lines(work.jobs())]), flush=True)
        if options.dry_run:
            for job in work.jobs():
                print(f"{'done' if job.name in store else 'to do'}: {job}\n  $ {shlex.join(job.command)}")
            return 0
        require_packages("compare", *PAGE_PACKAGES)  # before hours of jobs, not after them
        stop_on_sigterm()
        runner = Runner(forecast, lambda line: print(line, flush=True))
        runner.run(work.first_jobs())
        work.update()  # the probes have given the steps of a budget in minutes
        runner.run(work.jobs(), wait=not options.no_wait)
        failed = bool(runner.failed)
        if left := len(runner.left(work.jobs())):
            print(left_to_others(left, options.output_dir))
            return FAILURE if failed else 0
    require_packages("compare", *PAGE_PACKAGES)
    from megatron_ddrp.tasks.compare.page import write_page  # here, because figures import torch

    with one_at_a_time(options.output_dir, "page"):
        store.refresh()
        print(write_page(work))
    return FAILURE if failed else 0
