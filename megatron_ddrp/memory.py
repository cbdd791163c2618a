"""Memory that a rank of a layout needs, computed from the model's shapes; `--dry-run` prints it.

Weights, gradients and optimizer state are counted as DeepSpeed stores them (Rajbhandari et al., arXiv:1910.02054):

    ZeRO 0   all of them on every data-parallel rank; under bf16 the weights are in fp32, and layers use copies
    ZeRO 1   the optimizer's fp32 copy of the weights and Adam's two moments are sharded, in fp32 training too
    ZeRO 2   the gradients too; if they are added up in their own type, a parameter across a cut keeps its whole
             gradient on both sides
    ZeRO 3   the weights too; small ones (`param_persistence_threshold`) also stay whole on every rank

Under bf16 gradients are added up in fp32: 4 bytes per parameter instead of 2. Activations are an estimate: they depend
on the attention backend, on padding and on torch. A run that lacks memory gets advice, `need_less_memory`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any

from torch import nn

from megatron_ddrp.config import flag
from megatron_ddrp.engine.build import deepspeed_settings, names_without_decay
from megatron_ddrp.engine.layout import Setup, offload_device
from megatron_ddrp.model import Encoder, on_meta_device
from megatron_ddrp.model.encoder import EncoderLayer
from megatron_ddrp.model.graphs import MOST_SHAPES
from megatron_ddrp.parallel.pipeline import local_parameters, name_parameters, split_dimension, split_stages

FP32 = 4
GIB = 2**30

PERSISTENT = 100_000
PREFETCHED = 50_000_000
"""DeepSpeed's defaults, in elements: size of parameters that ZeRO 3 leaves whole; number that it gathers ahead."""


@dataclass(frozen=True)
class Memory:
    """Bytes that one rank needs."""

    weights: int
    gradients: int
    optimizer: int
    """Bytes of the optimizer's moments and, with ZeRO, of the fp32 weights."""
    activations_estimate: int
    buffers: int
    """Bytes of DeepSpeed's buffers to reduce gradients and, at ZeRO 3, to gather weights; at ZeRO 0, of bf16 copies."""
    graphs: int
    """Bytes that CUDA graphs keep beyond the activations: the layers' outputs and gradients."""
    on_host: int = 0
    """Bytes in host memory, not in `total`: offloaded optimizer state and ZeRO 3's offloaded weights
    (`offload_optimizer` and `offload_param` in `--deepspeed_config`), and the notes, whole on every rank."""

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return sum(getattr(self, f.name) for f in fields(self)) - self.on_host


@dataclass(frozen=True)
class RankPart:
    """A rank's share of the model under tensor and pipeline parallelism."""

    groups: tuple[tuple[int, ...], tuple[int, ...]]
    """Sizes of its parameters, in the optimizer's order: those with weight decay, those without."""
    layer_widths: tuple[int, ...]
    """Hidden sizes of its layers."""
    has_head: bool
    moments: int
    """Number of elements of the optimizer's moments."""
    moments_per_element: int
    """Number of moments of each element, where ZeRO has flattened the parameters."""
    in_flight: int
    """Number of micro-batches whose activations it holds at once."""

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.groups[0] + self.groups[1]


def cut_up(model: Encoder, setup: Setup) -> list[RankPart]:
    """Return the parts of a model, which may be on the meta device, in the order of the pipeline.

    All tensor-parallel ranks of a part hold the same amount.
    """
    name_parameters(model)
    config, tensor, pipeline = setup.config, setup.ranks.tensor_size, setup.ranks.pipeline_size
    stages = split_stages(model.stages(), pipeline) if pipeline > 1 else [[model]]
    chosen = config.optimizer.chosen
    parts = []
    for place, modules in enumerate(map(nn.ModuleList, stages)):
        sizes: tuple[list[int], list[int]] = ([], [])
        held = {
            name: parameter.numel() // (1 if split_dimension(name, config.model.encoding) is None else tensor)
            for name, parameter in local_parameters(modules).items()
        }
        spared = names_without_decay(modules)
        for name, size in held.items():
            sizes[1 if name in spared else 0].append(size)
        layers = [module for module in modules.modules() if isinstance(module, EncoderLayer)]
        widths = tuple(layer.attention.query.in_features for layer in layers)
        in_flight = min(pipeline - place, setup.num_micro_batches)
        moments = sum(held[name] * len(names) for name, names in chosen.moments_of(modules).items())
        groups, has_head = (tuple(sizes[0]), tuple(sizes[1])), place == pipeline - 1
        parts.append(RankPart(groups, widths, has_head, moments, len(chosen.moments), in_flight))
    return parts


def memory_of_rank(
    part: RankPart, setup: Setup, stage: int, settings: Mapping[str, Any], data_rank: int, notes: int = 0
) -> Memory:
    """Return the memory of data-parallel rank `data_rank` of those that hold `part`.

    `settings` are DeepSpeed's; their stage is ignored. `notes` is the size of the dictionary in bytes.
    """
    config, zero = setup.config, settings["zero_optimization"]
    width = FP32 if config.training.precision == "fp32" else FP32 // 2
    sums = FP32 if not stage or settings.get("data_types", {}).get("grad_accum_dtype") == "fp32" else width
    weights, gradients, optimizer = held_elements(part, stage, zero, sums != width, data_rank, setup.ranks.data_size)
    weights, optimizer = (width if stage else FP32) * weights, FP32 * optimizer
    optimizer_on_host = optimizer if stage and offload_device(zero) != "none" else 0
    # The weights that a rank keeps for itself under ZeRO 3 are those of its gradients.
    weights_on_host = width * gradients if stage == 3 and offload_device(zero, "offload_param") != "none" else 0
    return Memory(
        weights=weights - weights_on_host,
        gradients=sums * gradients,
        optimizer=optimizer - optimizer_on_host,
        activations_estimate=activation_bytes(part, setup, width),
        buffers=buffer_bytes(part, stage, zero, width, sums),
        graphs=graph_bytes(part, setup, stage, width),
        on_host=optimizer_on_host + weights_on_host + notes,
    )


def held_elements(
    part: RankPart, stage: int, zero: Mapping[str, Any], adds_in_fp32: bool, data_rank: int, data_size: int
) -> tuple[int, int, int]:
    """Return the elements of weights, of gradients, and of the moments with ZeRO's fp32 weights, that a rank holds.

    They follow the table at the top of this file. `adds_in_fp32` means that 16-bit gradients are added up in fp32.
    """
    whole = sum(part.sizes)
    if stage == 0:
        return whole, whole, part.moments
    if stage == 3:
        own = sum(math.ceil(size / data_size) for size in part.sizes)
        persistent = int(zero.get("stage3_param_persistence_threshold", PERSISTENT))
        kept_whole = sum(size for size in part.sizes if size <= persistent)
        return own + kept_whole, own, (1 + part.moments_per_element) * own
    flat = [math.ceil(sum(sizes) / (2 * data_size)) * 2 * data_size for sizes in part.groups]
    own = sum(flat) // data_size
    gradients = whole if stage == 1 else own
    if stage == 2 and not adds_in_fp32:
        cuts = zip(part.groups, flat, strict=True)
        gradients = sum(_size_in_block(sizes, data_rank, length // data_size) for sizes, length in cuts)
    return sum(flat), gradients, (1 + part.moments_per_element) * own


def buffer_bytes(part: RankPart, stage: int, zero: Mapping[str, Any], width: int, sums: int) -> int:
    """Return the bytes of DeepSpeed's buffers; weights have `width` bytes per element, summed gradients `sums`."""
    bucket, in_turn = int(zero["reduce_bucket_size"]), 2 if zero["overlap_comm"] else 1
    converted = sums * bucket if sums != width else 0  # a bucket of 16-bit gradients, to be reduced in fp32
    if stage == 3:
        ahead = min(int(zero.get("stage3_prefetch_bucket_size", PREFETCHED)), sum(part.sizes))
        return width * (bucket + ahead + max(part.sizes)) + converted
    copies = width * sum(part.sizes) if width != FP32 else 0
    return (copies, sums * bucket * in_turn, width * bucket * in_turn + converted)[stage]


def graph_bytes(part: RankPart, setup: Setup, stage: int, width: int) -> int:
    """Return the bytes of the outputs and gradients that graphs keep for `MOST_SHAPES` shapes of full rows."""
    config = setup.config
    could = setup.ranks.device.type == "cuda" and config.parallel.cuda_graphs != "off" and stage < 2
    if not could or config.graphs_fault not in (None, f"--zero-stage {config.parallel.zero_stage}"):
        return 0
    tokens = config.training.micro_batch_size * config.last_phase.seq_length
    of_layer = sum(part.sizes) // len(part.layer_widths) * (width if stage else FP32)
    return MOST_SHAPES * 2 * tokens * sum(part.layer_widths) * width + of_layer


def differing_data_ranks(part: RankPart, data_size: int) -> list[int]:
    """Return data-parallel ranks one of which needs the most: the first, and those in whose block a parameter begins.

    Ranks differ only in the parameters that their blocks overlap (`held_elements`), and the others begin none.
    """
    ranks = {0}
    for sizes in part.groups:
        length = 2 * math.ceil(sum(sizes) / (2 * data_size))
        ranks |= {(end - size) // length for size, end in zip(sizes, accumulate(sizes), strict=True)}
    return sorted(ranks)


def _size_in_block(sizes: Sequence[int], rank: int, length: int) -> int:
    """Return the total size of the concatenated parameters that overlap block `rank` of `length` elements."""
    begin, end, place, total = rank * length, (rank + 1) * length, 0, 0
    for size in sizes:
        total += size if place < end and place + size > begin else 0
        place += size
    return total


def activation_bytes(part: RankPart, setup: Setup, width: int) -> int:
    """Return an estimate of the bytes that micro-batches keep for the backward pass.

    A layer keeps about 10 tensors of hidden size, of which sequence parallelism divides 6; 6 more and two of the
    feed-forward width (four in GEGLU), which tensor parallelism divides; and attention logits if the encoding adds to
    them. HCD keeps the logits of its heads in fp32, three times (on CPUs it needs no additional memory). Under
    `--attention-backend triton` no logits are kept. An objective may also keep attention maps. The head keeps the
    predicted tokens' logits in fp32, twice. With recomputation only the layers' inputs and one layer's tensors stay.
    """
    config, tensor = setup.config, setup.ranks.tensor_size
    model, objective, length = config.model, config.objective, config.last_phase.seq_length
    parts = tensor if config.parallel.cuts_sequence else 1
    tokens = config.training.micro_batch_size * length
    in_logits = model.encoding.in_logits
    compared = (objective.hcd_heads or model.num_attention_heads) if objective.hcd_weight else 0
    boundaries, layers = 0, []
    for hidden in part.layer_widths:
        heads, ffn = hidden // model.head_dim, model.ffn_size * hidden // model.hidden_size
        maps = 2 * (model.ffn_maps - 1)  # GEGLU keeps both halves, the GELU and the product
        kept = tokens * (4 * hidden + 6 * hidden // parts + (6 * hidden + maps * ffn) // tensor) * width
        if model.attention_backend != "triton":
            kept += tokens * length * (heads // tensor) * width * (1 if in_logits else 0)
            kept += tokens * length * min(compared, heads) * FP32 * 3
        kept += tokens * length * (heads // tensor) * FP32 * setup.objective.kept_maps
        boundaries += tokens * hidden // parts * width
        layers.append(kept)
    inside = max(layers, default=0) if config.parallel.checkpoint_activations else sum(layers) * part.in_flight
    predicted = 1.0 if objective.causal_share else max(objective.mask_rates)
    logits = int(tokens * predicted) * model.padded_vocab_size // tensor * FP32 * 2 * part.has_head
    return boundaries * part.in_flight + inside + logits


def by_zero_stage(model: Encoder, setup: Setup, notes: int = 0) -> dict[int, list[Memory]]:
    """Return the memory at each ZeRO stage that the other settings allow; `notes` as in `memory_of_rank`.

    The lists have `differing_data_ranks` of each pipeline stage, in their order; tensor-parallel neighbours need the
    same.
    """
    config, data_size = setup.config, setup.ranks.data_size
    least, most = config.training.fp16, 1 if setup.ranks.pipeline_size > 1 else 3
    stages = [s for s in config.optimizer.chosen.zero_stages if least <= s <= most]
    parts = cut_up(model, setup)
    settings = [deepspeed_settings(setup, sum(part.sizes)) for part in parts]
    return {
        stage: [
            memory_of_rank(part, setup, stage, of_part, data_rank, notes)
            for part, of_part in zip(parts, settings, strict=True)
            for data_rank in differing_data_ranks(part, data_size)
        ]
        for stage in stages
    }


def neediest_by_zero_stage(model: Encoder, setup: Setup, notes: int = 0) -> dict[int, Memory]:
    """Return the memory of the rank that needs the most, at each ZeRO stage; the parameters are `by_zero_stage`'s."""
    ranks = by_zero_stage(model, setup, notes)
    return {stage: max(of_ranks, key=lambda memory: memory.total) for stage, of_ranks in ranks.items()}


WORTH_IT = 0.9
"""Share of the memory below which another ZeRO stage is worth a word."""


def need_less_memory(setup: Setup) -> str:
    """Return how much memory a rank of a run needs by estimate, and which flags lower it, as one line."""
    needs = estimated_needs(setup)
    needed = needs[setup.config.parallel.zero_stage]
    return (
        f"a rank needs about {needed.total / GIB:,.1f} GiB by estimate, {needed.activations_estimate / GIB:,.1f} of "
        f"them for activations: use {', '.join(ways(setup, needs))}; --dry-run estimates any choice"
    )


def estimated_needs(setup: Setup) -> dict[int, Memory]:
    """Return the memory of the rank that needs the most, at each ZeRO stage that the run allows."""
    return neediest_by_zero_stage(on_meta_device(setup.config.model, setup.config.objective), setup)


def ways(setup: Setup, needs: dict[int, Memory]) -> list[str]:
    """Return the changes of flags that need less memory, those that cost the least first."""
    training, parallel = setup.config.training, setup.config.parallel
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
    if setup.ranks.device.type == "cuda" and parallel.zero_stage > 0 and parallel.offload_optimizer == "none":
        found.append(f"{flag('offload_optimizer')} cpu")
    return [*found, "a smaller --seq-length or --hidden-size", "or more ranks"]


def _instead(name: str, value: int, given: int) -> str:
    return f"{flag(name)} {value} instead of {given}"
