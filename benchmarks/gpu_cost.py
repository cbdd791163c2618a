"""Estimate training on V100, A100 and H100 without one: launches, bytes and FLOP counted on a fake GPU.

A micro-batch of each encoding × objective × attention backend runs forward and backward in bf16 on the device of
`fake_gpu.py`, with 3 layers and with 2: the difference is a layer, the remainder embeddings, head and loss. A launch
takes the longest of bytes ÷ bandwidth, FLOP ÷ rate and 2 µs, by the rates of `megatron_ddrp/run/devices.py`. MFU is the
model's FLOP (`megatron_ddrp/run/flops.py`) ÷ the device's peak in that time. The optimizer, communication and gaps
between launches are left out. All times are estimates: none was measured. Compiled regions count as one launch on V100
too, which has none under `--compile auto`: that is 1 to 3 % of its time.

    python benchmarks/gpu_cost.py                                      # the table of every combination, in minutes
    python benchmarks/gpu_cost.py --encodings ddrp --objectives mth --launches 40      # a layer's costliest launches
    python benchmarks/gpu_cost.py --json benchmarks/gpu_cost.json --write
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from arms import full_rows
from counting import Counting, Launch, Totals
from fake_gpu import fake_device, fake_tensors, gpu_kernels, on_device
from layouts import SERVER_GPUS
from measure import benchmark_parser
from pages import write_table
from torch import Tensor
from torch.utils._pytree import tree_map_only

from megatron_ddrp.config import ENCODINGS, OBJECTIVES, Config, ModelConfig, ObjectiveConfig, TrainingConfig
from megatron_ddrp.engine.inputs import MicroBatch
from megatron_ddrp.engine.layout import WeightedLoss
from megatron_ddrp.model import on_meta_device
from megatron_ddrp.objectives.contract import make_objective
from megatron_ddrp.pages.markdown import Table
from megatron_ddrp.run.devices import DEVICES, Device
from megatron_ddrp.run.flops import flop_per_token, peak_tflops

BACKENDS = ("sdpa", "triton")
FEWER, MORE = 2, 3
"""Layers of the two models whose difference is a layer."""


@dataclass(frozen=True)
class Cost:
    """Counts and estimates of one micro-batch."""

    layer: Counter[Launch]
    rest: Counter[Launch]
    waits: int
    """Waits of the host for the device, in the whole model's pass over one micro-batch."""
    flop_per_token: float
    config: Config

    def milliseconds(self, device: Device) -> tuple[float, float]:
        """Return the estimated time of a layer and of the whole micro-batch."""
        layer, rest = (1e3 * sum(n * seconds(x, device) for x, n in part.items()) for part in (self.layer, self.rest))
        return layer, layer * self.config.model.num_layers + rest

    def mfu(self, device: Device) -> float:
        """Return the share of the device's published peak that the model's FLOP make up."""
        tokens = self.config.training.micro_batch_size * self.config.model.seq_length
        peak = peak_tflops(device.name, "bf16", tf32=False)
        assert peak is not None, device.name
        return self.flop_per_token * tokens / (1e9 * self.milliseconds(device)[1] * peak)

    def summary(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        model = self.config.model
        forward, backward = (Totals.of(_side(self.layer, is_backward)) for is_backward in (False, True))
        rest = Totals.of(self.rest.elements())
        estimates = {}
        for name, device in ((name, DEVICES[name]) for name in SERVER_GPUS):
            of_layer, whole = self.milliseconds(device)
            if device.is_recent or model.attention_backend != "triton":
                figures = {"layer_ms": round(of_layer, 3), "ms": round(whole, 2), "mfu": round(self.mfu(device), 4)}
                estimates[name] = figures
        return {
            "encoding": model.position_encoding,
            "objective": self.config.objective.objective,
            "backend": model.attention_backend,
            "layer_launches": [forward.launches, backward.launches],
            "layer_bytes": forward.bytes + backward.bytes,
            "layer_flop": forward.flop + backward.flop,
            "rest_launches": rest.launches,
            "rest_bytes": rest.bytes,
            "rest_flop": rest.flop,
            "waits": self.waits,
            "estimates": estimates,
        }


def _side(launches: Counter[Launch], is_backward: bool) -> list[Launch]:
    return [launch for launch in launches.elements() if launch.is_backward == is_backward]


def seconds(launch: Launch, device: Device) -> float:
    """Return the estimated time of one launch."""
    if launch.kind == "attention":
        kernel = "triton"
        if "attention" in launch.name:
            kernel = "sdpa" if "efficient" in launch.name else "flash"
        return device.seconds(launch.bytes, launch.flop, device.attention(kernel, launch.is_backward))
    return device.seconds(launch.bytes, launch.flop, device.single if launch.kind == "single" else device.half)


def count(config: Config) -> Counting:
    """Run one micro-batch of a model forward and backward on the fake GPU, and return what was counted."""
    model_config, rows = config.model, config.training.micro_batch_size
    objective = make_objective(config.objective)
    gpu = fake_device()
    arrays = full_rows(rows, model_config.seq_length)
    given = MicroBatch.of(arrays, objective, config, 1, torch.device("cpu")).inputs
    predicted = round(config.objective.mask_rates.mean * model_config.seq_length)
    with fake_tensors(), Counting(rows, predicted) as counting, gpu_kernels():
        with counting.paused():
            model = on_device(on_meta_device(model_config, config.objective), gpu)
            inputs = tree_map_only(Tensor, lambda x: torch.empty(x.shape, dtype=x.dtype, device=gpu), given)
            loss = WeightedLoss(torch.empty(len(objective.sum_names), device=gpu))
        loss(model.train()(*inputs)).backward()
    return counting


def cost(config: Config) -> Cost:
    """Return a configuration's counts, from models of 2 and 3 layers."""
    fewer, more = (count(config.replace(model={"num_layers": layers})) for layers in (FEWER, MORE))
    layer = Counter(more.launches) - Counter(fewer.launches)
    rest = Counter(fewer.launches)
    for launch, times in layer.items():
        rest[launch] -= FEWER * times
    waits = len(fewer.waits) + (len(more.waits) - len(fewer.waits)) * (config.model.num_layers - FEWER)
    return Cost(layer, +rest, waits, flop_per_token(config).total, config)


def print_launches(found: Cost, most: int) -> None:
    """Print a layer's costliest launches on an H100, and all of them by direction."""
    device = DEVICES["h100"]
    ordered = sorted(found.layer.items(), key=lambda item: -item[1] * seconds(item[0], device))
    for launch, times in ordered[:most]:
        side = "backward" if launch.is_backward else "forward"
        spent = 1e6 * times * seconds(launch, device)
        work = f"{launch.bytes / 1e6:,.1f} MB, {launch.flop / 1e9:,.1f} GFLOP"
        print(f"  {spent:7.1f} µs  {times} x {launch.name} ({side}): {work}")


def table(rows: list[dict[str, Any]]) -> Table:
    """Return the estimates as a table, one row a combination."""

    def mfu(device: str, row: dict[str, Any]) -> str:
        estimate = row["estimates"].get(device)
        return f"{100 * estimate['mfu']:.0f} %" if estimate else "–"

    def launches(row: dict[str, Any]) -> str:
        return "+".join(map(str, row["layer_launches"]))

    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "encoding, objective, backend": lambda row: f"{row['encoding']} {row['objective']} {row['backend']}",
        "launches per layer": launches,
        "GB per layer": lambda row: f"{row['layer_bytes'] / 1e9:.1f}",
        "waits": lambda row: str(row["waits"]),
        "H100: ms per layer": lambda row: f"{row['estimates']['h100']['layer_ms']:.1f}",
        "H100: ms per micro-batch": lambda row: f"{row['estimates']['h100']['ms']:.0f}",
        **{f"MFU {name.upper()}": partial(mfu, name) for name in SERVER_GPUS},
    }
    return Table(list(columns), [[text(row) for text in columns.values()] for row in rows])


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--encodings", nargs="+", default=list(ENCODINGS), choices=ENCODINGS)
    parser.add_argument("--objectives", nargs="+", default=list(OBJECTIVES), choices=OBJECTIVES)
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS), help="as of --attention-backend")
    parser.add_argument("--layers", type=int, default=12, help="layers of the model")
    parser.add_argument("--hidden", type=int, default=768, help="its hidden size")
    parser.add_argument("--heads", type=int, default=12, help="its attention heads")
    parser.add_argument("--seq", type=int, default=512, help="tokens per row")
    parser.add_argument("--rows", type=int, default=32, help="rows per micro-batch")
    parser.add_argument("--dropout", type=float, default=0.1, help="probability, everywhere")
    parser.add_argument("--launches", type=int, default=0, metavar="N", help="print a layer's N costliest launches")
    parser.add_argument("--json", metavar="FILE", help="write the figures")
    parser.add_argument("--markdown", action="store_true", help="print the table alone")
    parser.add_argument("--write", action="store_true", help="put the rows of mlm and mth into docs/benchmarks.md too")
    arguments = parser.parse_args()
    rows = []
    for config in configurations(arguments):
        found = cost(config)
        rows.append(found.summary())
        if not arguments.markdown:
            print(" | ".join(table(rows[-1:]).rows[0]), flush=True)
            print_launches(found, arguments.launches)
    shape = {name: getattr(arguments, name) for name in ("layers", "hidden", "heads", "seq", "rows", "dropout")}
    if arguments.json:
        lines = ",\n".join(map(json.dumps, rows))
        head = json.dumps({"shape": shape, "torch": torch.__version__})[:-1]
        Path(arguments.json).write_text(f'{head}, "rows": [\n{lines}\n]}}\n', encoding="utf-8")
    print(table(rows))
    if arguments.write:
        shown = [row for row in rows if row["objective"] in ("mlm", "mth")]
        write_table("benchmarks.md", "gpu-cost", str(table(shown)))


def configurations(arguments: argparse.Namespace) -> list[Config]:
    """Return a run's configuration for each combination."""
    return [
        Config(
            model=ModelConfig(
                num_layers=arguments.layers,
                hidden_size=arguments.hidden,
                num_attention_heads=arguments.heads,
                seq_length=arguments.seq,
                hidden_dropout=arguments.dropout,
                attention_dropout=arguments.dropout,
                position_encoding=encoding,
                attention_backend=backend,
                compile="on",
            ),
            objective=ObjectiveConfig(objective=objective),
            training=TrainingConfig(micro_batch_size=arguments.rows),
        )
        for encoding in arguments.encodings
        for objective in arguments.objectives
        for backend in arguments.backends
    ]


if __name__ == "__main__":
    main()
