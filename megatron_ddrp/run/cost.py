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

import dataclasses
from dataclasses import dataclass

from megatron_ddrp.config import Config, encoding_class
from megatron_ddrp.data.batches.loader import count_micro_batches
from megatron_ddrp.run.flops import flop_per_token, peak_tflops
from megatron_ddrp.run.host_cost import host_seconds

LAUNCH_SECONDS = 2e-6
"""Assumed minimum time of a kernel on any device."""

HOST = 8
"""GPUs per host."""


@dataclass(frozen=True)
class Device:
    """A GPU and its links."""

    name: str
    """Name, as in `torch.cuda.get_device_name`."""
    half: float
    """TFLOP/s of bf16 or fp16 matrix products."""
    single: float
    """TFLOP/s of fp32 matrix products without TF32."""
    bandwidth: float
    """TB/s of device memory."""
    memory: float
    """GiB of device memory."""
    inside: float
    """GB/s that a GPU sends to the others of its host."""
    between: float
    """GB/s that a host sends to the other hosts over all its network cards."""
    processors: int
    """Number of streaming multiprocessors."""
    is_recent: bool = True
    """True for compute capability 8.0 and higher: bf16, attention in Triton and torch's flash kernel."""

    def products(self, precision: str) -> float:
        """Return the TFLOP/s of a run's matrix products: fp32 runs use TF32 if the device has it, half as fast."""
        if precision != "fp32":
            return self.half
        return self.half / 2 if self.is_recent else self.single

    def attention(self, kernel: str, is_backward: bool) -> float:
        """Return the TFLOP/s of an attention kernel; its share of `half` is the same on every device."""
        return self.half * ATTENTION_SHARES[kernel if self.is_recent else "sdpa"][is_backward]

    def seconds(self, num_bytes: float, flop: float = 0, tflops: float = 1) -> float:
        """Return the time of one launch: that of its memory traffic or of its arithmetic, whichever is longer."""
        return max(num_bytes / (self.bandwidth * 1e12), flop / (tflops * 1e12), LAUNCH_SECONDS)


ATTENTION_SHARES = {
    "sdpa": (200 / 650, 130 / 650),
    "triton": (180 / 650, 120 / 650),
    "flash": (300 / 650, 180 / 650),
}
"""Attention kernel → its FLOP rates forward and backward ÷ that of matrix products, on an H100 with 64-wide heads and
dropout. `sdpa` is torch's memory-efficient kernel with a dense bias. Assumptions; FlashAttention-2's authors report up
to 335 TFLOP/s there (arXiv:2307.08691), for long rows. Those of `triton` are hopes: the best published kernel of this
class reaches 28.7 TFLOP/s on an H200 (disentangled-flash 1.1.1, 8,192 tokens per row, forward and backward)."""

ATTENTION_PRODUCTS = {"sdpa": (2, 5), "triton": (2, 7), "flash": (2, 5)}
"""Attention kernel → number of products of `[seq, head_dim]` and `[head_dim, seq]`, forward and backward. In Triton the
two backward kernels compute Q·Kᵀ and dO·Vᵀ each."""


def sustained_device(peak: Device) -> Device:
    """Return a device with the rates that it is assumed to sustain, from its published peaks.

    An H100 sustains 650 of 989 TFLOP/s, 45 of 67 in fp32, 2.8 of 3.35 TB/s; others the same shares; links 80 %.
    """
    return dataclasses.replace(
        peak,
        half=peak.half * 650 / 989,
        single=peak.single * 45 / 67,
        bandwidth=peak.bandwidth * 2.8 / 3.35,
        inside=0.8 * peak.inside,
        between=0.8 * peak.between,
    )


DEVICES = {
    "v100": sustained_device(Device("V100-SXM2-32GB", 125, 15.7, 0.9, 32, 150, 16, 80, is_recent=False)),
    "a100": sustained_device(Device("A100-SXM4-80GB", 312, 19.5, 2.039, 80, 300, 200, 108)),
    "h100": sustained_device(Device("H100 80GB HBM3", 989, 67, 3.35, 80, 450, 400, 132)),
    "h200": sustained_device(Device("H200", 989, 67, 4.8, 140, 450, 400, 132)),
    "t4": sustained_device(Device("T4", 65, 8.1, 0.32, 16, 16, 12.5, 40, is_recent=False)),
    "a10": sustained_device(Device("A10", 125, 31.2, 0.6, 24, 32, 12.5, 72)),
    "l4": sustained_device(Device("L4", 121, 30.3, 0.3, 24, 32, 12.5, 58)),
    "rtx-3060": sustained_device(Device("RTX 3060", 25.5, 12.7, 0.36, 12, 16, 1.25, 28)),
    "rtx-3090": sustained_device(Device("RTX 3090", 71, 35.6, 0.936, 24, 16, 1.25, 82)),
    "rtx-4090": sustained_device(Device("RTX 4090", 165.2, 82.6, 1.008, 24, 16, 1.25, 128)),
    "rtx-5090": sustained_device(Device("RTX 5090", 209.5, 104.8, 1.792, 32, 32, 1.25, 170)),
}
"""Name → device, peaks by their makers' data sheets (NVLink per direction); docs/scaling.md names the sources. Hosts of
V100 are linked by 16 GB/s, those of A100 by 8 cards of 200 Gbit/s, those of H100 and H200 by 8 of 400. T4, A10 and L4
are taken to have PCIe and hosts with 100 Gbit/s; GeForce cards half of PCIe's rate, since they send through the host's
memory, and 10 Gbit/s. Half precision is that with sums in fp32, which on GeForce cards is a quarter of the advertised
sparse rate."""


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
