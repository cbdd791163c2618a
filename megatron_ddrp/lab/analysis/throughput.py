"""Speed and memory of encoders at inference, per row length.

Every batch has about the same number of tokens in full rows: at length L it has tokens ÷ L rows of L tokens. The
encoders take turns, in a random order in each round, so that a machine that slows down affects all of them. Memory is
the peak during one forward pass minus the memory of the loaded encoder: on a GPU the peak of torch's allocator, on a
CPU the peak resident size, measured in a fresh process per encoder and length.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_ddrp.config import load_plugin
from megatron_ddrp.config.registry import plugin_files
from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer
from megatron_ddrp.encoders.encoder import Encoder, load_encoder
from megatron_ddrp.errors import lacks_memory
from megatron_ddrp.lab.analysis.models import Snapshot
from megatron_ddrp.run.host_memory import peak_resident_bytes, reset_peak_resident_bytes, return_freed_memory

WARM_UP_LENGTH = 8


@dataclass(frozen=True)
class Setting:
    """Settings of a measurement, the same for all encoders."""

    device: torch.device
    tokens: int
    """Tokens per batch; a longer row makes a batch alone."""
    rounds: int
    bf16: bool
    seed: int

    def rows(self, length: int) -> int:
        """Return the number of rows per batch."""
        return max(1, self.tokens // length)

    def autocast(self) -> AbstractContextManager:
        """Return the context in which a forward pass runs."""
        return torch.autocast(self.device.type, torch.bfloat16) if self.bf16 else nullcontext()


@dataclass(frozen=True)
class Speed:
    """Times and memory of one encoder at one length."""

    length: int
    rows: int
    tokens_per_second: float
    """Median over the rounds."""
    lower_quartile: float
    upper_quartile: float
    memory_bytes: int | None
    """Peak during one forward pass minus the memory of the loaded encoder; None on a CPU without Linux's /proc."""


@dataclass(frozen=True)
class Timed:
    """An encoder and its measurements."""

    snapshot: Snapshot
    encoder: Encoder
    speeds: list[Speed] = field(default_factory=list)
    left_out: dict[int, str] = field(default_factory=dict)
    """Length → the reason why it was not measured."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of the encoder's weights in memory."""
        return sum(parameter.nbytes for parameter in self.encoder.module.parameters())


def measure_throughput(
    snapshots: Sequence[Snapshot], lengths: Sequence[int], setting: Setting, advance: Callable[[], object]
) -> list[Timed]:
    """Measure each model at each length; leave out lengths beyond its positions or the memory.

    Call `advance` encoders × lengths × (rounds + 1) times in total, also for lengths that are left out.
    """
    timed = [Timed(snapshot, load_encoder(snapshot.path)) for snapshot in snapshots]
    for each in timed:
        each.encoder.module.eval().to(setting.device)
    order = np.random.default_rng(setting.seed)
    for length in lengths:
        memory = {}
        for number, each in enumerate(timed):
            if length > each.encoder.max_length:
                each.left_out[length] = f"it has positions for {each.encoder.max_length} tokens"
            else:
                try:
                    memory[number] = peak_memory(each, length, setting)
                except RuntimeError as error:
                    each.left_out[length] = _want_of_memory(error)
            for _ in range(setting.rounds + 1 if length in each.left_out else 1):
                advance()
        seconds = _time_rounds([timed[number] for number in memory], length, setting, order, advance)
        for (number, peak), row in zip(memory.items(), seconds, strict=True):
            timed[number].speeds.append(_speed(length, setting.rows(length), row, peak))
    return timed


def peak_memory(timed: Timed, length: int, setting: Setting) -> int | None:
    """Return the peak memory of a forward pass in bytes, minus the memory of the loaded encoder.

    Raises `RuntimeError` if the memory is too small or the process that measures is killed.
    """
    if setting.device.type != "cuda":
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
            plugins = plugin_files()
            return fresh.submit(_peak_in_this_process, timed.snapshot.path, length, setting, plugins).result()
    batch = full_batch(timed.encoder.tokenizer, setting.rows(length), length, setting)
    start = torch.cuda.memory_allocated(setting.device)
    torch.cuda.reset_peak_memory_stats(setting.device)
    _forward(timed.encoder, batch, setting)
    return torch.cuda.max_memory_allocated(setting.device) - start


def _peak_in_this_process(path: Path, length: int, setting: Setting, plugins: tuple[Path, ...]) -> int | None:
    return_freed_memory()
    for plugin in plugins:
        load_plugin(plugin)
    encoder = load_encoder(path)
    encoder.module.eval()
    _forward(encoder, full_batch(encoder.tokenizer, 1, min(WARM_UP_LENGTH, length), setting), setting)
    batch = full_batch(encoder.tokenizer, setting.rows(length), length, setting)
    start = reset_peak_resident_bytes()
    _forward(encoder, batch, setting)
    return None if start is None else max(0, peak_resident_bytes() - start)


def full_batch(tokenizer: Tokenizer, rows: int, length: int, setting: Setting) -> Batch:
    """Return a batch `[rows, length]` on the device: [CLS], random pieces, [SEP], no padding."""
    ordinary = np.setdiff1d(np.arange(tokenizer.vocab_size), tokenizer.special_ids)
    ids = np.random.default_rng(setting.seed).choice(ordinary, (rows, length))
    ids[:, 0], ids[:, -1] = tokenizer.cls_id, tokenizer.sep_id
    return Batch.of_texts(ids, np.ones_like(ids)).map(lambda array: torch.from_numpy(array).to(setting.device))


@torch.inference_mode()
def _forward(encoder: Encoder, batch: Batch, setting: Setting) -> None:
    with setting.autocast():
        encoder.module(batch)
    if setting.device.type == "cuda":
        torch.cuda.synchronize(setting.device)


def _time_rounds(
    timed: Sequence[Timed], length: int, setting: Setting, order: np.random.Generator, advance: Callable[[], object]
) -> NDArray[np.float64]:
    """Return the seconds of each forward pass, `[encoders, rounds]`, after one untimed pass per encoder."""
    batches = [full_batch(each.encoder.tokenizer, setting.rows(length), length, setting) for each in timed]
    for each, batch in zip(timed, batches, strict=True):
        _forward(each.encoder, batch, setting)
    seconds = np.zeros((len(timed), setting.rounds))
    for number in range(setting.rounds):
        for row in order.permutation(len(timed)):
            begin = time.perf_counter()
            _forward(timed[row].encoder, batches[row], setting)
            seconds[row, number] = time.perf_counter() - begin
            advance()
    return seconds


def _speed(length: int, rows: int, seconds: NDArray[np.float64], memory: int | None) -> Speed:
    """Return the speed: quartiles of tokens per second over the rounds. `seconds` is `[rounds]`."""
    low, median, high = np.percentile(rows * length / seconds, [25, 50, 75]).tolist()
    return Speed(length, rows, median, low, high, memory)


def _want_of_memory(error: RuntimeError) -> str:
    """Return the reason for leaving a length out. Raises the error again if it is not about memory."""
    if isinstance(error, BrokenProcessPool):
        return "the process that measured its memory was killed, probably for taking too much"
    if lacks_memory(error):
        return "not enough memory; give a smaller --tokens"
    raise error
