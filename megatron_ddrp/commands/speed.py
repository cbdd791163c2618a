"""Time of a training step on a device: by the table of `run/devices.py`, or measured on this machine."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron_ddrp.commands.preprocess import main as preprocess
from megatron_ddrp.config import Config
from megatron_ddrp.data.tokenizers.vocabulary import SPECIALS
from megatron_ddrp.engine.device import precision_fault
from megatron_ddrp.errors import ASKED_TO_STOP, UserError
from megatron_ddrp.memory import GIB
from megatron_ddrp.model.gpus import named_device
from megatron_ddrp.run.callbacks import Callback
from megatron_ddrp.run.devices import DEVICES, Device
from megatron_ddrp.run.flops import flop_per_token, step_seconds
from megatron_ddrp.run.guest import guest
from megatron_ddrp.run.sizing import power_of_two
from megatron_ddrp.train import train


class Step(NamedTuple):
    """Time of a step."""

    micro_batch: int
    """Rows per micro-batch with which a step is the fastest."""
    seconds: float
    is_measured: bool = False


class ListedDevice:
    """A device of the table, whose speed is estimated."""

    type = "cuda"

    def __init__(self, name: str, ranks: int) -> None:
        self.like, self.ranks = DEVICES[name], ranks
        self.name, self.memory = name.upper(), self.like.memory
        self.precision = "bf16" if self.like.is_recent else "fp16"

    def fastest(self, config: Config, parameters: int, most: int) -> Step:
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
        self._ends: list[float] = []

    def on_step(self, row: Mapping[str, Any]) -> None:
        self._ends.append(self.clock())

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
        self._seconds: dict[tuple[int, int, int], float] = {}
        """Layers, hidden size and rows per micro-batch → measured seconds of a step of one micro-batch."""

    def fastest(self, config: Config, parameters: int, most: int) -> Step:
        """Return the fastest step of two sizes of micro-batches, of at most `most` rows."""
        large = min(most, max(1, MICRO_BATCH_TOKENS[self.type] // config.model.seq_length))
        steps = [self._step(config, size) for size in sorted({max(1, large // 4), large})]
        return min(steps, key=lambda step: step.seconds)

    def _step(self, config: Config, size: int) -> Step:
        """Return the step with micro-batches of `size` rows, measured if that takes at most `PATIENCE`."""
        flop = flop_per_token(config).total * size * config.model.seq_length
        key = config.model.num_layers, config.model.hidden_size, size
        rate = self._rates.get(size)
        if key not in self._seconds and (rate is None or STEPS * flop / rate <= self.patience):
            self._seconds[key] = self._measure(config, size)
            self._rates[size] = flop / self._seconds[key]
        seconds = self._seconds.get(key) or flop / self._rates[size]
        return Step(size, seconds * config.training.global_batch_size / size, key in self._seconds)

    def _measure(self, config: Config, size: int) -> float:
        """Return the median seconds of three steps of one micro-batch."""
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
        return statistics.median(steps.seconds)

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
