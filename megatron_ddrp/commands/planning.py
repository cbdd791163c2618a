"""The plan of `megatron-ddrp plan`: a run per shape that fits a device, the suggested one, and the commands for it.

The time of a training step follows from the table of `run/devices.py`, or is measured on this machine.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import math
import os
import random
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron_ddrp.commands import PROGRAM
from megatron_ddrp.commands.dry_run import columns
from megatron_ddrp.commands.options import (
    EPOCHS,
    SHAPES,
    Fill,
    Plan,
    Shape,
    best_shape,
    fill_rows,
    power_of_two,
    recipe,
    rows_per_rank,
)
from megatron_ddrp.commands.preprocess import main as preprocess
from megatron_ddrp.config import Config, flag_words
from megatron_ddrp.config.run import config_of
from megatron_ddrp.data.dataset.indexed_dataset import IndexedDataset, entry, read_manifest
from megatron_ddrp.data.tokenizers.vocabulary import SPECIALS
from megatron_ddrp.engine.build import precision_fault
from megatron_ddrp.engine.layout import Setup
from megatron_ddrp.errors import ASKED_TO_STOP, UserError
from megatron_ddrp.memory import GIB, neediest_by_zero_stage
from megatron_ddrp.model import Encoder, count_parameters, on_meta_device
from megatron_ddrp.model.fused import named_device
from megatron_ddrp.run.callbacks import Callback
from megatron_ddrp.run.devices import DEVICES, HOST, SHARE, Device, with_chosen_backend
from megatron_ddrp.run.flops import flop_per_token, step_seconds
from megatron_ddrp.run.launch import guest
from megatron_ddrp.run.log import duration
from megatron_ddrp.train import train


class Step(NamedTuple):
    """Time of a step."""

    micro_batch: int
    """Rows per micro-batch with which a step is the fastest."""
    seconds: float
    gib: float | None = None
    """Peak memory of the process that measured it; None for an estimated time."""


class ListedDevice:
    """A device of the table, whose speed is estimated."""

    type = "cuda"

    def __init__(self, name: str, ranks: int) -> None:
        self.like, self.ranks = DEVICES[name], ranks
        self.name, self.memory = name.upper(), self.like.memory
        self.precision = "bf16" if self.like.is_recent else "fp16"

    def fastest(self, config: Config, most: int) -> Step:
        """Return the step with micro-batches of at most `most` rows, and no more tokens than keep a GPU busy."""
        size = min(most, power_of_two(MICRO_BATCH_TOKENS[self.type] / config.model.seq_length))
        return Step(size, step_seconds(config, self.ranks, self.like))


MICRO_BATCH_TOKENS = {"cpu": 2048, "cuda": 32768}
"""Kind of device → tokens of the larger of the two micro-batches that are measured; the other has a quarter."""
STEPS = 1 + 3
"""Steps of a measurement; the first one warms up."""
PATIENCE = 30.0
"""Most seconds of a measurement; a shape that takes longer gets the FLOP/s of the last one measured."""
DOCUMENTS, WORDS = 300, 300
"""Documents of the random text, and words per document."""


class StepTimes(Callback):
    """The seconds of a run's steps from the second one on, if each is logged; the first one warms up."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.peak_gib = 0.0
        """Peak memory of the process, which a run logs."""
        self._ends: list[float] = []

    def on_step(self, row: Mapping[str, Any]) -> None:
        self._ends.append(self.clock())
        self.peak_gib = row["peak_memory_gib"]

    @property
    def seconds(self) -> list[float]:
        return [end - begin for begin, end in itertools.pairwise(self._ends)]


class PresentDevice:
    """This machine's GPU, or its CPU if it has none, measured by short runs on random text."""

    def __init__(self, vocab_size: int, clock: Callable[[], float] = time.perf_counter) -> None:
        """Choose the device; `clock` gives the seconds of the measurements."""
        self.vocab_size, self.clock, self.patience = vocab_size, clock, PATIENCE
        self.type = named_device().type
        if self.type == "cuda":
            device = torch.device(self.type)
            self.name, self.memory = torch.cuda.get_device_name(), torch.cuda.mem_get_info()[1] / GIB
            self.precision = "fp16" if precision_fault("bf16", device) else "bf16"
        else:
            self.name, self.memory = "CPU", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
            self.precision = "fp32"
        self.like: Device | None = DEVICES["a100"] if self.precision == "bf16" else None
        """Device of the table with the same attention backend, if that saves memory."""
        self._rates: dict[int, float] = {}
        """Rows per micro-batch → FLOP/s of the last measurement."""
        self._measured: dict[tuple[int, int, int], Step] = {}
        """Layers, hidden size and rows per micro-batch → measured step of one micro-batch."""

    def fastest(self, config: Config, most: int) -> Step:
        """Return the fastest step of two sizes of micro-batches, of at most `most` rows."""
        large = min(most, power_of_two(MICRO_BATCH_TOKENS[self.type] / config.model.seq_length))
        steps = [self._step(config, size) for size in sorted({max(1, large // 4), large})]
        return min(steps, key=lambda step: step.seconds)

    def _step(self, config: Config, size: int) -> Step:
        """Return the step with micro-batches of `size` rows, measured if that takes at most `PATIENCE`."""
        flop = flop_per_token(config).total * size * config.model.seq_length
        key = config.model.num_layers, config.model.hidden_size, size
        rate = self._rates.get(size)
        if key not in self._measured and (rate is None or STEPS * flop / rate <= self.patience):
            self._measured[key] = self._measure(config, size)
            self._rates[size] = flop / self._measured[key].seconds
        one = self._measured.get(key) or Step(size, flop / self._rates[size])
        return one._replace(seconds=one.seconds * config.training.global_batch_size / size)

    def _measure(self, config: Config, size: int) -> Step:
        """Return the step of one micro-batch: the median time of three, and the memory."""
        model = config.model
        print(f"measuring {model.num_layers} x {model.hidden_size}, {size} rows …", file=sys.stderr, flush=True)
        short = config.replace(
            training={"micro_batch_size": size, "global_batch_size": size, "train_iters": STEPS},
            logging={"log_interval": 1, "eval_interval": 0},
            data={"data_path": (self._random_text,)},
        )
        steps = StepTimes(self.clock)
        with guest(), contextlib.redirect_stdout(io.StringIO()):
            if train(short, [steps]).code:
                raise UserError("stopped while measuring this machine", ASKED_TO_STOP)
        return Step(size, statistics.median(steps.seconds), steps.peak_gib)

    @cached_property
    def _random_text(self) -> str:
        """Prefix of a dataset of random words that has a vocabulary of the right size."""
        self._folder = tempfile.TemporaryDirectory(prefix="megatron-ddrp-plan-")
        folder, draws = Path(self._folder.name), random.Random(0)
        words = [f"w{number}" for number in range(self.vocab_size - len(SPECIALS))]
        texts = [" ".join(draws.choices(words, k=WORDS)) for _ in range(DOCUMENTS)]
        (folder / "text.txt").write_text("\n\n".join(texts), encoding="utf-8")
        (folder / "vocab.txt").write_text("\n".join((*SPECIALS, *words)) + "\n", encoding="utf-8")
        names = (f"--input={folder}/text.txt", f"--output-prefix={folder}/text", f"--vocab-file={folder}/vocab.txt")
        with contextlib.redirect_stdout(io.StringIO()):
            result = preprocess(names)
        assert result is not None
        return result.prefixes[0]


AnyDevice = ListedDevice | PresentDevice

FULL = 0.85
"""Share of the memory that the estimate may fill."""
LEAST_STEPS = 200


class PlannedShape(NamedTuple):
    """A shape with its run."""

    shape: Shape
    parameters: int
    settings: dict[str, Any]
    """Settings of the run; its micro-batch is the fastest one."""
    seen: float
    """Tokens that the run sees."""
    step: Step
    largest: int
    """Rows of the largest micro-batch that fits, a power of two."""
    gib: float
    """Estimated memory of a rank."""

    @property
    def seconds(self) -> float:
        """Time of the run."""
        return self.settings["train_iters"] * self.step.seconds

    def row(self, tokens: float) -> dict[str, Any]:
        """Return the numbers for a Python program; `tokens` are those of the text."""
        times = {"seconds": self.seconds, "step_seconds": self.step.seconds, "measured": self.step.gib is not None}
        sizes = {"largest_micro_batch": self.largest, "memory_gib": self.gib, "epochs": self.seen / tokens}
        return {**self.settings, "parameters": self.parameters, **times, **sizes}


def make_plan(options: argparse.Namespace) -> Plan:
    """Print the plan for the options of the command, and return it."""
    of_data = entry(read_manifest(options.data_path), "tokenizer").get("vocab_size", 30522)
    options.vocab_size = options.vocab_size or of_data
    device = ListedDevice(options.device, options.world_size) if options.device else PresentDevice(options.vocab_size)
    shapes = [shape for shape in SHAPES if shape.num_layers <= options.max_layers]
    fill = fill_rows(options.tokens, documents_of(options.data_path, options.tokens), options.seq_length)
    found = [one for shape in shapes if (one := candidate(shape, fill, options, device))]
    runnable = {one.shape: one.seen for one in found if one.settings["train_iters"] >= LEAST_STEPS}
    if not runnable:
        raise UserError(
            f"no shape takes {LEAST_STEPS} steps on {device.name} in {options.hours:g} hours and at most {EPOCHS} "
            "epochs: give more --hours or more text"
        )
    best = best_shape(runnable, options.tokens)
    chosen = next(one for one in found if one.shape == best)
    print("\n".join([*table(found, fill, best, options, device), *advice(chosen, options)]))
    return Plan({"data_path": options.data_path, **chosen.settings}, [one.row(options.tokens) for one in found])


def candidate(shape: Shape, fill: Fill, options: argparse.Namespace, device: AnyDevice) -> PlannedShape | None:
    """Return a shape's run, or None if the shape does not fit into the memory."""
    ranks, length = options.world_size, options.seq_length
    half = {device.precision: True} if device.precision != "fp32" else {}

    def settings_of(seen: float, rows: int, micro_batch: int) -> dict[str, Any]:
        return recipe(shape, seen, length, rows * ranks, micro_batch, Fill(1, length)) | half  # as those measured

    def config_at(rows: int, micro_batch: int = 1) -> Config:
        return config_of(settings_of(1, rows, micro_batch)).with_vocabulary(options.vocab_size)

    def run_at(rows: int) -> tuple[Step, float]:
        """Return a step of so many rows per rank, and the tokens that the run sees."""
        step = device.fastest(config_at(rows), min(largest, rows))
        return step, min(EPOCHS * options.tokens, options.hours * 3600 / step.seconds * rows * ranks * fill.tokens)

    model = on_meta_device(config_at(1).model, config_at(1).objective)
    parameters = count_parameters(model)[0]
    largest = largest_micro_batch(model, config_at, ranks, device)
    if not largest:
        return None
    seen = run_at(rows_per_rank(math.inf, length, ranks))[1]
    rows = rows_per_rank(seen, length, ranks)
    step, seen = run_at(rows)
    settings = recipe(shape, seen, length, rows * ranks, step.micro_batch, fill) | half
    needed = memory(model, config_at(step.micro_batch, step.micro_batch), ranks, device)
    return PlannedShape(shape, parameters, settings, seen, step, largest, needed)


def documents_of(prefix: str | None, tokens: float) -> float:
    """Return how many documents, as long as those of a dataset, have so many tokens; 0 if it is not there."""
    if not os.path.exists(f"{prefix}.idx"):
        return 0
    dataset = IndexedDataset(str(prefix))
    return tokens * dataset.num_documents / max(1, dataset.num_tokens)


def largest_micro_batch(model: Encoder, config_at: Callable[[int, int], Config], ranks: int, device: AnyDevice) -> int:
    """Return the rows of the largest micro-batch that fits, a power of two; 0 if no row fits.

    `config_at` makes the configuration of a run with so many rows per rank and per micro-batch.
    """
    one, two = (memory(model, config_at(size, size), ranks, device) for size in (1, 2))
    room = FULL * device.memory - one
    return 0 if room < 0 else power_of_two(1 + room / (two - one))


def memory(model: Encoder, config: Config, ranks: int, device: AnyDevice) -> float:
    """Return the estimated memory of a rank in GiB; it is linear in the rows of a micro-batch."""
    config = with_chosen_backend(config, device.like) if device.like else config
    needs = neediest_by_zero_stage(model, Setup.planned(config, ranks, device.type))
    return needs[config.parallel.zero_stage].total / GIB


def table(
    found: Sequence[PlannedShape], fill: Fill, best: Shape, options: argparse.Namespace, device: AnyDevice
) -> list[str]:
    """Return the lines of all shapes."""
    head = ["shape", "parameters", "epochs", "steps", "rows per step", "micro-batch", "largest", "GiB", "time"]
    rows = [[" ", *head]]
    for one in found:
        run = one.settings
        guessed = "~" * (options.device is None and not one.step.gib)
        rows.append(
            [
                *("*" if one.shape == best else " ", str(one.shape), f"{one.parameters / 1e6:,.1f} M"),
                *(f"{one.seen / options.tokens:.3g}", f"{run['train_iters']:,}"),
                *(f"{run[name] // fill.sequences:,}" for name in ("global_batch_size", "micro_batch_size")),
                *(f"{one.largest:,}", f"{one.gib:.2f}"),
                guessed + duration(max(1.0, one.seconds)),
            ]
        )
    how = (
        f"FLOP at {SHARE:.0%} of the published peak, not measured"
        if options.device
        else "measured here, three steps per shape"
    )
    how += "; ~: at the last measured shape's FLOP/s" if any(row[-1].startswith("~") for row in rows) else ""
    left_out = sum(shape.num_layers <= options.max_layers for shape in SHAPES) - len(found)
    return [
        f"{options.tokens:,.0f} different tokens, {options.vocab_size:,} pieces, {options.world_size} x {device.name} "
        f"({device.memory:,.0f} GiB), {device.precision}, {options.hours:g} h, rows of {options.seq_length} tokens:",
        *columns(rows),
        *[f"documents are short: {fill.sequences} of them fill a row, and the commands count documents"]
        * (fill.sequences > 1),
        *([f"{left_out} larger shapes do not fit into the memory"] if left_out else []),
        f"time: {how}; micro-batch: rows of the one used, and of the largest that fits; GiB: with the one used",
        "*: the smallest shape that ties with the best by a law for repeated text, which was fitted to decoders",
    ]


CONTINUE = 1e9
"""Tokens below which the advice is to continue another encoder: about 4 GB of text, from which CamemBERT was as good as
from 138 GB (arXiv:1911.03894)."""


def launcher(ranks: int) -> str:
    """Return the words before `pretrain` that start so many ranks."""
    hosts = f"--num_gpus {ranks}" if ranks <= HOST else "--hostfile hosts"
    return PROGRAM if ranks == 1 else f"deepspeed {hosts} --module megatron_ddrp"


def advice(chosen: PlannedShape, options: argparse.Namespace) -> list[str]:
    """Return the commands for the suggested shape: three short runs for the rate, then the run."""
    lr, steps = chosen.settings["lr"], chosen.settings["train_iters"]
    short = min(steps, max(LEAST_STEPS, steps // 20))
    rates = " ".join(f"{lr * factor:g}" for factor in (0.5, 1, 2))
    shared = {k: v for k, v in chosen.settings.items() if k not in ("train_iters", "lr")}
    words = shlex.join(flag_words([("data_path", options.data_path), *shared.items()]))
    pretrain = f"{launcher(options.world_size)} pretrain {words}"
    trial = f"{pretrain} --train-iters {short} --eval-interval {short} --lr $lr --save rate-$lr"
    continuing = f"{PROGRAM} plan --load NAME --tokens {options.tokens:.0f}"
    return [
        *[f"if this language has an encoder, compare with continuing it: {continuing}"] * (options.tokens < CONTINUE),
        "why rotary positions and masked LM: docs/lab/results.md; megatron-ddrp convert makes a plain modernbert of "
        "the model; the paper's method: --position-encoding ddrp --objective mth behind a command",
        f"first try the rate, {duration(max(1.0, short * chosen.step.seconds))} each; the best has the lowest "
        "validation loss:",
        f"  for lr in {rates}; do {trial}; done",
        "then the run, with the best rate:",
        f"  {pretrain} --train-iters {steps} --lr {lr:g} --save run --load run",
    ]
