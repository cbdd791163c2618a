"""Advice for a run that lacks memory: the flags to change, those that cost the least first."""

from __future__ import annotations

from megatron_ddrp.config import Config, flag
from megatron_ddrp.data.batches.loader import count_micro_batches
from megatron_ddrp.memory import GIB, Memory, neediest_by_zero_stage
from megatron_ddrp.model import on_meta_device

WORTH_IT = 0.9
"""Share of the memory below which another ZeRO stage is worth a word."""


def need_less_memory(config: Config, world_size: int, device_type: str) -> str:
    """Return how much memory a rank of a run needs by estimate, and which flags lower it, as one line."""
    needs = estimated_needs(config, world_size, device_type)
    needed = needs[config.parallel.zero_stage]
    return (
        f"a rank needs about {needed.total / GIB:,.1f} GiB by estimate, {needed.activations_estimate / GIB:,.1f} of "
        f"them for activations: use {', '.join(ways(config, needs, device_type))}; --dry-run estimates any choice"
    )


def estimated_needs(config: Config, world_size: int, device_type: str) -> dict[int, Memory]:
    """Return the memory of the rank that needs the most, at each ZeRO stage that the run allows."""
    data_size = config.parallel.data_parallel_size(world_size)
    training = config.training
    micro_batches = count_micro_batches(training.global_batch_size, training.micro_batch_size, data_size)
    model = on_meta_device(config.model, config.objective)
    return neediest_by_zero_stage(model, config, data_size, micro_batches, device_type=device_type)


def ways(config: Config, needs: dict[int, Memory], device_type: str) -> list[str]:
    """Return the changes of flags that need less memory, those that cost the least first."""
    training, parallel = config.training, config.parallel
    found = []
    if training.micro_batch_size > 1:
        found.append(_instead("micro_batch_size", training.micro_batch_size // 2, training.micro_batch_size))
    if needs[parallel.zero_stage].graphs:
        found.append(f"{flag('cuda_graphs')} off")
    if not parallel.checkpoint_activations:
        found.append(flag("checkpoint_activations"))
    lower = [stage for stage in needs if needs[stage].total < WORTH_IT * needs[parallel.zero_stage].total]
    if lower:
        found.append(_instead("zero_stage", min(lower), parallel.zero_stage))
    if device_type == "cuda" and parallel.zero_stage > 0 and parallel.offload_optimizer == "none":
        found.append(f"{flag('offload_optimizer')} cpu")
    return [*found, "a smaller --seq-length or --hidden-size", "or more ranks"]


def _instead(name: str, value: int, given: int) -> str:
    return f"{flag(name)} {value} instead of {given}"
