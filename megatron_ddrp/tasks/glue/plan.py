"""The expected cost of a sweep, printed before it starts, and its progress, printed after each run.

A run's work is its epochs times the characters that it trains on (forward and backward, 3) and scores (1). Seconds per
unit of work come from an encoder's finished runs, or before the first one from a probe: some timed training steps.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from dataclasses import replace

from megatron_ddrp.run.log import duration
from megatron_ddrp.tasks.glue.data import Example
from megatron_ddrp.tasks.glue.finetune import FineTuning
from megatron_ddrp.tasks.glue.report import percent
from megatron_ddrp.tasks.glue.runs import Run, RunStore
from megatron_ddrp.tasks.glue.sweep import Sweep

_PROBE_STEPS = 4
_CHARACTERS_A_PIECE = 4
_RECENT_RUNS = 50


class Forecast:
    """Seconds that runs will take."""

    def __init__(self, sweep: Sweep, store: RunStore):
        self.sweep, self.store = sweep, store
        self._work = {
            name: (3 * _characters(data.train, sweep), sum(_characters(dev, sweep) for dev in data.dev.values()))
            for name, data in sweep.data.items()
        }
        self._probed: dict[str, float] = {}
        self.source = ""

    def work(self, run: Run) -> float:
        """Return the length of a run's text in characters; comparable between runs of one encoder."""
        return run.epochs * float(sum(self._work[run.task]))

    def seconds(self, run: Run) -> float:
        """Return the expected time of a run; time a few steps of its encoder if none of its runs has finished."""
        known = set(self.sweep.runs)
        rates = []
        for row in reversed(self.store.rows):
            if row["encoder"] == run.encoder and Run.of_row(row) in known:
                rates.append(row["seconds"] / self.work(Run.of_row(row)))
                if len(rates) == _RECENT_RUNS:
                    break
        if rates:
            self.source = "measured on finished runs"
            return statistics.median(rates) * self.work(run)
        if run.encoder not in self._probed:
            self._probed[run.encoder] = self._probe(run)
            self.source = f"from a probe of {_PROBE_STEPS} training steps"
        return self._probed[run.encoder] * self.work(run)

    def total(self, runs: list[Run]) -> float:
        """Return the expected time of several runs, one after the other."""
        each = {run.encoder: self.seconds(run) / self.work(run) for run in {r.encoder: r for r in runs}.values()}
        return sum(each[run.encoder] * self.work(run) for run in runs)

    def _probe(self, run: Run) -> float:
        encoder = self.sweep.encoders[run.encoder]
        run = replace(run, epochs=2)  # one epoch may be a single step, and the probe makes one more than its rows
        train = self.sweep.encode(run, self.sweep.data[run.task].train[: run.batch_size * _PROBE_STEPS])
        tuning = FineTuning(run, encoder.fresh(run.seed, self.sweep.device), encoder.hidden_size, train)
        order = tuning.order(0)
        tuning.step(order[0])  # the first one also warms up
        begin = time.perf_counter()
        for rows in order:
            tuning.step(rows)
        tuning.model.output.bias.sum().item()  # wait for the device
        share = len(train) / len(self.sweep.data[run.task].train)
        trained, scored = self._work[run.task]
        return (time.perf_counter() - begin) / share / trained


def describe(sweep: Sweep, store: RunStore, workers: int) -> str:
    """Return the plan as some lines of text."""
    missing = [run for run in sweep.runs if run not in store]
    options = sweep.options
    lines = [
        f"plan: {len(sweep.encoders)} encoder{'s' * (len(sweep.encoders) > 1)} x {len(sweep.data)} tasks x "
        f"{len(options.points)} grid points x {options.seeds} seeds = {len(sweep.runs)} runs on {sweep.device.type}"
        f"; {len(missing)} of {len(sweep.runs)} runs to do"
    ]
    for encoder in sweep.encoders.values():
        lines.append(f"  {encoder.name}: {encoder.origin}")
        if encoder.max_length < options.max_seq_length:
            lines.append(f"    rows are cut to {encoder.max_length} pieces: it knows no more positions")
    if not missing:
        return "\n".join(lines)
    forecast = Forecast(sweep, store)
    for task, count in Counter(run.task for run in missing).items():
        data = sweep.data[task]
        runs = [run for run in missing if run.task == task]
        dev = ", ".join(f"{len(examples):,} {file}" for file, examples in data.dev.items())
        lines.append(f"  {task:6} {count:4} runs of {len(data.train):,} train, {dev}: {duration(forecast.total(runs))}")
    total = forecast.total(missing)
    sharing = f", {duration(total / workers)} with {workers} workers" if workers > 1 else ""
    lines.append(f"  expected: {total / 3600:.1f} hours of one worker{sharing} ({forecast.source})")
    return "\n".join(lines)


class Progress:
    """One printed line per finished run, whichever process did it."""

    def __init__(self, sweep: Sweep, store: RunStore, workers: int):
        self.sweep, self.store, self.workers = sweep, store, workers
        self.forecast = Forecast(sweep, store)
        self.mine = set(sweep.runs)
        self.told = len(store.rows)
        self.total = sum(run not in store for run in sweep.runs)
        self.number = 0

    def tell(self) -> None:
        """Print what the store holds since the last call."""
        for row in self.store.rows[self.told :]:
            self.told += 1
            run = Run.of_row(row)
            if run not in self.mine:
                continue
            self.number += 1
            left = [other for other in self.sweep.runs if other not in self.store]
            eta = duration(self.forecast.total(left) / self.workers) if left else "0s"
            undefined = " (undefined, counts as 0)" if row["undefined"] else ""
            print(
                f"[{self.number}/{self.total}] {run.task} batch {run.batch_size} lr {run.lr:g} epochs {run.epochs} "
                f"seed {run.seed}: {row['metric']} {percent(row['score'])}{undefined} (best epoch "
                f"{percent(row['best_epoch_score'])}), {row['seconds']:.0f} s, eta {eta}",
                flush=True,
            )


def _characters(examples: list[Example], sweep: Sweep) -> int:
    longest = sweep.options.max_seq_length * _CHARACTERS_A_PIECE
    return sum(min(longest, 8 + sum(map(len, example.texts))) for example in examples)
