"""Plan of a sweep with its expected time, printed before it starts, and one line per finished run.

The work of a run is epochs × (3 × training characters + development characters): a training step costs a forward and a
backward pass. Seconds per unit of work come from the encoder's finished runs, or before the first one from a probe of a
few timed training steps.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sized
from dataclasses import replace

import numpy as np

from megatron_ddrp.pages.markdown import percent
from megatron_ddrp.run.log import duration
from megatron_ddrp.tasks.finetune.runs import Run
from megatron_ddrp.tasks.finetune.sweep import Sweep
from megatron_ddrp.tasks.finetune.task import Examples
from megatron_ddrp.tasks.finetune.training import FineTuning
from megatron_ddrp.tasks.jobs.forecast import Forecast
from megatron_ddrp.tasks.jobs.store import Store

_PROBE_STEPS = 4
_CHARACTERS_PER_PIECE = 4
_RECENT_RUNS = 50


class RunForecast(Forecast[Run]):
    """Expected seconds of fine-tuning runs."""

    def __init__(self, sweep: Sweep, store: Store):
        super().__init__(store)
        self.sweep = sweep
        self._work = {
            name: (3 * _characters(data.train, sweep), sum(_characters(dev, sweep) for dev in data.dev.values()))
            for name, data in sweep.data.items()
        }
        self._names = {run.name for run in sweep.runs}
        self.source = "measured on finished runs"

    def kind(self, job: Run) -> str:
        """Return the encoder's fingerprint."""
        return job.encoder

    def work(self, job: Run) -> float:
        """Return the work of a run in characters; comparable between runs of one encoder."""
        return job.epochs * float(sum(self._work[job.task]))

    def rates(self, kind: str) -> list[float]:
        """Return seconds per character for the newest runs of an encoder."""
        rows = [row for row in self.store.rows if row["encoder"] == kind and Run.of_row(row).name in self._names]
        return [row["seconds"] / self.work(Run.of_row(row)) for row in rows[-_RECENT_RUNS:]]

    def probe(self, job: Run) -> float:
        """Return the seconds per character, from a few timed training steps of the run's encoder."""
        self.source = f"from a probe of {_PROBE_STEPS} training steps"
        run = replace(job, epochs=2)  # the probe does one step more than an epoch has
        data = self.sweep.data[run.task]
        some = data.train.only(np.arange(min(len(data.train), run.batch_size * _PROBE_STEPS)))
        train = self.sweep.encode(run, some, f"first {len(some):,} rows of train")
        tuning = FineTuning(run, data.task, self.sweep.model(run), train)
        order = tuning.order(0)
        tuning.step(order[0])  # warm-up
        begin = time.perf_counter()
        for rows in order:
            tuning.step(rows)
        next(tuning.model.parameters()).sum().item()  # wait for the device
        return (time.perf_counter() - begin) / len(train) * len(data.train) / self._work[run.task][0]


def _count(things: Sized, name: str) -> str:
    """Return the number of things with their name: "1 task", "2 tasks"."""
    return f"{len(things)} {name}{'s' * (len(things) != 1)}"


def encoder_lines(sweep: Sweep) -> list[str]:
    """Return the lines of the plan about the encoders: their origin, cut rows, and folders that are left out."""
    lines = []
    for encoder in sweep.encoders.values():
        lines.append(f"  {encoder.name}: {encoder.origin}")
        if encoder.max_length < sweep.options.training.max_seq_length:
            lines.append(f"    rows are cut to {encoder.max_length} pieces: the encoder was trained on no longer rows")
    for twin in sweep.twins:
        lines.append(f"  {twin.name}: left out, it has the same weights as {sweep.encoders[twin.fingerprint].name}")
    return lines


def plan_text(sweep: Sweep, store: Store, workers: int) -> str:
    """Return the text of the plan: the missing runs, the origin of each encoder, and the expected time."""
    missing = store.missing(sweep.runs)
    to_do = f"{len(missing)} of {len(sweep.runs)} runs to do"
    tasks = dict.fromkeys(run.task for run in missing or sweep.runs)
    facts = [f"  {task}: {fact}" for task in tasks for fact in sweep.data[task].facts]
    if sweep.ranks:  # no forecast, since a probe would need all ranks
        return "\n".join([f"plan: {to_do}, each on {sweep.ranks.world_size} ranks", *encoder_lines(sweep), *facts])
    options = sweep.options
    lines = [
        f"plan: {_count(sweep.encoders, 'encoder')} x {_count(sweep.data, 'task')} x "
        f"{_count(options.search.points, 'grid point')} x {_count(range(options.search.seeds), 'seed')} = "
        f"{_count(sweep.runs, 'run')} on {sweep.device.type}; {to_do}",
        *encoder_lines(sweep),
    ]
    if not missing:
        return "\n".join([*lines, *facts])
    forecast = RunForecast(sweep, store)
    for task, count in Counter(run.task for run in missing).items():
        data = sweep.data[task]
        expected = forecast.eta([run for run in missing if run.task == task], workers=1)
        dev = ", ".join(f"{len(examples):,} {file}" for file, examples in data.dev.items())
        lines.append(f"  {task:6} {count:4} runs of {len(data.train):,} train, {dev}: {expected}")
        lines += [f"    {fact}" for fact in data.facts]
    total = forecast.total(missing) or 0.0
    sharing = f", {duration(total / workers)} with {workers} workers" if workers > 1 else ""
    lines.append(f"  expected: {duration(total)} with one worker{sharing} ({forecast.source})")
    return "\n".join(lines)


class ResultLines:
    """Printer of one line per finished run, whichever process did it."""

    def __init__(self, sweep: Sweep, store: Store, workers: int):
        self.sweep, self.store, self.workers = sweep, store, workers
        self.forecast = RunForecast(sweep, store)
        self.own = set(sweep.runs)
        self.told = len(store.rows)
        self.total = len(store.missing(sweep.runs))
        self.number = 0

    def tell(self) -> None:
        """Print the runs added to the store since the last call."""
        for row in self.store.rows[self.told :]:
            self.told += 1
            run = Run.of_row(row)
            if run not in self.own:
                continue
            self.number += 1
            eta = self.forecast.eta(self.store.missing(self.sweep.runs), self.workers)
            encoder = f"{self.sweep.encoders[run.encoder].name}, " if len(self.sweep.encoders) > 1 else ""
            undefined = f" (undefined, counts as {100 * row['score']:g})" if row["undefined"] else ""
            print(
                f"[{self.number}/{self.total}] {encoder}{run.task} batch {run.batch_size} lr {run.lr:g} "
                f"epochs {run.epochs} seed {run.seed}: {row['metric']} {percent(row['score'])}{undefined} (best epoch "
                f"{percent(row['best_epoch_score'])}), {row['seconds']:.0f} s, eta {eta}",
                flush=True,
            )


def _characters(examples: Examples, sweep: Sweep) -> int:
    longest = sweep.options.training.max_seq_length * _CHARACTERS_PER_PIECE
    return int(np.minimum(longest, 8 + examples.lengths).sum())
