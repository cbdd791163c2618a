"""Execution of a sweep: by worker processes of one machine, or by all ranks together, one run at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from megatron_ddrp.config import ParallelConfig
from megatron_ddrp.errors import UserError, need_packages, shared_error
from megatron_ddrp.parallel import process_group
from megatron_ddrp.parallel.agreement import agree, gather_objects, refuse_differences
from megatron_ddrp.parallel.process_group import Ranks, sum_over_ranks
from megatron_ddrp.run.launch import launched_world_size
from megatron_ddrp.tasks.finetune.options import SweepOptions
from megatron_ddrp.tasks.finetune.plan import ResultLines, plan_text
from megatron_ddrp.tasks.finetune.report import report_only, write_report
from megatron_ddrp.tasks.finetune.runs import RUNS, Run, RunStore
from megatron_ddrp.tasks.finetune.sweep import Sweep
from megatron_ddrp.tasks.finetune.task import TaskData
from megatron_ddrp.tasks.jobs.store import Store, left_to_others, one_at_a_time
from megatron_ddrp.tasks.jobs.workers import device_of, drain, share_out


def run(options: SweepOptions) -> int:
    """Carry out a parsed command line. Return 1 if --report leaves damaged runs out."""
    need_packages("the report", "scipy")  # the report needs it; here, before hours of runs
    if options.report is not None:
        return report_only(options.report, options.output_dir, options.suite)
    if launched_world_size() == 1:
        _run_stages(options)
        return 0
    # 24 hours, because rank 0 may wait for runs of another sweep.
    ranks = process_group.start(ParallelConfig(distributed_timeout_minutes=24 * 60))
    with process_group.print_shared_errors_once(options.suite.program):
        _run_stages(options, ranks)
        process_group.stop()
    return 0


def _run_stages(options: SweepOptions, ranks: Ranks | None = None) -> None:
    """Do the sweep and its next stages, each on all ranks of a launcher if there are `ranks`, and write the report."""
    lines: list[str] = []
    asked: list[Run] = []
    stage: SweepOptions | None = options
    while stage is not None:
        sweep, store = _open_on_ranks(stage, ranks) if ranks else _open(stage, stage.suite.read(), device_of(0))
        workers = _num_workers(sweep, store)
        if sweep.speaks:
            print(plan_text(sweep, store, workers), flush=True)
        if not stage.machine.dry_run and not _do_runs(sweep, store, workers):
            line = left_to_others(len(store.missing(sweep.runs)), options.output_dir, options.machine.wait)
            if sweep.speaks:
                print(line)
            break
        following = stage.suite.next_stage(sweep, store)  # after the runs, which choose the folders of kept models
        asked += sweep.runs
        if not stage.machine.dry_run:
            if sweep.speaks:
                report(sweep, store, asked, shown=following is None)
            lines += stage.suite.finish(sweep, store)
        stage = following
    print("\n".join(lines), end="\n" * bool(lines))


def _open(
    options: SweepOptions, data: dict[str, TaskData], device: torch.device, ranks: Ranks | None = None
) -> tuple[Sweep, RunStore]:
    return Sweep(options, data, device, ranks), RunStore(options.output_dir / RUNS, tasks=options.suite.known)


def _open_on_ranks(options: SweepOptions, ranks: Ranks) -> tuple[Sweep, RunStore]:
    data = agree(lambda: options.suite.read())
    first = agree(lambda: None if ranks.rank else _open(options, data, ranks.device, ranks))
    sent: Any = gather_objects(first and (first[0].options.load, first[0].options.names))[0]
    chosen = replace(options, load=sent[0], names=sent[1])
    sweep, store = agree(lambda: first or _open(chosen, data, ranks.device, ranks))
    refuse_differences({f"run {number}": run.name for number, run in enumerate(sweep.runs, 1)})
    return sweep, store


def _num_workers(sweep: Sweep, store: RunStore) -> int:
    """Return the number of worker processes; ranks do every run together."""
    wanted = sweep.options.machine.workers or max(1, torch.cuda.device_count())
    return 1 if sweep.ranks else min(wanted, max(1, len(store.missing(sweep.runs))))


def _do_runs(sweep: Sweep, store: RunStore, workers: int) -> bool:
    """Do the missing runs; return whether the store has all. With --no-wait, others may still be doing some."""
    options, lines = sweep.options, ResultLines(sweep, store, workers)
    if sweep.ranks:
        return do_on_ranks(sweep, sweep.ranks, store, lines.tell)
    if workers > 1:
        digests = {name: data.digest for name, data in sweep.data.items()}
        given = (options, digests, set(sweep.encoders))
        share_out(_work, given, workers, sweep.runs, store, lines.tell, options.suite.program)
    else:
        drain(sweep.runs, store, sweep.perform, lines.tell, options.machine.wait)
    return not store.missing(sweep.runs)


def report(sweep: Sweep, store: RunStore, asked: Sequence[Run], shown: bool) -> None:
    """Write the tables, before anything that may fail; print them if `shown`. Only one command writes at a time.

    `asked` are the runs of this stage and of those before it.
    """
    output = sweep.options.output_dir
    with one_at_a_time(output, "report"):
        store.refresh()
        text = write_report({output: store}, output, sweep.options.suite, asked=asked)
    if shown:
        print(text, flush=True)


def _work(number: int, options: SweepOptions, digests: dict[str, str], encoders: set[str]) -> None:
    data = options.suite.read()
    if changed := [name for name in digests if data[name].digest != digests[name]]:
        raise UserError(
            f"{changed[0]}: its files changed after this command had read them; finished runs are kept; run the same "
            "command again to go on with the new rows, or put the old files back first"
        )
    sweep, store = _open(options, data, device_of(number))
    if encoders != set(sweep.encoders):
        raise UserError(
            f"--load {' '.join(map(str, options.load))}: changed after this command had read it; run it again"
        )
    drain(sweep.runs, store, sweep.perform, wait=options.machine.wait)


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
