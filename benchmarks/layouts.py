"""Search for the fastest layout of a model on GPUs that are not at hand: tensor x pipeline x data, ZeRO, micro-batch.

A step's time is that of `megatron_ddrp/run/cost.py`, memory that of `megatron_ddrp/memory.py`; both are estimates.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import measure  # noqa: F401  (puts the repository on the import path)

from megatron_ddrp.config import Config, ModelConfig, ObjectiveConfig, ParallelConfig, TrainingConfig
from megatron_ddrp.data.batches.loader import count_micro_batches
from megatron_ddrp.engine.build import deepspeed_settings
from megatron_ddrp.errors import UserError
from megatron_ddrp.memory import Part, cut_up, memory_of_rank
from megatron_ddrp.model import count_parameters, on_meta_device
from megatron_ddrp.run.cost import StepEstimate, estimate_step, with_chosen_backend
from megatron_ddrp.run.devices import DEVICES, Device

GIB = 2**30
USABLE = 0.9
"""Share of a device's memory that a layout may take."""
SERVER_GPUS = ("v100", "a100", "h100", "h200")
"""Devices of the tables: those of hosts with eight linked GPUs."""
WORLD_SIZES = tuple(8 * 2**power for power in range(10))
"""8 to 4,096 GPUs, on which the end of scaling is looked for."""


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
    estimate: StepEstimate
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
                    cuda_graphs="auto",
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
        settings = deepspeed_settings(config, micro_batches, data, sum(part.sizes), "cuda")
        needs.append(memory_of_rank(part, config, parallel.zero_stage, settings, 0, data).total)
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
        needed = memory(name, with_chosen_backend(config, device), world_size)
        if needed <= USABLE * device.memory * GIB:
            return Choice(config, world_size, estimate, needed)
    return None


def efficiency(name: str, device_name: str, choice: Choice) -> float:
    """Return the tokens per second and GPU, as a share of those on the fewest GPUs that hold the model."""
    first = next(found for size in WORLD_SIZES if (found := best(name, device_name, size)))
    return choice.tokens_per_second / first.tokens_per_second
