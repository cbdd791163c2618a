"""Training for the GPU report: corpora of random tokens, and real engines on them.

Every step goes through the real loader, engine and `train_step`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gpu_device import device_name, precision
from gpu_groups import Bench, Sizes, Work, measure_together

from megatron_ddrp.config import (
    Config,
    DataConfig,
    ModelConfig,
    ObjectiveConfig,
    ParallelConfig,
    TrainingConfig,
    flag,
)
from megatron_ddrp.corpus import Corpus
from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.data.batches.loader import BatchLoader, iterate
from megatron_ddrp.data.dataset.unfinished import UnfinishedDatasets
from megatron_ddrp.engine.build import build_engine
from megatron_ddrp.engine.device import check_device, rows_for
from megatron_ddrp.engine.inputs import MicroBatch, training_inputs
from megatron_ddrp.engine.step import train_step
from megatron_ddrp.parallel.process_group import Ranks
from megatron_ddrp.run.devices import device_named
from megatron_ddrp.run.flops import flop_of_rows
from megatron_ddrp.train import allocate_model

FLAGSHIP = (ModelConfig().position_encoding, ObjectiveConfig().objective)
PLAIN = ("absolute", "mlm")
SEED = 1234
STEPS = 10**6
MEAN_TEXT = 367
"""Mean length of the texts of the corpus `short`, in tokens."""


def write_corpora(folder: Path, sizes: Sizes) -> None:
    """Write vocab.txt and two datasets of random tokens: `long` is one text, `short` many of log-normal lengths."""
    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    words = (f"w{number}" for number in range(sizes.vocabulary - len(special)))
    (folder / "vocab.txt").write_text("\n".join((*special, *words)) + "\n", encoding="utf-8")
    random = np.random.default_rng(SEED)
    texts = random.lognormal(5.3, 1.1, sizes.corpus_tokens // MEAN_TEXT).astype(int)
    for name, lengths in (("long", np.array([sizes.corpus_tokens])), ("short", texts.clip(8, max(sizes.lengths)))):
        ids = random.integers(len(special), sizes.vocabulary, int(lengths.sum())).astype(np.uint16)
        prefix = str(folder / name)
        with UnfinishedDatasets(f"{prefix}.unfinished", [prefix], np.dtype(np.uint16)) as output:
            output.append(0, ids.tobytes(), lengths, np.ones_like(lengths))
            output.publish([None])


class Arm(NamedTuple):
    """One way to train: its row in the table."""

    name: str
    length: int
    model: Mapping[str, Any] = {}
    """Settings of `ModelConfig`."""
    objective: str = "mlm"
    rows: str = "full"
    """Rows without padding ("full"), one text per row ("padded") or several ("packed")."""
    graphs: str = "auto"
    """`--cuda-graphs`."""

    def config(self, bench: Bench, tokens: int) -> Config:
        """Return the configuration with micro-batches of at most `tokens` tokens."""
        sizes, prefix = bench.sizes, "long" if self.rows == "full" else "short"
        samples = max(1, tokens // (min(self.length, MEAN_TEXT) if self.rows == "packed" else self.length))
        shape: dict[str, Any] = {
            "num_layers": sizes.layers,
            "hidden_size": sizes.hidden,
            "num_attention_heads": sizes.heads,
        }
        return Config(
            model=ModelConfig(**shape, seq_length=self.length, **self.model),
            objective=ObjectiveConfig(objective=self.objective),
            data=DataConfig(
                data_path=(str(bench.folder / prefix),),
                vocab_file=str(bench.folder / "vocab.txt"),
                split="1,0,0",
                packing=self.rows == "packed",
            ),
            parallel=ParallelConfig(cuda_graphs=self.graphs),
            training=TrainingConfig(
                micro_batch_size=samples,
                global_batch_size=samples * sizes.micro_batches,
                train_iters=STEPS,
                bf16=precision() == "bf16",
                fp16=precision() == "fp16",
            ),
        )

    def start(self, bench: Bench, tokens: int) -> Training:
        """Start training with micro-batches of at most `tokens` tokens."""
        return Training(self.config(bench, tokens), bench.ranks)


def arm(length: int, encoding: str, objective: str, rows: str = "full", **model: str) -> Arm:
    """Return an arm named after what it trains and the settings in `model`."""
    settings = [f"{flag(name)} {value}" for name, value in model.items()]
    name = ", ".join((f"{encoding} + {objective}", *settings))
    return Arm(name, length, {"position_encoding": encoding, **model}, objective, rows)


def open_loader(config: Config) -> tuple[Config, BatchLoader]:
    """Return the configuration with the vocabulary's size, and the training loader."""
    corpus = Corpus.open(config)
    loader = corpus.loader("train", 0, 1, rows_for(config, torch.device("cuda")))
    return config.replace(model={"vocab_size": corpus.tokenizer.vocab_size}), loader


class Training:
    """A real engine on its loader, stepped from outside."""

    def __init__(self, config: Config, ranks: Ranks) -> None:
        check_device(config, ranks.device)
        self.config, loader = open_loader(config)
        self.ranks = ranks
        torch.manual_seed(SEED)
        self.engine = build_engine(allocate_model(self.config), self.config, ranks, loader.num_micro_batches)
        self.stream = iterate(loader, 0, STEPS, self._prepare)
        self.done: list[Work] = []

    def step(self) -> None:
        """Make one optimizer step on the loader's next micro-batches."""
        micro_batches = next(self.stream)
        train_step(self.engine, micro_batches, self.config, self.ranks, len(self.done) + 1)
        arrays = [micro_batch.arrays for micro_batch in micro_batches]
        tokens = sum(int((batch.document_ids > 0).sum()) for batch in arrays)  # the step's own counts wait for its end
        self.done.append(Work(tokens, [batch.input_ids.shape for batch in arrays]))

    def _prepare(self, micro_batches: list[Batch], number: int) -> list[MicroBatch]:
        return training_inputs(micro_batches, self.config, number + 1, self.ranks.device)

    def mfu(self, work: Work, seconds: float) -> float | None:
        """Return the share of the device's peak; None where the peak is not known."""
        device = device_named(device_name())
        peak = device and device.tflops(self.config.training.precision, tf32=False)
        return flop_of_rows(self.config, work.shapes) / seconds / (peak * 1e12) if peak else None

    def close(self) -> None:
        """Stop the loader and let go of the engine."""
        self.stream.close()
        self.engine.destroy()
        del self.engine


def measure(arms: Iterable[Arm], bench: Bench) -> None:
    """Time arms of our own with rows of one length in turns, and write a row of each."""
    by_key = {(arm.name, arm.rows): arm for arm in arms}
    longest = max(arm.length for arm in by_key.values())
    measure_together({key: partial(arm.start, bench) for key, arm in by_key.items()}, bench, longest)
