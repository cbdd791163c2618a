"""Time that the CPU needs per layer and per micro-batch of training on a GPU: Python and torch's dispatch.

    OMP_NUM_THREADS=1 python benchmarks/host_time.py                   # `--compile on` takes minutes to compile
    OMP_NUM_THREADS=1 python benchmarks/host_time.py --compile off
    OMP_NUM_THREADS=1 python benchmarks/host_time.py --write           # also writes the tables of docs/benchmarks.md

All tensors are tiny and lie on the CPU, so the time is that of the code between the kernels, in all of which the CPU
does the same for a GPU. Triton's launches take their way through Triton's own dispatch to a driver that is not there;
replays of CUDA graphs do nothing. No GPU is needed. The time of CUDA's own launches is missing: a few µs per kernel or
graph.

A figure is CPU time of the thread, the minimum over the rounds; every round runs all arms once in random order. A layer
is the difference of a deep and a shallow model, divided by the layers between them. The plain layer is BERT's as
transformers writes it, in the same number format. A step is a whole `train_step` through the DeepSpeed engine with the
settings of a GPU.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from absent_gpu import deepspeed_without_gpu, triton_without_gpu
from arms import make_rows
from measure import benchmark_parser, time_rounds
from pages import write_table
from torch import Tensor, nn

from megatron_ddrp.config import Config, ModelConfig, ObjectiveConfig, ParallelConfig, TrainingConfig
from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.engine import build
from megatron_ddrp.engine.inputs import training_inputs
from megatron_ddrp.engine.layout import WeightedLoss
from megatron_ddrp.engine.step import train_step
from megatron_ddrp.model import build_model, graphs
from megatron_ddrp.model.stages import DTYPES
from megatron_ddrp.objectives.contract import make_objective
from megatron_ddrp.pages.markdown import Table
from megatron_ddrp.parallel import process_group

Step = Callable[[], object]
Key = Any
"""Type of the keys of arms: a `Kind`, a precision, or one of them with a number of layers."""
HEADER = ("objective", "precision", "attention", "--compile", "--cuda-graphs")
DOCUMENT, LAYERS_TABLE, STEPS_TABLE = "benchmarks.md", "host-time-layers", "host-time-steps"
SEQ, HIDDEN, HEADS, VOCABULARY = 8, 32, 2, 200
SHALLOW, DEEP = 2, 14
LAYERS, FEW_LAYERS, MICRO_BATCHES = 12, 2, 8
"""Sizes of whole steps."""
DEPTHS = (LAYERS, FEW_LAYERS)
BOUNDS = {"on": 0.4, "off": 2.0}
"""`--cuda-graphs` → largest time of a layer ÷ the plain layer, with `--compile off`."""
WARM_UP = 6
CPU = torch.device("cpu")


class Kind(NamedTuple):
    """Way to train a layer."""

    objective: str
    precision: str
    backend: str
    compiled: str
    graphs: str

    def config(self, layers: int, micro_batches: int = 1) -> Config:
        """Return the configuration of a run with `ddrp` positions."""
        model = ModelConfig(
            position_encoding="ddrp",
            num_layers=layers,
            hidden_size=HIDDEN,
            num_attention_heads=HEADS,
            seq_length=SEQ,
            relative_distance=2,
            vocab_size=VOCABULARY,
            attention_backend=self.backend,
            compile=self.compiled,
        )
        half = {self.precision: True}
        training = TrainingConfig(micro_batch_size=1, global_batch_size=micro_batches, **half)  # type: ignore[arg-type]
        return Config(
            model=model,
            objective=ObjectiveConfig(objective=self.objective),
            training=training,
            parallel=ParallelConfig(cuda_graphs=self.graphs),
        )


def kinds(compile_settings: Sequence[str]) -> list[Kind]:
    """Return the rows of the tables: Triton attention in bf16 on A100 and H100, torch's in fp16 on V100."""
    ways = itertools.product(("mlm", "mth"), compile_settings, ("off", "on"))
    recent = [Kind(objective, "bf16", "triton", compiled, used) for objective, compiled, used in ways]
    v100 = [Kind(objective, "fp16", "sdpa", "off", used) for objective in ("mlm", "mth") for used in ("off", "on")]
    return [*recent, *v100]


class Replayed:
    """A captured graph whose replay does nothing."""

    def replay(self) -> None: ...


class NoGraphs(graphs.Recorder):
    """Capture of nothing."""

    def __init__(self) -> None: ...

    def graph(self) -> Replayed:
        return Replayed()

    def capture(self, graph: Any) -> Any:
        return nullcontext()

    def aside(self, device: torch.device) -> Any:
        return nullcontext()


class PlainLayer(nn.Module):
    """BERT's layer as transformers writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.expand, self.contract = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        self.attention_norm, self.norm, self.dropout = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN), nn.Dropout(0.1)

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = (
            each(hidden).view(1, SEQ, HEADS, HIDDEN // HEADS).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        context = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(1, SEQ, HIDDEN)
        hidden = self.attention_norm(hidden + self.dropout(self.output(context)))
        return self.norm(hidden + self.dropout(self.contract(F.gelu(self.expand(hidden)))))


def plain_step(layers: int, precision: str) -> Step:
    """Return forward and backward of plain layers."""
    model = nn.Sequential(*(PlainLayer() for _ in range(layers))).to(DTYPES[precision])
    hidden = torch.randn(1, SEQ, HIDDEN, dtype=DTYPES[precision], requires_grad=True)
    return backward_step(model, lambda: model(hidden).sum())


def backward_step(model: nn.Module, loss: Callable[[], Tensor]) -> Step:
    """Return forward and backward, without an optimizer."""
    parameters = list(model.parameters())

    def run() -> None:
        loss().backward()
        for parameter in parameters:
            parameter.grad = None

    return run


def rows() -> Batch:
    """Return a row of random tokens (numpy)."""
    arrays = make_rows(torch.full((1,), SEQ).numpy(), SEQ)
    return arrays._replace(input_ids=arrays.input_ids % VOCABULARY, labels=arrays.labels % VOCABULARY)


def layer_step(kind: Kind, layers: int) -> Step:
    """Return forward and backward of a whole model, without an engine."""
    config = kind.config(layers)
    model: Any = build_model(config.model, objective=config.objective).to(DTYPES[kind.precision]).train()
    model.graphs = graphs.ModelGraphs(NoGraphs) if kind.graphs == "on" else None
    (micro_batch,) = training_inputs([rows()], config, 1, CPU)
    loss = WeightedLoss(torch.ones(len(make_objective(config.objective).sum_names)))
    return backward_step(model, lambda: loss(model(*micro_batch.inputs)))


@contextmanager
def training_without_gpu() -> Iterator[None]:
    """Let DeepSpeed train as on a GPU, with graphs whose replays do nothing."""
    with (
        deepspeed_without_gpu(),
        mock.patch.object(build, "ModelGraphs", lambda: graphs.ModelGraphs(NoGraphs)),
        mock.patch.object(graphs, "why_not_graphs", lambda *_: None),
    ):
        yield


def whole_step(kind: Kind, layers: int, ranks: process_group.Ranks) -> Step:
    """Return a `train_step` of `MICRO_BATCHES` micro-batches through the engine."""
    config = kind.config(layers, MICRO_BATCHES)
    engine = build.build_engine(build_model(config.model, objective=config.objective), config, ranks, MICRO_BATCHES)
    inputs = training_inputs([rows()] * MICRO_BATCHES, config, 1, CPU)
    return lambda: train_step(engine, inputs, config, ranks, 1)


def least_seconds(arms: Mapping[Key, Step], rounds: int) -> dict[Key, float]:
    """Return the least CPU time of each arm over the rounds."""
    names = {str(key): key for key in arms}
    seconds = time_rounds({name: arms[key] for name, key in names.items()}, rounds, WARM_UP, time.thread_time)
    return {names[name]: float(values.min()) for name, values in seconds.items()}


def layer_seconds(chosen: Sequence[Kind], rounds: int) -> dict[Key, float]:
    """Return the seconds of a layer of each kind, and of the plain layer by precision."""
    arms: dict[Key, Step] = {}
    for layers in (SHALLOW, DEEP):
        for kind in chosen:
            arms[kind.precision, layers] = plain_step(layers, kind.precision)
        arms |= {(kind, layers): layer_step(kind, layers) for kind in chosen}
    least = least_seconds(arms, rounds)
    return {key: (least[key, DEEP] - least[key, SHALLOW]) / (DEEP - SHALLOW) for key, layers in arms if layers == DEEP}


def layer_table(seconds: Mapping[Key, float]) -> str:
    """Return the table of layers, with the verdict on those that have a bound."""
    lines = []
    for key, of_layer in seconds.items():
        if not isinstance(key, Kind):
            lines.append(["plain BERT layer", key, "sdpa", "off", "off", f"{1e6 * of_layer:.0f}", "1", ""])
            continue
        ratio = of_layer / seconds[key.precision]
        bound = BOUNDS[key.graphs] if key.compiled == "off" and key.backend == "triton" else None
        verdict = "" if bound is None else f"{bound} {'met' if ratio <= bound else 'missed'}"
        lines.append([*key, f"{1e6 * of_layer:.0f}", f"{ratio:.2f}", verdict])
    return str(Table([*HEADER, "µs per layer", "÷ plain layer", "bound"], lines, wordy=range(1, 5)))


def step_table(chosen: Sequence[Kind], ranks: process_group.Ranks, rounds: int) -> str:
    """Time whole steps, beside plain layers, and return their table."""
    arms: dict[Key, Step] = {(kind, layers): whole_step(kind, layers, ranks) for kind in chosen for layers in DEPTHS}
    arms |= {("plain", layers): plain_step(layers, "bf16") for layers in DEPTHS}
    least = least_seconds(arms, rounds)
    plain = (least["plain", LAYERS] - least["plain", FEW_LAYERS]) / (LAYERS - FEW_LAYERS)
    lines = []
    for kind in chosen:
        whole, few = (least[kind, layers] / MICRO_BATCHES for layers in DEPTHS)
        layer = (whole - few) / (LAYERS - FEW_LAYERS)
        figures = (f"{seconds / plain:.1f}" for seconds in (whole, layer, few - FEW_LAYERS * layer))
        lines.append([*kind, f"{1e3 * whole:.1f}", *figures])
    header = [*HEADER, "ms per micro-batch", "÷ plain layer", "of it per layer", "of it besides layers"]
    return str(Table(header, lines, wordy=range(1, 5)))


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--compile", nargs="+", choices=("off", "on"), default=["off", "on"], help="settings to time")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--step-rounds", type=int, default=15)
    parser.add_argument("--write", action="store_true", help="write the tables into docs/benchmarks.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen, ranks = kinds(options.compile), process_group.start(ParallelConfig())
    with triton_without_gpu(), training_without_gpu():
        tables = {
            LAYERS_TABLE: layer_table(layer_seconds(chosen, options.rounds)),
            STEPS_TABLE: step_table(chosen, ranks, options.step_rounds),
        }
    for name, table in tables.items():
        print(f"{name}\n\n{table}\n")
        if options.write:
            write_table(DOCUMENT, name, table)


if __name__ == "__main__":
    main()
