"""A sweep of encoders over tasks, a grid and seeds: its list of runs, its plan, and the processes that do it.

Worker processes of one machine do the runs, or all ranks together, one run at a time.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Callable, Sized
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_ddrp.config import ParallelConfig
from megatron_ddrp.encoders.encoder import LoadedEncoder, load_encoder
from megatron_ddrp.encoders.rows import Encoded
from megatron_ddrp.engine.build import instead_of_fp16
from megatron_ddrp.errors import UserError, allocations_as_user_errors, need_packages, shared_error
from megatron_ddrp.pages.markdown import percent
from megatron_ddrp.parallel import process_group
from megatron_ddrp.parallel.process_group import Ranks, agree, gather_objects, refuse_differences, sum_over_ranks
from megatron_ddrp.run.launch import launched_world_size
from megatron_ddrp.run.loop import prepare_cpu
from megatron_ddrp.tasks.finetune.kinds import KINDS
from megatron_ddrp.tasks.finetune.options import SweepOptions
from megatron_ddrp.tasks.finetune.runs import (
    RUNS,
    Point,
    RunStore,
    TuningRun,
    count_undefined,
    predictions_file,
    write_predictions,
)
from megatron_ddrp.tasks.finetune.table_files import Examples, TaskData
from megatron_ddrp.tasks.finetune.tables import report_only, write_report
from megatron_ddrp.tasks.finetune.training import (
    RunResult,
    better_run,
    build_model,
    finetune,
    fix_workspace,
    keep_if_best,
    model_folder,
)
from megatron_ddrp.tasks.jobs import Workload, device_of, drain, eta, left_to_others, one_at_a_time, share_out

_SUBSET_SEED = 0
"""Seed of the rows that --max-train-examples keeps, the same for all runs and encoders."""


class Sweep:
    """Runs of one command line, with their encoders and data."""

    def __init__(
        self, options: SweepOptions, data: dict[str, TaskData], device: torch.device, ranks: Ranks | None = None
    ):
        """Load the encoders, list the runs and open the store. `ranks` is None unless several ranks share each run.

        Its own options name the checkpoints that were loaded: the run of an encoder may save more of them meanwhile.
        """
        self.device, self.ranks = device, ranks
        if device.type == "cuda":
            fix_workspace()
        else:
            if options.training.fp16:
                raise UserError(f"--fp16 needs a GPU; {instead_of_fp16()}", exit_code=2)
            prepare_cpu()
        self.data = {name: _subset(task, options.search.max_train_examples) for name, task in data.items()}
        loaded = [
            replace(encoder, name=options.names.get(folder, encoder.name))
            for folder in dict.fromkeys(options.load)
            for encoder in [load_encoder(folder, options.random_init)]
        ]
        names = {encoder.folder: encoder.name for encoder in loaded}
        self.options = replace(options, load=tuple(names), names=names)
        self.encoders = {encoder.fingerprint: encoder for encoder in loaded}
        self.twins = [encoder for encoder in loaded if encoder is not self.encoders[encoder.fingerprint]]
        self.runs = [
            self._run(encoder, task, point, seed)
            for encoder, task, point, seed in itertools.product(
                self.encoders.values(), data, options.search.points, range(1, options.search.seeds + 1)
            )
        ]
        self._encoded: tuple[tuple[str, str], Encoded, dict[str, Encoded]] | None = None
        self.store = RunStore(options.output_dir / RUNS, tasks=options.suite.known)
        wanted = options.machine.workers or max(1, torch.cuda.device_count())
        self.workers = 1 if ranks else min(wanted, max(1, len(self.store.missing(self.runs))))
        """Number of processes that share the missing runs; ranks do every run together."""

    @property
    def speaks(self) -> bool:
        """True if this rank prints and writes, as one rank does."""
        return self.ranks is None or self.ranks.rank == 0

    def perform(self, run: TuningRun) -> dict[str, Any]:
        """Do a run, write its predictions and maybe its model (on rank 0), and return its row of runs.jsonl."""
        data, encoder, folder = self.data[run.task], self.encoders[run.encoder], self.options.output_dir
        task, kind, (train, dev) = data.task, KINDS[data.task.kind], self.encoded(run)
        result = self.finetune(run, train, dev)
        path = predictions_file(folder, run)
        scored = {name: (encoded.answers, result.predictions[name]) for name, encoded in dev.items()}
        if self.speaks:
            write_predictions(path, task, scored)
        scoring, *others = dev
        row = asdict(run) | {
            "load": encoder.name,
            "checkpoint": str(encoder.folder),
            "metric": task.metric,
            "score": result.scores[scoring][-1],
            "epoch_scores": result.scores[scoring],
            "train_examples": len(data.train),
            "dev_examples": len(data.dev[scoring]),
            "predictions": str(path.relative_to(folder)),
            "steps": result.steps,
            "seconds": round(result.seconds, 3),
        }
        if self.options.suite.known is None:
            row |= {"facts": task.facts, "baseline": data.baseline}
        if beside := kind.beside(task):
            row["beside"] = {metric: kind.score(metric, *scored[scoring]) for metric in beside}
        if others:
            row["other_scores"] = {file: result.scores[file][-1] for file in others}
            row["other_examples"] = {file: len(data.dev[file]) for file in others}
        row = count_undefined(row, kind.metrics[task.metric].undefined)
        if run.task in self.options.suite.kept and self.speaks:
            keep_if_best(folder, encoder, data, run, result.model, row)
        return row

    def finetune(
        self, run: TuningRun, train: Encoded, dev: dict[str, Encoded], test: dict[str, Encoded] | None = None
    ) -> RunResult:
        """Fine-tune a fresh copy of the run's encoder."""
        task, size = self.data[run.task].task, run.micro_batch_size
        smaller = f"--micro-batch-size {size // 2} instead of {size}, " if size > 1 else ""
        with allocations_as_user_errors(f"use {smaller}--max-seq-length below {run.max_seq_length} or fewer --workers"):
            model = build_model(self.encoders[run.encoder], task, run, self.device)
            return finetune(run, task, model, train, dev, self.ranks, test)

    def encoded(self, run: TuningRun) -> tuple[Encoded, dict[str, Encoded]]:
        """Return the training rows and the development files of a run; cache those of the last encoder and task."""
        key = (run.encoder, run.task)
        if self._encoded is None or self._encoded[0] != key:
            data = self.data[run.task]
            dev = {file: self.encode(run, examples, file) for file, examples in data.dev.items()}
            self._encoded = key, self.encode(run, data.train, "train"), dev
        return self._encoded[1:]

    def encode(self, run: TuningRun, examples: Examples, file: str) -> Encoded:
        """Return the examples as rows for a run's encoder; print a warning with `file` for examples that do not fit."""
        encoder, task = self.encoders[run.encoder], self.data[run.task].task
        kind = KINDS[task.kind]
        encoded = kind.encode(task, examples, encoder.tokenizer, run.max_seq_length)
        if encoded.warning and self.speaks:
            print(f"{self.options.suite.program}: warning: {task.name}, {file}: {encoded.warning}", file=sys.stderr)
        return encoded

    def _run(self, encoder: LoadedEncoder, task: str, point: Point, seed: int) -> TuningRun:
        options, training = self.options, self.options.training
        world_size = self.ranks.world_size if self.ranks else 1
        parts = world_size if self.device.type == "cuda" else max(2, world_size)
        return TuningRun(
            task,
            **asdict(point),
            seed=seed,
            max_seq_length=min(training.max_seq_length, encoder.max_length),
            encoder=encoder.fingerprint,
            data=self.data[task].fingerprint,
            micro_batch_size=min(point.batch_size, training.micro_batch_size or -(-point.batch_size // parts)),
            layerwise_lr_decay=training.layerwise_lr_decay,
            precision=training.precision,
            max_train_examples=options.search.max_train_examples,
            head=options.suite.head if encoder.family_model else "common",
            scales_labels=options.suite.scales_labels and KINDS[self.data[task].task.kind].predicts_numbers,
        )


def _subset(data: TaskData, size: int | None) -> TaskData:
    if size is None or size >= len(data.train):
        return data
    rows = np.sort(np.random.default_rng(_SUBSET_SEED).permutation(len(data.train))[:size])
    return data._replace(train=data.train.only(rows))


_CHARACTERS_PER_PIECE = 4


def time_left(sweep: Sweep) -> str:
    """Return the time until the workers finish the missing runs, as text, from the encoders' finished runs.

    The work of a run is epochs × (3 × training characters + development characters): a training step costs a forward
    and a backward pass.
    """
    longest = sweep.options.training.max_seq_length * _CHARACTERS_PER_PIECE

    def characters(examples: Examples) -> int:
        return int(np.minimum(longest, 8 + examples.lengths).sum())

    epoch = {
        task: 3 * characters(data.train) + sum(map(characters, data.dev.values())) for task, data in sweep.data.items()
    }

    def part(run: TuningRun, seconds: float = 0.0) -> Workload:
        return Workload(f"run of {sweep.encoders[run.encoder].name}", run.epochs * epoch[run.task], seconds)

    own = set(sweep.runs)
    finished = [part(run, row["seconds"]) for row in sweep.store if (run := TuningRun.of_row(row)) in own]
    return eta([part(run) for run in sweep.store.missing(sweep.runs)], finished, sweep.workers)


def _count(things: Sized, name: str) -> str:
    """Return the number of things with their name: "1 task", "2 tasks"."""
    return f"{len(things)} {name}{'s' * (len(things) != 1)}"


def plan_text(sweep: Sweep) -> str:
    """Return the text of the plan: the missing runs, the origin of each encoder, the rows of each task."""
    missing, search = sweep.store.missing(sweep.runs), sweep.options.search
    ranks = f", each on {sweep.ranks.world_size} ranks" if sweep.ranks else ""
    lines = [
        f"plan: {_count(sweep.encoders, 'encoder')} x {_count(sweep.data, 'task')} x "
        f"{_count(search.points, 'grid point')} x {_count(range(search.seeds), 'seed')} = "
        f"{_count(sweep.runs, 'run')} on {sweep.device.type}{ranks}; {len(missing)} of {len(sweep.runs)} runs to do"
    ]
    for encoder in sweep.encoders.values():
        lines.append(f"  {encoder.name}: {encoder.origin}")
        if encoder.max_length < sweep.options.training.max_seq_length:
            lines.append(f"    rows are cut to {encoder.max_length} pieces: the encoder was trained on no longer rows")
    for twin in sweep.twins:
        lines.append(f"  {twin.name}: left out, it has the same weights as {sweep.encoders[twin.fingerprint].name}")
    if not missing:
        return "\n".join([*lines, *(f"  {task}: {fact}" for task, data in sweep.data.items() for fact in data.facts)])
    for task, count in Counter(run.task for run in missing).items():
        data = sweep.data[task]
        dev = ", ".join(f"{len(examples):,} {file}" for file, examples in data.dev.items())
        lines.append(f"  {task:6} {count:4} runs of {len(data.train):,} train, {dev}")
        lines += [f"    {fact}" for fact in data.facts]
    return "\n".join([*lines, f"  time left: {time_left(sweep)}"])


def printer(sweep: Sweep) -> Callable[[], None]:
    """Return a function that prints a line for each run added to the store since, whichever process did it."""
    own, total = set(sweep.runs), len(sweep.store.missing(sweep.runs))
    told, number = len(sweep.store.rows), 0

    def tell() -> None:
        nonlocal told, number
        for row in sweep.store.rows[told:]:
            told += 1
            run = TuningRun.of_row(row)
            if run not in own:
                continue
            number += 1
            encoder = f"{sweep.encoders[run.encoder].name}, " if len(sweep.encoders) > 1 else ""
            undefined = f" (undefined, counts as {100 * row['score']:g})" if row["undefined"] else ""
            print(
                f"[{number}/{total}] {encoder}{run.task} batch {run.batch_size} lr {run.lr:g} "
                f"epochs {run.epochs} seed {run.seed}: {row['metric']} {percent(row['score'])}{undefined} (best epoch "
                f"{percent(row['best_epoch_score'])}), {row['seconds']:.0f} s, eta {time_left(sweep)}",
                flush=True,
            )

    return tell


def run(options: SweepOptions) -> int:
    """Carry out a parsed command line. Return 1 if --report leaves damaged runs out."""
    need_packages("the report", "scipy")  # the report needs it; here, before hours of runs
    if options.report is not None:
        return report_only(options.report, options.output_dir, options.suite)
    if launched_world_size() == 1:
        _run_sweeps(options)
        return 0
    # 24 hours, because rank 0 may wait for runs of another sweep.
    ranks = process_group.start(ParallelConfig(distributed_timeout_minutes=24 * 60))
    with process_group.print_shared_errors_once(options.suite.program):
        _run_sweeps(options, ranks)
        process_group.stop()
    return 0


def _run_sweeps(options: SweepOptions, ranks: Ranks | None = None) -> None:
    """Do the sweep and a second one, each on all ranks of a launcher if there are `ranks`, and write the report."""
    lines: list[str] = []
    asked: list[TuningRun] = []
    folder, is_dry = options.output_dir, options.machine.dry_run
    following: SweepOptions | None = options
    while following is not None:
        suite = following.suite
        sweep = _open_on_ranks(following, ranks) if ranks else Sweep(following, suite.read(), device_of(0))
        if sweep.speaks:
            print(plan_text(sweep), flush=True)
        if not is_dry and not _do_runs(sweep):
            line = left_to_others(len(sweep.store.missing(sweep.runs)), folder, options.machine.wait)
            if sweep.speaks:
                print(line)
            break
        following = second_sweep(sweep)  # after the runs, which choose the folders of kept models
        asked += sweep.runs
        if is_dry:
            continue
        if sweep.speaks:
            with one_at_a_time(folder, "report"):  # before anything that may fail
                sweep.store.refresh()
                text = write_report({folder: sweep.store}, folder, suite, asked=asked)
            if following is None:
                print(text, flush=True)
        lines += suite.finish(sweep) if suite.finish else []
    print("\n".join(lines), end="\n" * bool(lines))


def second_sweep(sweep: Sweep) -> SweepOptions | None:
    """Return the options of the sweep that starts from the kept models of this one; None without one."""
    before = sweep.options
    if before.suite.second is None:
        return None
    data, is_dry = sweep.data[before.suite.kept[0]], before.machine.dry_run
    made: dict[Path, LoadedEncoder] = {}
    for encoder in sweep.encoders.values():
        folder = model_folder(before.output_dir, data.task, encoder, data.fingerprint)
        made[encoder.folder if is_dry else folder] = encoder
        if not is_dry and (better := better_run(sweep.store, encoder, data, folder)):
            raise UserError(
                f"--start-from-task {data.task.name}: the best run of {encoder.name}, {better}, kept no model in "
                f"{folder}; delete its line in runs.jsonl to repeat it, or give another --output-dir"
            )
    return replace(
        before,
        suite=before.suite.second,
        load=tuple(made),
        names={folder: f"{encoder.name}, from {data.task.name}" for folder, encoder in made.items()},
        made_from={folder: encoder.fingerprint for folder, encoder in made.items()},
        random_init=False,
    )


def _open_on_ranks(options: SweepOptions, ranks: Ranks) -> Sweep:
    data = agree(lambda: options.suite.read())
    first = agree(lambda: None if ranks.rank else Sweep(options, data, ranks.device, ranks))
    sent: Any = gather_objects(first and (first.options.load, first.options.names))[0]
    chosen = replace(options, load=sent[0], names=sent[1])
    sweep = agree(lambda: first or Sweep(chosen, data, ranks.device, ranks))
    refuse_differences({f"run {number}": run.name for number, run in enumerate(sweep.runs, 1)})
    return sweep


def _do_runs(sweep: Sweep) -> bool:
    """Do the missing runs; return whether the store has all. With --no-wait, others may still be doing some."""
    options, store, tell = sweep.options, sweep.store, printer(sweep)
    if sweep.ranks:
        return do_on_ranks(sweep, sweep.ranks, tell)
    if sweep.workers > 1:
        digests = {name: data.digest for name, data in sweep.data.items()}
        given = (options, digests, set(sweep.encoders))
        share_out(_work, given, sweep.workers, sweep.runs, store, tell, options.suite.program)
    else:
        drain(sweep.runs, store, sweep.perform, tell, options.machine.wait)
    return not store.missing(sweep.runs)


def _work(number: int, options: SweepOptions, digests: dict[str, str], encoders: set[str]) -> None:
    data = options.suite.read()
    if changed := [name for name in digests if data[name].digest != digests[name]]:
        raise UserError(
            f"{changed[0]}: its files changed after this command had read them; finished runs are kept; run the same "
            "command again to go on with the new rows, or put the old files back first"
        )
    sweep = Sweep(options, data, device_of(number))
    if encoders != set(sweep.encoders):
        raise UserError(
            f"--load {' '.join(map(str, options.load))}: changed after this command had read it; run it again"
        )
    drain(sweep.runs, sweep.store, sweep.perform, wait=options.machine.wait)


def do_on_ranks(sweep: Sweep, ranks: Ranks, tell: Callable[[], None]) -> bool:
    """Do the runs one by one on all ranks together. Rank 0 takes the leases and announces the next run.

    Return whether the store has all runs. With `--no-wait`, other commands may still be doing some.
    """
    numbers = {run: number for number, run in enumerate(sweep.runs)}
    done, left, failed = range(len(numbers), len(numbers) + 3)

    def announce(number: int) -> int:
        return int(sum_over_ranks(torch.tensor([number], device=ranks.device)).item())

    def together(run: TuningRun) -> dict[str, Any]:
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
        drain(sweep.runs, sweep.store, together, tell, sweep.options.machine.wait)
        outcome = left if sweep.store.missing(sweep.runs) else done
    finally:
        announce(outcome)
    return outcome == done
