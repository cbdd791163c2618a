"""Execution of a sweep: by worker processes of one machine, or by all ranks together, one run at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_ddrp.config import ParallelConfig
from megatron_ddrp.errors import UserError, shared_error
from megatron_ddrp.parallel import process_group
from megatron_ddrp.parallel.process_group import Ranks, sum_over_ranks
from megatron_ddrp.tasks.finetune.options import SweepOptions
from megatron_ddrp.tasks.finetune.plan import ResultLines, encoder_lines, plan_text
from megatron_ddrp.tasks.finetune.report import write_report
from megatron_ddrp.tasks.finetune.runs import RUNS, Run, RunStore
from megatron_ddrp.tasks.finetune.sweep import AfterSweep, Sweep
from megatron_ddrp.tasks.finetune.task import TaskData
from megatron_ddrp.tasks.jobs.store import Store, left_to_others, one_at_a_time
from megatron_ddrp.tasks.jobs.workers import device_of, drain, share_out


def open_store(options: SweepOptions) -> RunStore:
    """Return the store of the finished runs."""
    return RunStore(options.output_dir / RUNS, tasks=options.suite.known)


def run_here(options: SweepOptions, after: AfterSweep) -> None:
    """Do the sweep and its next stages, in this process or in worker processes, and write the report."""
    lines: list[str] = []
    stage: SweepOptions | None = options
    while stage is not None:
        sweep, store = Sweep(stage, stage.suite.read(), device_of(0)), open_store(stage)
        _do_here(sweep, store)
        following = after.next_stage(sweep)
        if not stage.machine.dry_run:
            if left := len(store.missing(sweep.runs)):
                print(left_to_others(left, options.output_dir))
                break
            report(sweep, store, shown=following is None)
            lines += after.finish(sweep, store)
        stage = following
    print("\n".join(lines), end="\n" * bool(lines))


def _do_here(sweep: Sweep, store: RunStore) -> None:
    options = sweep.options
    per_gpu = max(1, torch.cuda.device_count())
    workers = min(options.machine.workers or per_gpu, max(1, len(store.missing(sweep.runs))))
    print(plan_text(sweep, store, workers), flush=True)
    if options.machine.dry_run:
        return
    lines = ResultLines(sweep, store, workers)
    if workers > 1:
        digests = {name: data.digest for name, data in sweep.data.items()}
        share_out(_work, (options, digests), workers, sweep.runs, store, lines.tell, options.suite.program)
    else:
        drain(sweep.runs, store, sweep.perform, lines.tell, options.machine.wait)


def run_on_ranks(options: SweepOptions, after: AfterSweep) -> None:
    """Do every run data-parallel over the ranks of a launcher."""
    # 24 hours, because rank 0 may wait for runs of another sweep.
    ranks = process_group.start(ParallelConfig(distributed_timeout_minutes=24 * 60))
    lines: list[str] = []
    stage: SweepOptions | None = options
    with process_group.print_shared_errors_once(options.suite.program):
        while stage is not None:
            sweep, store = _open_on_ranks(stage, ranks)
            is_done = stage.machine.dry_run or do_on_ranks(sweep, ranks, store, ResultLines(sweep, store, 1).tell)
            if not is_done:
                if ranks.rank == 0:
                    print(left_to_others(len(store.missing(sweep.runs)), options.output_dir))
                break
            following = after.next_stage(sweep)  # after the runs, which choose the folders of kept models
            if not stage.machine.dry_run:
                if ranks.rank == 0:
                    report(sweep, store, shown=following is None)
                lines += after.finish(sweep, store)
            stage = following
        if ranks.rank == 0:
            print("\n".join(lines), end="\n" * bool(lines))
        process_group.stop()


def _open_on_ranks(options: SweepOptions, ranks: Ranks) -> tuple[Sweep, RunStore]:
    data = process_group.agree(lambda: options.suite.read())
    first = process_group.gather_objects({name: task.digest for name, task in data.items()})[0]
    process_group.agree(lambda: _check_alike(data, first))
    sweep = process_group.agree(lambda: Sweep(options, data, ranks.device, ranks))
    store = process_group.agree(lambda: open_store(options))
    if ranks.rank == 0:
        missing = store.missing(sweep.runs)
        print(f"plan: {len(missing)} of {len(sweep.runs)} runs to do, each on {ranks.world_size} ranks", flush=True)
        print(*encoder_lines(sweep), sep="\n", flush=True)
        for task in dict.fromkeys(run.task for run in missing):
            print(*(f"  {task}: {fact}\n" for fact in data[task].facts), sep="", end="", flush=True)
    return sweep, store


def report(sweep: Sweep, store: RunStore, shown: bool) -> None:
    """Write the tables, before anything that may fail; print them if `shown`. Only one command writes at a time."""
    output = sweep.options.output_dir
    with one_at_a_time(output, "report"):
        store.refresh()
        text = write_report({output: store}, output, sweep.options.suite, asked=sweep.runs)
    if shown:
        print(text, flush=True)


def _work(number: int, options: SweepOptions, digests: dict[str, str]) -> None:
    data = options.suite.read()
    _check_alike(data, digests)
    sweep = Sweep(options, data, device_of(number), show_bar=False)
    drain(sweep.runs, open_store(options), sweep.perform, wait=options.machine.wait)


def _check_alike(data: dict[str, TaskData], digests: dict[str, str]) -> None:
    """Raise `UserError` if a task was read from other files than in the process that has these `digests`."""
    if changed := [name for name in digests if data[name].digest != digests[name]]:
        raise UserError(
            f"{changed[0]}: its files changed after this command had read them; finished runs are kept; run the same "
            "command again to go on with the new rows, or put the old files back first"
        )


def do_on_ranks(sweep: Sweep, ranks: Ranks, store: Store, tell: Callable[[], None]) -> bool:
    """Do the runs one by one on all ranks together. Rank 0 takes the leases and announces the next run.

    Return whether the store has all runs. With `--no-wait`, other commands may still be doing some.
    """
    numbers = {run: number for number, run in enumerate(sweep.runs)}
    done, left, failed = range(len(numbers), len(numbers) + 3)

    def announce(number: int) -> int:
        return int(sum_over_ranks(torch.tensor([number], device=ranks.device)).item())

    def together(run: Run) -> dict[str, Any]:
        announce(numbers[run])
        return sweep.perform(run)

    if ranks.rank > 0:
        while (number := announce(0)) < done:
            sweep.perform(sweep.runs[number])
        if number == failed:
            raise shared_error("rank 0 has stopped")  # rank 0 prints the reason
        return number == done
    outcome = failed
    try:
        drain(sweep.runs, store, together, tell, sweep.options.machine.wait)
        outcome = left if store.missing(sweep.runs) else done
    finally:
        announce(outcome)
    return outcome == done
