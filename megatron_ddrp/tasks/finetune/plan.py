"""Plan of a sweep, printed before it starts, and one line per finished run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sized

import numpy as np

from megatron_ddrp.pages.markdown import percent
from megatron_ddrp.tasks.finetune.runs import Run
from megatron_ddrp.tasks.finetune.sweep import Sweep
from megatron_ddrp.tasks.finetune.task import Examples
from megatron_ddrp.tasks.jobs.forecast import Part, eta
from megatron_ddrp.tasks.jobs.store import Store

_CHARACTERS_PER_PIECE = 4


def time_left(sweep: Sweep, store: Store, workers: int) -> str:
    """Return the time until `workers` finish the missing runs, as text, from the encoders' finished runs.

    The work of a run is epochs × (3 × training characters + development characters): a training step costs a forward
    and a backward pass.
    """
    longest = sweep.options.training.max_seq_length * _CHARACTERS_PER_PIECE

    def characters(examples: Examples) -> int:
        return int(np.minimum(longest, 8 + examples.lengths).sum())

    epoch = {
        task: 3 * characters(data.train) + sum(map(characters, data.dev.values())) for task, data in sweep.data.items()
    }

    def part(run: Run, seconds: float = 0.0) -> Part:
        return Part(f"run of {sweep.encoders[run.encoder].name}", run.epochs * epoch[run.task], seconds)

    own = set(sweep.runs)
    finished = [part(run, row["seconds"]) for row in store.rows if (run := Run.of_row(row)) in own]
    return eta([part(run) for run in store.missing(sweep.runs)], finished, workers)


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
    """Return the text of the plan: the missing runs, the origin of each encoder, the rows of each task."""
    missing, search = store.missing(sweep.runs), sweep.options.search
    ranks = f", each on {sweep.ranks.world_size} ranks" if sweep.ranks else ""
    lines = [
        f"plan: {_count(sweep.encoders, 'encoder')} x {_count(sweep.data, 'task')} x "
        f"{_count(search.points, 'grid point')} x {_count(range(search.seeds), 'seed')} = "
        f"{_count(sweep.runs, 'run')} on {sweep.device.type}{ranks}; {len(missing)} of {len(sweep.runs)} runs to do",
        *encoder_lines(sweep),
    ]
    for task, count in Counter(run.task for run in missing).items():
        data = sweep.data[task]
        dev = ", ".join(f"{len(examples):,} {file}" for file, examples in data.dev.items())
        lines.append(f"  {task:6} {count:4} runs of {len(data.train):,} train, {dev}")
        lines += [f"    {fact}" for fact in data.facts]
    if missing:
        return "\n".join([*lines, f"  time left: {time_left(sweep, store, workers)}"])
    return "\n".join([*lines, *(f"  {task}: {fact}" for task, data in sweep.data.items() for fact in data.facts)])


class ResultLines:
    """Printer of one line per finished run, whichever process did it."""

    def __init__(self, sweep: Sweep, store: Store, workers: int):
        self.sweep, self.store, self.workers = sweep, store, workers
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
            left = time_left(self.sweep, self.store, self.workers)
            encoder = f"{self.sweep.encoders[run.encoder].name}, " if len(self.sweep.encoders) > 1 else ""
            undefined = f" (undefined, counts as {100 * row['score']:g})" if row["undefined"] else ""
            print(
                f"[{self.number}/{self.total}] {encoder}{run.task} batch {run.batch_size} lr {run.lr:g} "
                f"epochs {run.epochs} seed {run.seed}: {row['metric']} {percent(row['score'])}{undefined} (best epoch "
                f"{percent(row['best_epoch_score'])}), {row['seconds']:.0f} s, eta {left}",
                flush=True,
            )
