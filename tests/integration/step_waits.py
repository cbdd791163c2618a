"""Where the host waits for the device in a whole `train_step` through the DeepSpeed engine.

The settings are a GPU's and the tensors a CPU's. A number read from a tensor and DeepSpeed's `synchronize` are counted,
each by the file that waits; what our own model could wait for is refused in `tests/unit/test_waits.py`.
"""

from __future__ import annotations

import traceback
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ddrp.arguments import parse_arguments
from megatron_ddrp.config import Config
from megatron_ddrp.corpus import Corpus
from megatron_ddrp.engine import build
from megatron_ddrp.engine.step import train_step, training_inputs
from megatron_ddrp.model import build_model
from megatron_ddrp.parallel.process_group import Ranks, place_in_grid
from tests.absent_gpu import deepspeed_without_gpu
from tests.integration.launch import TIMEOUT
from tests.integration.training_runs import forget_layout, run_ranks

READS = (
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.masked_fill_.Tensor,  # a kernel of CUDA takes the value as a number
    torch.ops.aten.masked_fill.Tensor,
)
WARM_UP_STEPS = 3
"""DeepSpeed's throughput timer waits from the third step on."""

Waits = dict[str, int]
"""`read FILE` or `synchronize FILE` → number per step."""


def waits_of(world_size: int, command_lines: list[list[str]]) -> list[Waits]:
    """Return the waits of a step of each `pretrain_bert.py ARGUMENTS` on the first of `world_size` ranks."""
    return run_ranks(world_size, _count_all, command_lines, TIMEOUT)[0]


def _count_all(command_lines: list[list[str]], _: Path) -> list[Waits]:
    return [waits_of_step(parse_arguments(words).config) for words in command_lines]


class Waiting(TorchDispatchMode):
    """Counter of the numbers that the host reads."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS:
            self.count("read")
        return func(*args, **(kwargs or {}))

    def count(self, what: str, *_: object) -> None:
        frames = [frame.filename for frame in traceback.extract_stack() if Path(__file__).name not in frame.filename]
        places = [name for name in frames if "/deepspeed/" in name or "/megatron_ddrp/" in name]
        self.waits[f"{what} {Path(places[-1]).name}"] += 1


class Stream:
    """A stream of a device that has one queue, and an event in it."""

    def __init__(self, waiting: Waiting) -> None:
        self.waiting = waiting

    def wait_stream(self, _other: object) -> None: ...

    wait_event = record = wait_stream

    def synchronize(self) -> None:
        self.waiting.count("synchronize")


def waits_of_step(config: Config) -> Waits:
    """Return the waits of the step after `WARM_UP_STEPS`."""
    from deepspeed.accelerator import get_accelerator

    ranks = place_in_grid(torch.device("cpu"), config.parallel)
    corpus = Corpus.open(config)
    config = config.replace(model={"vocab_size": corpus.tokenizer.vocab_size})
    loader = corpus.loader("train", ranks.data_rank, ranks.data_size)
    accelerator, waiting = type(get_accelerator()), Waiting()
    with (
        deepspeed_without_gpu(),
        mock.patch.object(accelerator, "current_stream", lambda *_: Stream(waiting)),
        mock.patch.object(accelerator, "Event", lambda *_, **__: Stream(waiting)),
        mock.patch.object(torch.Tensor, "record_stream", lambda *_: None),
        mock.patch.object(accelerator, "synchronize", lambda *_: waiting.count("synchronize")),
    ):
        model = build_model(config.model, objective=config.objective)
        engine = build.build_engine(model, config, ranks, loader.num_micro_batches)
        engine.optimizer.reduction_stream = Stream(waiting)
        for step in range(1, WARM_UP_STEPS + 1):
            _take(engine, loader, config, ranks, step)
        waiting.waits.clear()
        with waiting:
            _take(engine, loader, config, ranks, WARM_UP_STEPS + 1)
        waits = dict(waiting.waits)
        engine.destroy()
    forget_layout()
    return waits


def _take(engine: Any, loader: Any, config: Config, ranks: Ranks, step: int) -> None:
    micro_batches = loader.step((step - 1) * config.training.global_batch_size)
    train_step(engine, training_inputs(micro_batches, config, step, ranks.device), config, ranks, step)
