"""Ways to do the runs: several worker processes on one machine, or all ranks together, one run at a time."""

from __future__ import annotations

import argparse
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_ddrp.config import ParallelConfig, load_plugin
from megatron_ddrp.config.registry import PLUGINS
from megatron_ddrp.errors import FAILURE, UserError, agreed_by_all, run_command
from megatron_ddrp.parallel import process_group
from megatron_ddrp.parallel.process_group import Ranks, sum_over_ranks
from megatron_ddrp.tasks.finetune.plan import ResultLines, plan_text
from megatron_ddrp.tasks.finetune.report import write_report
from megatron_ddrp.tasks.finetune.runs import RUNS, Run, RunStore
from megatron_ddrp.tasks.finetune.sweep import Sweep
from megatron_ddrp.tasks.jobs.queue import WAIT, drain
from megatron_ddrp.tasks.jobs.store import Store


def device_of(worker: int) -> torch.device:
    """Return the device of a worker: the GPUs in turn, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", worker % torch.cuda.device_count())
    return torch.device("cpu")


def open_store(options: argparse.Namespace) -> RunStore:
    """Return the store of the finished runs."""
    return RunStore(options.output_dir / RUNS, tasks=options.suite.known)


def run_here(options: argparse.Namespace) -> None:
    """Do the sweep in this process, or in the worker processes that it starts."""
    data = options.suite.read(options)
    sweep, store = Sweep(options, data, device_of(0)), open_store(options)
    per_gpu = max(1, torch.cuda.device_count())
    workers = min(options.workers or per_gpu, max(1, len(store.missing(sweep.runs))))
    print(plan_text(sweep, store, workers), flush=True)
    if options.dry_run:
        return
    lines = ResultLines(sweep, store, workers)
    if workers > 1:
        share_out(options, workers, sweep.runs, store, lines.tell)
    else:
        drain(sweep.runs, store, sweep.perform, lines.tell)
    finish(sweep, store)


def run_on_ranks(options: argparse.Namespace) -> None:
    """Do every run data-parallel over the ranks of a launcher."""
    # A day: rank 0 may wait for the runs that another sweep is doing.
    ranks = process_group.start(ParallelConfig(distributed_timeout_minutes=24 * 60))
    with process_group.agreed_errors_told_once(options.suite.program):
        data = process_group.agree(lambda: options.suite.read(options))
        sweep = process_group.agree(lambda: Sweep(options, data, ranks.device, ranks))
        store = process_group.agree(lambda: open_store(options))
        if ranks.rank == 0:
            missing = len(store.missing(sweep.runs))
            print(f"plan: {missing} of {len(sweep.runs)} runs to do, each on {ranks.world_size} ranks", flush=True)
            for encoder in sweep.encoders.values():
                print(f"  {encoder.name}: {encoder.origin}", flush=True)
        if not options.dry_run:
            do_on_ranks(sweep, ranks, store, ResultLines(sweep, store, 1).tell)
            finish(sweep, store)
        process_group.stop()


def finish(sweep: Sweep, store: RunStore) -> None:
    """Do what the suite does after its runs, on every rank, and on rank 0 write the tables."""
    suite = sweep.options.suite
    lines = suite.finish(sweep, store)
    if sweep.speaks:
        print("\n".join(lines), end="\n" * bool(lines))
        print(write_report(store, sweep.options.output_dir, suite))


def share_out(
    options: argparse.Namespace, count: int, runs: Sequence[Run], store: Store, tell: Callable[[], None]
) -> None:
    """Start `count` workers and return when the store holds all `runs`; call `tell` after each look at the store.

    A worker that was killed does no harm where the others have done its runs.

    Raises:
        UserError: all workers have ended and runs are missing. A worker's own message is above it.
    """
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    workers = [
        context.Process(
            target=_work, args=(options, number, count, set(PLUGINS.values())), name=f"worker {number}", daemon=True
        )
        for number in range(count)
    ]
    for worker in workers:
        worker.start()
    try:
        while any(worker.is_alive() for worker in workers):
            multiprocessing.connection.wait([worker.sentinel for worker in workers if worker.is_alive()], WAIT)
            store.refresh()
            tell()
    finally:
        for worker in workers:
            worker.kill()
            worker.join()
    store.refresh()
    tell()
    if missing := len(store.missing(runs)):
        lost = next((worker for worker in workers if worker.exitcode), workers[0])
        raise UserError(
            f"{lost.name} of {count} ended with exit code {lost.exitcode} and {missing} of {len(runs)} runs are "
            "missing; finished runs are kept, the same command does the others"
        )


def _work(options: argparse.Namespace, number: int, count: int, plugins: set[Path]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent answers for us
    for path in plugins:
        load_plugin(path)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // count))

    def main() -> None:
        sweep = Sweep(options, options.suite.read(options), device_of(number), show_bar=False)
        drain(sweep.runs, open_store(options), sweep.perform)

    run_command(main, f"{options.suite.program}: worker {number}")


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(FAILURE)


def do_on_ranks(sweep: Sweep, ranks: Ranks, store: Store, tell: Callable[[], None]) -> None:
    """Do the runs one after the other on all ranks together. Rank 0 takes the leases and announces the next run."""
    numbers = {run: number for number, run in enumerate(sweep.runs)}
    done, failed = len(numbers), len(numbers) + 1

    def announce(number: int) -> int:
        return int(sum_over_ranks(torch.tensor([number], device=ranks.device)).item())

    def together(run: Run) -> dict[str, Any]:
        announce(numbers[run])
        return sweep.perform(run)

    if ranks.rank > 0:
        while (number := announce(0)) < done:
            sweep.perform(sweep.runs[number])
        if number == failed:
            raise agreed_by_all("rank 0 has stopped")  # and says why
        return
    outcome = failed
    try:
        drain(sweep.runs, store, together, tell)
        outcome = done
    finally:
        announce(outcome)
