"""Compute the tables of docs/scaling.md: three models on 8 to 1,024 GPUs, and a corpus of 10 TB. All are estimates.

    python benchmarks/scaling.py              # writes the tables between the markers of docs/scaling.md
    python benchmarks/scaling.py --print      # prints them

A step's time comes from `megatron_ddrp/run/cost.py`, memory from `megatron_ddrp/memory.py`. The table has the fastest
layout that fits (tensor x pipeline x data, ZeRO stage, micro-batch size, recomputation). The rates of the data pipeline
are those measured in docs/benchmarks.md.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path

from layouts import GIB, MODELS, SERVER_GPUS, WORLD_SIZES, Choice, best, efficiency, parameters
from measure import benchmark_parser
from pages import write_table
from published import recipes

from megatron_ddrp.config import Config, ModelConfig, ObjectiveConfig, TrainingConfig
from megatron_ddrp.pages.markdown import Table
from megatron_ddrp.run.cost import attention_seconds, estimate_step, mfu, micro_batch_seconds
from megatron_ddrp.run.devices import DEVICES

DOCUMENT = "scaling.md"
COUNTS = Path(__file__).with_name("gpu_cost.json")
SHOWN = (8, 64, 1024)
"""GPUs of the tables of layouts."""
LEAST_EFFICIENCY = 0.5


def layout_table(name: str) -> str:
    """Return the table of a model's best layouts."""
    rows = []
    for device_name, world_size in itertools.product(SERVER_GPUS, SHOWN):
        choice = best(name, device_name, world_size)
        if choice is None:
            rows.append([device_name.upper(), f"{world_size:,}", "does not fit", *[""] * 5])
            continue
        share = mfu(choice.config, choice.estimate.seconds, world_size, DEVICES[device_name])
        rows.append(
            [
                *(device_name.upper(), f"{world_size:,}", str(choice), f"{choice.estimate.seconds:.3f}"),
                *(f"{choice.tokens_per_second / 1e3:,.0f}", percent(share)),
                *(percent(efficiency(name, device_name, choice)), f"{choice.memory / GIB:.0f}"),
            ]
        )
    header = ["GPU", "GPUs", "tensor x pipeline x data", "s per step", "thousand tokens/s per GPU", "MFU"]
    return str(Table([*header, "efficiency", "GiB per rank"], rows, wordy=(2,)))


def ends() -> str:
    """Return the table of where each model stops scaling."""
    rows = []
    for name, device_name in itertools.product(MODELS, SERVER_GPUS):
        found = [choice for size in WORLD_SIZES if (choice := best(name, device_name, size))]
        good = [x for x in found if efficiency(name, device_name, x) >= LEAST_EFFICIENCY]
        row = [name, device_name.upper()]
        if len(good) == len(found):
            rows.append([*row, f"beyond {WORLD_SIZES[-1]:,}", str(good[-1]), "", ""])
            continue
        spent = losses(found[0], found[len(good)])
        most = max(spent, key=lambda part: spent[part])
        rows.append([*row, f"{good[-1].world_size:,}", str(good[-1]), most, percent(spent[most])])
    header = [
        "model",
        "GPU",
        "GPUs",
        "tensor x pipeline x data there",
        "largest loss at twice as many",
        "share of the step",
    ]
    return str(Table(header, rows, wordy=(3, 4)))


def losses(first: Choice, last: Choice) -> dict[str, float]:
    """Return the losses of `last` compared with the speed of `first`, as shares of its step."""
    least = first.estimate.compute * first.world_size / last.world_size
    estimate = last.estimate
    spent = {
        "micro-batches too small": estimate.compute - least,
        "tensor parallelism": estimate.tensor,
        "pipeline": estimate.pipeline,
        "gradients and weights": estimate.data,
    }
    return {name: seconds / estimate.seconds for name, seconds in spent.items()}


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def rates() -> str:
    """Return the table of the devices' assumed rates."""
    rows = [
        [
            *(name.upper(), f"{device.half:.0f}", f"{device.single:.0f}", f"{device.bandwidth:.2f}"),
            *(f"{device.memory:g}", f"{device.inside:.0f}", f"{device.between:.0f}"),
        ]
        for name, device in DEVICES.items()
    ]
    header = ["GPU", "TFLOP/s half", "TFLOP/s fp32", "TB/s", "GiB", "GB/s inside a host", "GB/s between hosts"]
    return str(Table(header, rows))


def check() -> str:
    """Return the formula's time of a micro-batch beside the sum over counted launches."""
    counted = json.loads(COUNTS.read_text(encoding="utf-8"))
    shape, rows = counted["shape"], []
    for row in counted["rows"]:
        for name, figures in row["estimates"].items():
            kernel = "triton" if DEVICES[name].is_recent else "sdpa"
            if row["encoding"] != "ddrp" or row["objective"] not in ("mlm", "mth") or row["backend"] != kernel:
                continue
            config = Config(
                model=ModelConfig(position_encoding=row["encoding"]),
                objective=ObjectiveConfig(objective=row["objective"]),
                training=TrainingConfig(micro_batch_size=shape["rows"], fp16=True),
            )
            formula = 1e3 * micro_batch_seconds(config, DEVICES[name])
            of_row = f"{row['encoding']} {row['objective']}, {kernel}"
            rows.append([of_row, name.upper(), f"{formula:.0f}", f"{figures['ms']:.0f}"])
    return str(Table(["base, 32 x 512", "GPU", "ms by formula", "ms by counted launches"], rows))


def host() -> str:
    """Return the flagship's time per micro-batch by device and host, and the part of Triton attention in it."""
    rows = []
    for name in ("v100", "a100", "h100"):
        device = DEVICES[name]
        half = {"bf16" if device.is_recent else "fp16": True}
        training = TrainingConfig(micro_batch_size=32, global_batch_size=256, **half)  # type: ignore[arg-type]
        off = Config(training=training)
        without, with_graphs = (
            estimate_step(off.replace(parallel={"cuda_graphs": setting}), parameters("base"), 1, device)
            for setting in ("off", "auto")
        )
        attention = f"{1e3 * attention_seconds(off, device):.1f}" if device.is_recent else "–"
        times = (without.device, without.host, with_graphs.host)
        longer = (max(without.device, without.host), max(with_graphs.device, with_graphs.host))
        cells = [f"{1e3 * seconds:.0f}" for seconds in (*times, *longer)]
        rows.append([name.upper(), *cells, attention])
    header = ["GPU", "device", "host", "host, graphs", "micro-batch", "micro-batch, graphs"]
    return str(Table([*header, "of device: Triton attention"], rows))


CORPUS = 10e12
"""Bytes of text."""
SAMPLE_BYTES, SAMPLE_DOCUMENTS, SAMPLE_TOKENS = 332.6e6, 86_221, 69.8e6
"""English Wikipedia, preprocessed as in docs/benchmarks.md."""
BYTES_PER_CORE = 21.5e6 / 2
"""Bytes of text per second and core, measured there."""
LOADED_TOKENS = 5.92e6
"""Tokens per second that one thread packs, measured there (WordPiece, whole words)."""
PARTITION = 100e9
CORES = 32
"""Bytes of a partition, and cores that preprocess it."""


def corpus() -> str:
    """Return the table of estimates for 10 TB of text."""
    documents, tokens = (CORPUS / SAMPLE_BYTES * number for number in (SAMPLE_DOCUMENTS, SAMPLE_TOKENS))
    partitions = math.ceil(CORPUS / PARTITION)
    hours = PARTITION / (CORES * BYTES_PER_CORE) / 3600
    fastest = max(choice.tokens_per_second for device in SERVER_GPUS if (choice := best("base", device, 8)))
    index, margin = 20 * documents, LOADED_TOKENS / fastest
    rows = [
        ["documents, tokens", f"{documents / 1e9:.1f} billion, {tokens / 1e12:.1f} trillion"],
        ["partitions of 100 GB", f"{partitions}"],
        [f"preprocessing one partition on {CORES} cores", f"{60 * hours:.0f} minutes"],
        ["all partitions, one host after the other", f"{partitions * hours:.1f} hours; on 10 hosts a tenth"],
        [".bin, 2 bytes per token", f"{2 * tokens / 1e12:.1f} TB"],
        [".idx, 20 bytes per document", f"{index / 1e9:.0f} GB, {index / partitions / 1e6:.0f} MB each"],
        ["sample index, 0.4 byte per document", f"{0.4 * documents / 1e9:.1f} GB"],
        ["making the sample index, 1.65 s per 10⁸ documents", f"{1.65 * documents / 1e8:.0f} s"],
        ["tokens per second that a rank needs (base, H200)", f"{fastest / 1e6:.2f} million"],
        ["tokens per second that its loader makes", f"{LOADED_TOKENS / 1e6:.2f} million, {margin:.0f} times"],
    ]
    return str(Table(["quantity", "estimate"], rows, wordy=(1,)))


BLOCKS: dict[str, Callable[[], str]] = {
    "rates": rates,
    "check": check,
    "host": host,
    **{name: (lambda name=name: layout_table(name)) for name in MODELS},  # type: ignore[misc]
    "ends": ends,
    "corpus": corpus,
    "recipes": recipes,
}
"""Name of a table's markers in the page → the function that computes it."""


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--print", action="store_true", help="print the tables and write nothing")
    only_print = parser.parse_args().print
    for name, compute in BLOCKS.items():
        table = compute()
        print(f"{name}\n\n{table}\n", flush=True)
        if not only_print:
            write_table(DOCUMENT, name, table)


if __name__ == "__main__":
    main()
