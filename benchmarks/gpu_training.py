"""Training for the GPU report: corpora of random tokens, and models of ours and of transformers in training on them.

Every step of ours goes through the real loader, engine and `train_step`. transformers' models train as
`transformers.Trainer` trains under `--bf16`: fp32 weights, autocast, torch's fused AdamW (`training_step`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from arms import SEED, on_device, training_step, transformers_loss, transformers_model
from gpu_device import device_name, kernel_seconds, peak_memory, precision, wait_for_device

from megatron_ddrp.arguments import parse_arguments
from megatron_ddrp.config import Config, ModelConfig, ObjectiveConfig, ParallelConfig
from megatron_ddrp.corpus import Corpus
from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.data.batches.loader import BatchLoader, iterate
from megatron_ddrp.data.dataset.indexed_dataset import UnfinishedDatasets
from megatron_ddrp.engine.build import build_engine, check_device, rows_for
from megatron_ddrp.engine.layout import Setup
from megatron_ddrp.engine.step import MicroBatch, train_step, training_inputs
from megatron_ddrp.parallel import process_group
from megatron_ddrp.parallel.process_group import Ranks
from megatron_ddrp.run.devices import device_named
from megatron_ddrp.run.flops import flop_of_rows
from megatron_ddrp.train import allocate_model

Row = dict[str, Any]
"""One row of a section's table: column → value."""

STEPS = 10**6
MEAN_TEXT = 367
"""Mean length of the texts of the corpus `short`, in tokens."""


@dataclass(frozen=True)
class ReportSizes:
    """Sizes of the models, rows and steps of a report; the defaults are those of the paper's base model."""

    layers: int = 12
    hidden: int = 768
    heads: int = 12
    vocabulary: int = 30522
    lengths: tuple[int, ...] = (512, 128, 2048)
    """Lengths of rows, the first where a table is about something else."""
    tokens: int = 16_384
    """Tokens of a micro-batch, 32 rows of 512 as in the recipe for one GPU."""
    micro_batches: int = 8
    """Micro-batches per optimizer step, as in the recipe."""
    warm_up: int = 3
    """Steps before those that are timed: they compile kernels and capture graphs."""
    steps: int = 8
    """Steps that are timed."""
    corpus_tokens: int = 2_000_000


TINY = ReportSizes(
    2, 32, 4, 200, lengths=(32, 16), tokens=64, micro_batches=2, warm_up=1, steps=2, corpus_tokens=20_000
)
"""Sizes with which a report is tried out on a CPU."""


@dataclass
class Bench:
    """Gives a section of the report its sizes, its corpora and its table."""

    sizes: ReportSizes
    folder: Path
    """Folder of `write_corpora`."""
    write: Callable[[Row], None]
    """Takes a finished row of the section's table."""

    @cached_property
    def ranks(self) -> Ranks:
        """This process as the only rank of a run."""
        return process_group.start(ParallelConfig())


def write_corpora(folder: Path, sizes: ReportSizes) -> None:
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


class StepArm(NamedTuple):
    """One way to train."""

    length: int
    encoding: str = ModelConfig().position_encoding
    objective: str = ObjectiveConfig().objective
    rows: str = "full"
    """Rows without padding ("full"), one text per row ("padded") or several ("packed")."""
    graphs: str = "auto"
    """`--cuda-graphs`."""

    @property
    def row(self) -> Row:
        """The first columns of the arm's row."""
        return {"name": f"{self.encoding} + {self.objective}", "rows": self.rows, "length": self.length}

    def config(self, bench: Bench) -> Config:
        """Return the configuration with micro-batches of at most the report's number of tokens."""
        sizes, is_packed = bench.sizes, self.rows == "packed"
        samples = max(1, sizes.tokens // (min(self.length, MEAN_TEXT) if is_packed else self.length))
        words = (
            f"--num-layers {sizes.layers} --hidden-size {sizes.hidden} --num-attention-heads {sizes.heads} "
            f"--seq-length {self.length} --position-encoding {self.encoding} --objective {self.objective} "
            f"--micro-batch-size {samples} --global-batch-size {samples * sizes.micro_batches} "
            f"--train-iters {STEPS} --split 1,0,0 --cuda-graphs {self.graphs} --{precision()}"
        ).split() + ["--packing"] * is_packed
        files = {"--data-path": "long" if self.rows == "full" else "short", "--vocab-file": "vocab.txt"}
        words += [word for flag, file in files.items() for word in (flag, str(bench.folder / file))]
        return parse_arguments(words).config


class StepWork(NamedTuple):
    """Work of one step."""

    tokens: int
    """Tokens without padding."""
    flop: float
    """FLOP of the model, 0 where they are not counted."""
    number: Callable[[], float]
    """Gives a number by which two runs are compared, at the step's end."""


Running = AbstractContextManager[Callable[[], StepWork]]
"""Type of a model in training: it gives a function that makes one optimizer step."""


def open_loader(config: Config) -> tuple[Config, BatchLoader]:
    """Return the configuration with the vocabulary's size, and the training loader."""
    corpus = Corpus.open(config)
    loader = corpus.loader("train", 0, 1, rows_for(config, torch.device("cuda")))
    return config.replace(model={"vocab_size": corpus.tokenizer.vocab_size}), loader


@contextmanager
def training(arm: StepArm, bench: Bench) -> Iterator[Callable[[], StepWork]]:
    """Give the steps of a real engine on its loader. Their number is the gradient norm."""
    ranks = bench.ranks
    check_device(arm.config(bench), ranks.device)
    config, loader = open_loader(arm.config(bench))
    torch.manual_seed(SEED)
    setup = Setup.of(config, ranks)
    engine = build_engine(allocate_model(config), setup)

    def step() -> StepWork:
        number, micro_batches = next(stream)
        result = train_step(engine, micro_batches, setup, number)
        arrays = [micro_batch.arrays for micro_batch in micro_batches]
        tokens = sum(int((batch.document_ids > 0).sum()) for batch in arrays)  # the step's own counts wait for its end
        flop = flop_of_rows(config, [batch.input_ids.shape for batch in arrays])
        return StepWork(tokens, flop, lambda: result.grad_norm)

    def prepare(batches: list[Batch], number: int) -> tuple[int, list[MicroBatch]]:
        return number + 1, training_inputs(batches, setup, number + 1)

    with closing(iterate(loader, 0, STEPS, prepare)) as stream:
        try:
            yield step
        finally:
            engine.destroy()


@contextmanager
def transformers_training(kind: str, arm: StepArm, bench: Bench) -> Iterator[Callable[[], StepWork]]:
    """Give the steps of a masked LM of transformers on an arm's rows. They have no number."""
    sizes, (_, loader) = bench.sizes, open_loader(arm.config(bench))
    batches = [on_device(batch) for batch in loader.step(0)]
    shape = {"num_hidden_layers": sizes.layers, "hidden_size": sizes.hidden, "num_attention_heads": sizes.heads}
    model = transformers_model(kind, arm.length, vocab_size=sizes.vocabulary, **shape)
    train = training_step(model, *(partial(transformers_loss, model, batch) for batch in batches))

    def step() -> StepWork:
        train()
        return StepWork(sum(batch.input_ids.numel() for batch in batches), 0.0, lambda: 0.0)

    yield step


def time_steps(row: Row, start: Callable[[], Running], sizes: ReportSizes) -> Row:
    """Train a model by itself; return `row` with its times, peak memory and numbers, or with its error as a note."""
    with peak_memory(row), noted(row):
        row |= figures(start, sizes)
    return row


def figures(start: Callable[[], Running], sizes: ReportSizes) -> Row:
    """Return the medians of the timed steps, the numbers of all steps, and the kernels' time in one step more."""
    host, whole, numbers, done = list[float](), list[float](), list[float](), list[StepWork]()
    with start() as step:
        for _ in range(sizes.warm_up + sizes.steps):
            began = time.perf_counter()
            work = step()
            host.append(time.perf_counter() - began)
            wait_for_device()
            whole.append(time.perf_counter() - began)
            done.append(work)
            numbers.append(work.number())
        in_kernels = sum(kernel_seconds(step).values())
    timed = list(zip(done, whole, strict=True))[sizes.warm_up :]
    seconds, per_batch = float(np.median(whole[sizes.warm_up :])), 1e3 / sizes.micro_batches
    device = device_named(device_name())
    peak = device and device.tflops(precision(), tf32=False)
    share = float(np.median([work.flop / took for work, took in timed])) / (peak * 1e12) if peak else None
    return {
        "tokens/s": float(np.median([work.tokens / took for work, took in timed])),
        "ms": seconds * per_batch,
        "host ms": float(np.median(host[sizes.warm_up :])) * per_batch,
        "kernel ms": in_kernels * per_batch or None,
        "busy": in_kernels / seconds or None,
        "MFU": share or None,
        "first steps, s": sum(whole[: sizes.warm_up]) - sizes.warm_up * seconds,
        "numbers": numbers,
    }


@contextmanager
def noted(row: Row) -> Iterator[None]:
    """Note an error in a row."""
    try:
        yield
    except Exception as error:
        row["note"] = one_line(error)


def one_line(error: BaseException) -> str:
    """Return an error in one line of at most 200 characters."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:200]
