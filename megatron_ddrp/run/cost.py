"""Estimates of the time of a training step on a layout of GPUs that need not be present; `--dry-run` prints them.

    step = (micro-batches + stages − 1) · micro-batch + exposed gradients + weights + update
    micro-batch = max(device, host) + tensor parallelism + stage to stage
    device = matrix products + attention + memory traffic
    host = Python, torch's dispatch and launches

The time of matrix products and attention is their FLOP (`megatron_ddrp/run/flops.py`) ÷ the rates that a device
sustains. The memory traffic of all other operations was counted on a fake GPU (`benchmarks/gpu_cost.py`). Communication
takes its volume ÷ a link's rate:

    tensor      4 all-reduces of the hidden states per layer and micro-batch
    pipeline    hidden states and their gradients, once per stage and micro-batch
    data        gradients are reduced and scattered once per step (at ZeRO 2 and 3 once per micro-batch), weights
                gathered once per step (at ZeRO 3 twice per micro-batch)

Gradients are reduced during the last micro-batch's backward pass, and only the time beyond it counts; in pipelines and
at ZeRO 0 DeepSpeed reduces them after it. Ranks are ordered as in `parallel/process_group.py`: tensor first, then data,
then pipeline. Everything here is an estimate.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ddrp.config import Config, encoding_class
from megatron_ddrp.data.batches.loader import count_micro_batches
from megatron_ddrp.run.devices import HOST, LAUNCH_SECONDS, Device
from megatron_ddrp.run.flops import flop_per_token, peak_tflops
from megatron_ddrp.run.host_cost import host_seconds

ATTENTION_PRODUCTS = {"sdpa": (2, 5), "triton": (2, 7), "flash": (2, 5)}
"""Attention kernel → number of products of `[seq, head_dim]` and `[head_dim, seq]`, forward and backward. In Triton the
two backward kernels compute Q·Kᵀ and dO·Vᵀ each."""


TRAFFIC = 60
"""Passes over the hidden states that a layer's point-wise launches make, forward and backward, with `--compile`."""

HEAD_TRAFFIC = 16
"""Passes over the fp32 logits of the predicted tokens."""

BIAS_TRAFFIC, HCD_TRAFFIC = 16, 51
"""Passes over a dense bias `[batch, heads, seq, seq]`, and over HCD's fp32 logits of its heads, both without Triton."""

TILE = 128
"""Rows and columns of a product's tile; each multiprocessor works on one tile."""

LAUNCHES = 50
"""Launches per layer, forward and backward; each takes at least `LAUNCH_SECONDS`."""


@dataclass(frozen=True)
class StepEstimate:
    """Estimated seconds of a step, by part."""

    compute: float
    """Micro-batches, each the longer of `device` and `host`."""
    tensor: float
    """All-reduces between tensor-parallel ranks."""
    pipeline: float
    """Idle time of stages, and hidden states from stage to stage."""
    data: float
    """Gradients and weights between data-parallel ranks, without the part that overlaps with computation."""
    update: float
    """Update by the optimizer."""
    device: float
    """Computation on one micro-batch: FLOP, memory traffic, recomputation."""
    host: float
    """Time in which the host launches one micro-batch. Nothing waits for the device, so the two overlap."""

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return self.compute + self.tensor + self.pipeline + self.data + self.update


def why_not(config: Config, device: Device) -> str | None:
    """Return why a device cannot run a configuration; None if it can."""
    return "it has no bf16" if config.training.precision == "bf16" and not device.is_recent else None


def attention_kernel(config: Config, device: Device) -> str:
    """Return the attention kernel that `auto` is assumed to choose."""
    if not encoding_class(config.model.position_encoding).in_logits:
        return "flash"
    return "triton" if device.is_recent else "sdpa"


def with_chosen_backend(config: Config, device: Device) -> Config:
    """Return `config` with the backend that `auto` is assumed to choose, for the estimate of memory."""
    if config.model.attention_backend == "auto" and attention_kernel(config, device) == "triton":
        return config.replace(model={"attention_backend": "triton"})
    return config


def estimate_step(config: Config, parameters: int, world_size: int, device: Device) -> StepEstimate:
    """Return the estimated time of a step of `world_size` ranks; `parameters` are those of the whole model."""
    model, training, parallel = config.model, config.training, config.parallel
    tensor, stages = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    micro_batches = count_micro_batches(
        training.global_batch_size, training.micro_batch_size, parallel.data_parallel_size(world_size)
    )
    by_torch = attention_kernel(config, device) == "sdpa"
    of_device = micro_batch_seconds(config, device)
    of_host = host_seconds(config, _layers_per_stage(config), device.is_recent, by_torch)
    compute = max(of_device, of_host)
    hidden = training.micro_batch_size * model.seq_length * model.hidden_size * _width(config)  # bytes
    passes = (6 if parallel.checkpoint_activations else 4) * _layers_per_stage(config)
    inside = device.inside if tensor <= HOST else min(device.inside, device.between)
    by_tensor = passes * 2 * _ring_seconds(hidden, tensor, inside)
    link = device.inside if world_size <= HOST else device.between / HOST
    by_stage = 2 * hidden / tensor / (link * 1e9) if stages > 1 else 0.0
    share = parameters / (tensor * stages)
    reduced, gathered = _data_seconds(config, share, world_size, device)
    hidden_seconds = compute * 2 / 3 if stages == 1 and parallel.zero_stage else 0.0
    owned = share / (parallel.data_parallel_size(world_size) if parallel.zero_stage else 1)
    return StepEstimate(
        compute=micro_batches * compute,
        tensor=micro_batches * by_tensor,
        pipeline=(stages - 1) * (compute + by_tensor) + (micro_batches + stages - 1) * by_stage,
        data=max(0.0, reduced - hidden_seconds) + gathered,
        update=UPDATE_BYTES * owned / (device.bandwidth * 1e12),
        device=of_device,
        host=of_host,
    )


UPDATE_BYTES = 32
"""Bytes per parameter that Adam reads and writes: gradient, weight, its fp32 copy, two moments."""


def mfu(config: Config, seconds: float, world_size: int, device: Device) -> float:
    """Return the model FLOP utilisation of a step of `seconds`: its FLOP relative to the devices' published peak."""
    peak = peak_tflops(device.name, config.training.precision, tf32=True)
    assert peak is not None, device.name
    tokens = config.training.global_batch_size * config.model.seq_length
    return flop_per_token(config).total * tokens / (world_size * peak * 1e12 * seconds)


def attention_seconds(config: Config, device: Device) -> float:
    """Return the time of attention's products in the last stage's layers for one micro-batch, on one rank."""
    kernel, training, seconds = attention_kernel(config, device), config.training, 0.0
    flop = flop_per_token(config).attention * training.micro_batch_size * config.model.seq_length
    share = _layers_per_stage(config) / config.model.num_layers / config.parallel.tensor_model_parallel_size
    for is_backward, number in enumerate(ATTENTION_PRODUCTS[kernel]):
        rate = device.products(training.precision) * device.attention(kernel, bool(is_backward)) / device.half
        seconds += flop * share / 6 * number / (rate * 1e12)  # 6 products: 2 forward, 4 backward
    return seconds


def micro_batch_seconds(config: Config, device: Device) -> float:
    """Return the computing time of the slowest (last) stage for one micro-batch, forward and backward.

    Products `[tokens, hidden / tensor]` with fewer tiles than the device has multiprocessors leave some of them idle.
    """
    model, training, objective = config.model, config.training, config.objective
    tensor = config.parallel.tensor_model_parallel_size
    tokens = training.micro_batch_size * model.seq_length
    tiles = tokens / TILE * model.hidden_size / tensor / TILE
    busy = min(1.0, tiles / device.processors)
    rate = device.products(training.precision) * 1e12 * busy
    flop, kernel = flop_per_token(config), attention_kernel(config, device)
    share = _layers_per_stage(config) / model.num_layers
    products = (flop.linear + flop.tables) * share + flop.head + flop.mask_decoder + flop.generator * share
    hidden = model.hidden_size * _width(config)
    traffic = float(TRAFFIC * hidden)
    if kernel == "sdpa":
        heads_of_cosine = objective.cosine_heads(model.num_attention_heads)
        traffic += BIAS_TRAFFIC * model.seq_length * model.num_attention_heads * _width(config) / tensor
        traffic += HCD_TRAFFIC * model.seq_length * heads_of_cosine * 4
    logits = HEAD_TRAFFIC * objective.mask_rates.mean * model.padded_vocab_size * 4 / tensor
    moved = (traffic * _layers_per_stage(config) + logits) / (device.bandwidth * 1e12)
    seconds = tokens * (products / rate / tensor + moved) + attention_seconds(config, device) / busy
    seconds = max(seconds, _layers_per_stage(config) * LAUNCHES * LAUNCH_SECONDS)
    return seconds * (4 / 3 if config.parallel.checkpoint_activations else 1)


def _width(config: Config) -> int:
    """Return the bytes per weight or activation."""
    return 4 if config.training.precision == "fp32" else 2


def _layers_per_stage(config: Config) -> int:
    return -(-config.model.num_layers // config.parallel.pipeline_model_parallel_size)


def _ring_seconds(num_bytes: float, ranks: int, link: float) -> float:
    """Return the time of a reduce-scatter or all-gather of `num_bytes` per rank over links of GB/s."""
    return (ranks - 1) / ranks * num_bytes / (link * 1e9)


def _data_seconds(config: Config, share: float, world_size: int, device: Device) -> tuple[float, float]:
    """Return the communication time of a step's gradients and of its weights, for `share` parameters per rank.

    A ring over hosts crosses each host's link once per group of data-parallel ranks in the host; there are as many
    groups as tensor-parallel ranks. Under bf16 gradients are reduced in fp32.
    """
    parallel, training = config.parallel, config.training
    data, tensor = parallel.data_parallel_size(world_size), parallel.tensor_model_parallel_size
    link = device.inside
    if tensor * data > HOST:
        link = min(link, device.between / min(tensor, HOST))
    micro_batches = count_micro_batches(training.global_batch_size, training.micro_batch_size, data)
    reductions = micro_batches if parallel.zero_stage >= 2 else 1
    gatherings = 2 * micro_batches if parallel.zero_stage == 3 else 1
    of_gradients = 2 if training.precision == "fp16" else 4
    reduced = reductions * _ring_seconds(of_gradients * share, data, link)
    return reduced, gatherings * _ring_seconds(_width(config) * share, data, link)
