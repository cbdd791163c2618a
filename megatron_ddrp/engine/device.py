"""A run and its device: precisions, checks before the first step, the choices of `auto`, and TF32."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch

from megatron_ddrp.config import Config, ModelConfig, encoding_class
from megatron_ddrp.engine.deepspeed_file import import_quietly
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError
from megatron_ddrp.model.attention.attending import Demand
from megatron_ddrp.model.attention.backends import refusal, resolve_backend
from megatron_ddrp.model.fused import compiles, is_nvidia, why_not_compile
from megatron_ddrp.model.graphs import uses_graphs, why_not_graphs
from megatron_ddrp.model.stages import DTYPES

NATIVE_BF16 = (8, 0)
"""Lowest compute capability with bfloat16 on NVIDIA's GPUs; `torch.cuda.is_bf16_supported()` counts emulation too."""


def precision_fault(precision: str, device: torch.device) -> str | None:
    """Return the reason why a device cannot train in "fp32", "bf16" or "fp16", or None if it can."""
    if precision == "fp16" and device.type == "cpu":
        import_quietly()
        from deepspeed.accelerator import get_accelerator

        if not get_accelerator().is_fp16_supported():
            return f"there is no GPU here, and this CPU does not compute in float16: {instead_of_fp16()}"
    if precision == "bf16" and is_nvidia(device):
        capability = torch.cuda.get_device_capability(device)
        if capability < NATIVE_BF16:
            name, (major, minor) = torch.cuda.get_device_name(device), capability
            return f"{name} has compute capability {major}.{minor} and only emulates bfloat16 (8.0 has it): use --fp16"
    return None


def instead_of_fp16() -> str:
    """Return the advice for a user who asks for fp16 on a CPU that lacks it."""
    if _multiplies_bf16_slowly():
        return "leave --fp16 out (without AVX-512 this CPU is many times slower in bf16 than in fp32)"
    return "use --bf16, or neither for fp32"


def _multiplies_bf16_slowly() -> bool:
    """Return whether this machine's CPU has AVX2 but no AVX-512."""
    return torch.backends.cpu.get_cpu_capability() == "AVX2"


def allow_tf32(allowed: bool, device: torch.device) -> None:
    """Let a GPU multiply fp32 matrices in TF32, unless `--no-tf32` is given. CPUs are unaffected."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if allowed else "highest")


def precision_remarks(config: Config, device: torch.device) -> list[str]:
    """Return a line if another precision is faster on this device, else nothing."""
    precision = config.training.precision
    if precision == "bf16" and device.type == "cpu" and _multiplies_bf16_slowly():
        return ["this CPU has no AVX-512, so torch multiplies bf16 matrices many times slower than fp32: omit --bf16"]
    if precision != "fp32" or not is_nvidia(device) or torch.cuda.get_device_capability(device) < NATIVE_BF16:
        return []
    how = "TF32" if config.training.tf32 else "fp32"
    name = torch.cuda.get_device_name(device)
    return [f"{name} computes in bfloat16: --bf16 is faster than {how} and halves the activations"]


def check_device(config: Config, device: torch.device) -> None:
    """Refuse a precision, an attention backend, a compilation, graphs or replays that a device does not support."""
    no_graphs = why_not_graphs(config, device) if config.parallel.cuda_graphs == "on" else None
    precision, backend = config.training.precision, config.model.attention_backend
    faults = {
        f"--{precision}": precision_fault(precision, device),
        f"--attention-backend {backend}": refusal(
            backend, attention_demand(config.model, config.training.precision, device)
        ),
        "--compile on": why_not_compile(device) if config.model.compile == "on" else None,
        "--cuda-graphs on": no_graphs and f"{no_graphs}; use --cuda-graphs off",
        f"--replay-interval {config.training.replay_interval}": why_no_replay(config, device),
    }
    for flag, fault in faults.items():
        if fault:
            raise UserError(f"{flag}: {fault}", WRONG_ARGUMENTS)


def why_no_replay(config: Config, device: torch.device) -> str | None:
    """Return the reason why two passes over one micro-batch may differ on a device, or None, also without replays."""
    if config.training.replay_interval is None or device.type == "cpu" or uses_graphs(config, device):
        return None
    reason = why_not_graphs(config, device) or "--cuda-graphs off"
    return f"on GPUs only passes by CUDA graphs are compared, and this run has none ({reason}); leave it out"


def attention_demand(model: ModelConfig, precision: str, device: torch.device) -> Demand:
    """Return a run's requirements for an attention backend."""
    return Demand(device, DTYPES[precision], model.attention_dropout, model.head_dim)


def choices(config: Config, device: torch.device) -> str:
    """Return the attention backend with the reason for it, how layers are launched, and the precision."""
    model, demand = config.model, attention_demand(config.model, config.training.precision, device)
    windows = {model.window(layer) for layer in range(model.num_layers)} - {None}
    in_logits = encoding_class(model.position_encoding).in_logits
    chosen = (resolve_backend(model.attention_backend, demand._replace(window=w), in_logits) for w in (None, *windows))
    attention = ", in local layers ".join(dict.fromkeys(f"{backend} attention ({why})" for backend, why in chosen))
    layers = "compiled layers, " if compiles(model.compile, device) else ""
    graphs = "CUDA graphs of layers, " if uses_graphs(config, device) else ""
    return f"{attention}, {layers}{graphs}{config.training.precision}"


def other_choices(texts: Sequence[str]) -> list[str]:
    """Return a line for each result of `choices` that is not rank 0's, with its ranks; `texts` has one per rank."""
    lines = []
    for text in [text for text in dict.fromkeys(texts) if text != texts[0]]:
        ranks = [rank for rank, own in enumerate(texts) if own == text]
        runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])]
        named = ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
        lines.append(f"rank{'s' * (len(ranks) > 1)} {named}: {text}")
    return lines


def missing_graphs(config: Config, device: torch.device) -> tuple[str, ...]:
    """Return a line about the setting for which `--cuda-graphs auto` is off on a GPU of NVIDIA's, or nothing."""
    could = is_nvidia(device) and config.parallel.cuda_graphs == "auto"
    reason = why_not_graphs(config, device) if could else None
    return (f"--cuda-graphs auto: off, {reason}",) if reason else ()


def rows_for(config: Config, device: torch.device) -> str:
    """Return the use of a run's rows, for `Corpus.loader`."""
    return f"{device.type} graphs" if uses_graphs(config, device) else device.type


def unused_devices(world_size: int) -> tuple[str, ...]:
    """Return a line about the other GPUs where one process runs on a machine with several; nothing otherwise."""
    count = torch.cuda.device_count()
    if world_size > 1 or count < 2:
        return ()
    return (f"1 of {count} GPUs used; to use all: deepspeed --module megatron_ddrp pretrain … with the same flags",)
