"""Compute the tables of docs/scaling.md: three models on 8 to 1,024 GPUs, and a corpus of 10 TB. All are estimates.

    python benchmarks/scaling.py              # writes the tables between the markers of docs/scaling.md
    python benchmarks/scaling.py --print      # prints them

A step's time is that of `megatron_ddrp/run/cost.py`, memory that of `megatron_ddrp/memory.py`. Of all layouts (tensor x
pipeline x data, ZeRO stage, micro-batch size, recomputation) the fastest that fits stands in the table. Rates of the
data pipeline are those measured in docs/benchmarks.md.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from measure import benchmark_parser

from megatron_ddrp.config import Config, ModelConfig, ObjectiveConfig, ParallelConfig, TrainingConfig
from megatron_ddrp.data.batches.loader import count_micro_batches
from megatron_ddrp.engine.build import deepspeed_settings
from megatron_ddrp.errors import UserError
from megatron_ddrp.memory import Part, cut_up, memory_of_rank
from megatron_ddrp.model import count_parameters, on_meta_device
from megatron_ddrp.run.cost import DEVICES, Device, Estimate, estimate_step, mfu, micro_batch_seconds
from megatron_ddrp.tasks.markdown import Table

PAGE = Path(__file__).resolve().parents[1] / "docs" / "scaling.md"
COUNTS = Path(__file__).with_name("gpu_cost.json")
GIB = 2**30
USABLE = 0.9
"""Share of a device's memory that a layout may take."""
SHOWN = (8, 64, 1024)
WORLD_SIZES = tuple(8 * 2**power for power in range(10))
"""8 to 4,096 GPUs, on which the end of scaling is looked for."""
LEAST_EFFICIENCY = 0.5


@dataclass(frozen=True)
class Model:
    """A model of the tables."""

    shape: ModelConfig
    batch: int
    """Sequences per step."""


MODELS = {
    "base": Model(ModelConfig(), 4096),
    "large": Model(ModelConfig(num_layers=24, hidden_size=1024, num_attention_heads=16), 4096),
    "3.9 B": Model(
        ModelConfig(num_layers=48, hidden_size=2560, num_attention_heads=40, layernorm_position="pre"), 1024
    ),
}


@dataclass(frozen=True)
class Choice:
    """The fastest layout that fits."""

    config: Config
    world_size: int
    estimate: Estimate
    memory: int
    """Bytes of the neediest rank."""

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of one GPU."""
        training = self.config.training
        tokens = training.global_batch_size * self.config.model.seq_length
        return tokens / self.estimate.seconds / self.world_size

    def __str__(self) -> str:
        parallel, training = self.config.parallel, self.config.training
        tensor, stages = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
        again = ", recomputed" if parallel.checkpoint_activations else ""
        data = parallel.data_parallel_size(self.world_size)
        rows = f"{training.micro_batch_size} row{'s' * (training.micro_batch_size > 1)}"
        return f"{tensor} x {stages} x {data}, ZeRO {parallel.zero_stage}, {rows}{again}"


def candidates(name: str, world_size: int, device: Device) -> Iterator[Config]:
    """Yield the configurations of a model in every layout of so many ranks."""
    model = MODELS[name]
    sizes = itertools.product((1, 2, 4, 8), (1, 2, 4, 8, 16), (1, 2, 3), (1, 2, 4, 8, 16, 32, 64), (False, True))
    for tensor, stages, zero, rows, recompute in sizes:
        if world_size % (tensor * stages) or (stages > 1 and zero > 1):
            continue
        if model.batch % (rows * world_size // (tensor * stages)):
            continue
        try:
            yield Config(
                model=model.shape,
                objective=ObjectiveConfig(),
                training=TrainingConfig(
                    micro_batch_size=rows,
                    global_batch_size=model.batch,
                    bf16=device.is_recent,
                    fp16=not device.is_recent,
                ),
                parallel=ParallelConfig(
                    tensor_model_parallel_size=tensor,
                    pipeline_model_parallel_size=stages,
                    zero_stage=zero,
                    checkpoint_activations=recompute,
                ),
            )
        except UserError:  # a size that does not divide
            continue


@cache
def parameters(name: str) -> int:
    """Return the number of a model's parameters."""
    return count_parameters(on_meta_device(MODELS[name].shape, ObjectiveConfig()))[0]


@cache
def parts(name: str, tensor: int, stages: int, micro_batches: int) -> list[Part]:
    """Return a model's parts on tensor x pipeline ranks."""
    parallel = ParallelConfig(tensor_model_parallel_size=tensor, pipeline_model_parallel_size=stages)
    config = Config(model=MODELS[name].shape, parallel=parallel)
    return cut_up(on_meta_device(config.model, ObjectiveConfig()), config, micro_batches)


def memory(name: str, config: Config, world_size: int) -> int:
    """Return the bytes that the neediest rank needs."""
    parallel, training = config.parallel, config.training
    data = parallel.data_parallel_size(world_size)
    micro_batches = count_micro_batches(training.global_batch_size, training.micro_batch_size, data)
    tensor, stages = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    needs = []
    for part in parts(name, tensor, stages, min(micro_batches, stages)):  # no stage holds more than `stages` at once
        zero = deepspeed_settings(config, micro_batches, data, sum(part.sizes))["zero_optimization"]
        needs.append(memory_of_rank(part, config, parallel.zero_stage, zero, 0, data).total)
    return max(needs)


@cache
def best(name: str, device_name: str, world_size: int) -> Choice | None:
    """Return the fastest layout that fits, None where none does."""
    device = DEVICES[device_name]
    timed = [
        (estimate_step(config, parameters(name), world_size, device), config)
        for config in candidates(name, world_size, device)
    ]
    for estimate, config in sorted(timed, key=lambda pair: pair[0].seconds):
        needed = memory(name, config, world_size)
        if needed <= USABLE * device.memory * GIB:
            return Choice(config, world_size, estimate, needed)
    return None


def efficiency(name: str, device_name: str, choice: Choice) -> float:
    """Return the tokens per second and GPU, as a share of those on the fewest GPUs that hold the model."""
    first = next(found for size in WORLD_SIZES if (found := best(name, device_name, size)))
    return choice.tokens_per_second / first.tokens_per_second


def layouts(name: str) -> str:
    """Return the table of a model's best layouts."""
    rows = []
    for device_name, world_size in itertools.product(DEVICES, SHOWN):
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
    for name, device_name in itertools.product(MODELS, DEVICES):
        found = [choice for size in WORLD_SIZES if (choice := best(name, device_name, size))]
        good = [x for x in found if efficiency(name, device_name, x) >= LEAST_EFFICIENCY]
        row = [name, device_name.upper()]
        if len(good) == len(found):
            rows.append([*row, f"beyond {WORLD_SIZES[-1]:,}", str(good[-1]), "", ""])
            continue
        spent = losses(found[0], found[len(good)])
        most = max(spent, key=lambda part: spent[part])
        rows.append([*row, f"{good[-1].world_size:,}", str(good[-1]), most, percent(spent[most])])
    header = ["model", "GPU", "GPUs", "tensor x pipeline x data there", "what is lost at twice as many", "of the step"]
    return str(Table(header, rows, wordy=(3, 4)))


def losses(first: Choice, last: Choice) -> dict[str, float]:
    """Return what keeps `last` from the speed of `first`, as shares of its step."""
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
    """Return the table of what 10 TB of text take."""
    documents, tokens = (CORPUS / SAMPLE_BYTES * number for number in (SAMPLE_DOCUMENTS, SAMPLE_TOKENS))
    partitions = math.ceil(CORPUS / PARTITION)
    hours = PARTITION / (CORES * BYTES_PER_CORE) / 3600
    fastest = max(choice.tokens_per_second for device in DEVICES if (choice := best("base", device, 8)))
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
        ["tokens per second that a rank needs (base, H100)", f"{fastest / 1e6:.2f} million"],
        ["tokens per second that its loader makes", f"{LOADED_TOKENS / 1e6:.2f} million, {margin:.0f} times"],
    ]
    return str(Table(["what", "estimate"], rows, wordy=(1,)))


BLOCKS: dict[str, Callable[[], str]] = {
    "rates": rates,
    "check": check,
    **{name: (lambda name=name: layouts(name)) for name in MODELS},  # type: ignore[misc]
    "ends": ends,
    "corpus": corpus,
}
"""Name of a table's markers in the page → what computes it."""


def block(page: str, name: str) -> str:
    """Return the table that stands between a page's markers."""
    begin, end = f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"
    return page.split(begin)[1].split(end)[0]


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--print", action="store_true", help="print the tables and write nothing")
    only_print = parser.parse_args().print
    page = PAGE.read_text(encoding="utf-8")
    for name, compute in BLOCKS.items():
        computed = compute()
        print(f"{name}\n\n{computed}\n", flush=True)
        page = page.replace(f"<!-- {name} -->\n{block(page, name)}", f"<!-- {name} -->\n{computed}")
    if not only_print:
        PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
