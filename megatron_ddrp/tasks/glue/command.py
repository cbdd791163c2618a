"""`python -m tasks.glue`: fine-tune encoders on GLUE over a grid and seeds, and print the medians."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from megatron_ddrp.errors import FAILURE, UserError
from megatron_ddrp.run.launch import first_rank_speaks, launched_world_size
from megatron_ddrp.tasks.glue.arguments import parse_arguments
from megatron_ddrp.tasks.glue.data import TaskData, read_task, read_test
from megatron_ddrp.tasks.glue.report import write_report
from megatron_ddrp.tasks.glue.runs import RUNS, RunStore
from megatron_ddrp.tasks.glue.tasks import TASKS
from megatron_ddrp.tasks.jobs.queue import drain


def main(arguments: Sequence[str] | None = None) -> int:
    """Read and check everything, then run what is missing, then report. Return 1 where a report leaves runs out."""
    with first_rank_speaks():
        options = parse_arguments(arguments)
    if options.report is not None:
        return report_only(options)
    if launched_world_size() > 1:
        run_on_ranks(options)
    else:
        run_here(options)
    return 0


def read_data(options: argparse.Namespace) -> dict[str, TaskData]:
    """Read and check all files of the tasks, and the test sets where they will be needed."""
    tasks = [TASKS[name] for name in dict.fromkeys(options.tasks)]
    if options.predict_test:
        for task in tasks:
            read_test(task, options.data_dir)
    return {task.name: read_task(task, options.data_dir) for task in tasks}


def report_only(options: argparse.Namespace) -> int:
    """Write one table over several output folders; return 1 where damaged runs had to be left out."""
    from megatron_ddrp.tasks.glue.recheck import trusted_runs

    rows, left_out, unchecked = [], [], []
    for folder in options.report:
        if not (folder / RUNS).is_file():
            raise UserError(f"--report {folder}: holds no runs.jsonl; expected the --output-dir of an earlier command")
        found = trusted_runs(folder)
        if not (found.rows or found.left_out):
            raise UserError(f"--report {folder}: its runs.jsonl holds no finished run; finish some, or copy it again")
        rows += found.rows
        left_out += found.left_out
        unchecked += found.unchecked
    print(write_report(rows, options.output_dir, [*left_out, *unchecked]))
    sys.stdout.flush()
    for sentence in [*left_out, *unchecked]:
        print(f"tasks.glue: warning: {sentence}", file=sys.stderr)
    return FAILURE if left_out else 0


def run_here(options: argparse.Namespace) -> None:
    """Do the sweep in this process, or in the worker processes that it starts."""
    data = read_data(options)
    from megatron_ddrp.tasks.glue.plan import ResultLines, plan_text
    from megatron_ddrp.tasks.glue.submission import write_submissions
    from megatron_ddrp.tasks.glue.sweep import Sweep
    from megatron_ddrp.tasks.glue.workers import default_workers, device_of, share_out

    sweep, store = Sweep(options, data, device_of(0)), RunStore(options.output_dir / RUNS)
    workers = min(options.workers or default_workers(), max(1, len(store.missing(sweep.runs))))
    print(plan_text(sweep, store, workers), flush=True)
    if options.dry_run:
        return
    lines = ResultLines(sweep, store, workers)
    if workers > 1:
        share_out(options, workers, sweep.runs, store, lines.tell)
    else:
        drain(sweep.runs, store, sweep.perform, lines.tell)
    if options.predict_test:
        write_submissions(sweep, store)
    print(write_report(store, options.output_dir))


def run_on_ranks(options: argparse.Namespace) -> None:
    """Do every run data-parallel over the ranks of a launcher."""
    from megatron_ddrp.config import ParallelConfig
    from megatron_ddrp.parallel import process_group

    # A day: rank 0 may wait for the runs that another sweep is doing.
    ranks = process_group.start(ParallelConfig(distributed_timeout_minutes=24 * 60))
    with process_group.agreed_errors_told_once("tasks.glue"):
        data = process_group.agree(lambda: read_data(options))
        from megatron_ddrp.tasks.glue.plan import ResultLines
        from megatron_ddrp.tasks.glue.submission import write_submissions
        from megatron_ddrp.tasks.glue.sweep import Sweep
        from megatron_ddrp.tasks.glue.workers import do_on_ranks

        sweep = process_group.agree(lambda: Sweep(options, data, ranks.device, ranks))
        store = process_group.agree(lambda: RunStore(options.output_dir / RUNS))
        first = ranks.rank == 0
        if first:
            missing = len(store.missing(sweep.runs))
            print(f"plan: {missing} of {len(sweep.runs)} runs to do, each on {ranks.world_size} ranks", flush=True)
            for encoder in sweep.encoders.values():
                print(f"  {encoder.name}: {encoder.origin}", flush=True)
        if not options.dry_run:
            do_on_ranks(sweep, ranks, store, ResultLines(sweep, store, 1).tell)
            if options.predict_test:
                write_submissions(sweep, store)
            if first:
                print(write_report(store, options.output_dir))
        process_group.stop()
