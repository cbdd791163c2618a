"""Checks of a run against its device, and the choices of `auto` for it."""

from __future__ import annotations

import torch

from megatron_ddrp.config import Config, encoding_class
from megatron_ddrp.engine.precision import precision_fault
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError
from megatron_ddrp.model.attention.attending import Demand
from megatron_ddrp.model.attention.backends import refusal, resolve_backend
from megatron_ddrp.model.dtypes import DTYPES
from megatron_ddrp.model.fused import compiles, why_not_compile
from megatron_ddrp.model.graphs import uses_graphs, why_not_graphs


def check_device(config: Config, device: torch.device) -> None:
    """Refuse a precision, an attention backend, a compilation or graphs that a device does not support."""
    no_graphs = why_not_graphs(config, device) if config.parallel.cuda_graphs == "on" else None
    precision, backend = config.training.precision, config.model.attention_backend
    faults = {
        f"--{precision}": precision_fault(precision, device),
        f"--attention-backend {backend}": refusal(backend, attention_demand(config, device)),
        "--compile on": why_not_compile(device) if config.model.compile == "on" else None,
        "--cuda-graphs on": no_graphs and f"{no_graphs}; use --cuda-graphs off",
    }
    for flag, fault in faults.items():
        if fault:
            raise UserError(f"{flag}: {fault}", WRONG_ARGUMENTS)


def attention_demand(config: Config, device: torch.device) -> Demand:
    """Return a run's requirements for an attention backend."""
    model = config.model
    return Demand(device, DTYPES[config.training.precision], model.attention_dropout, model.head_dim)


def choices(config: Config, device: torch.device) -> str:
    """Return the attention backend with the reason for it, how layers are launched, and the precision."""
    model, demand = config.model, attention_demand(config, device)
    windows = {model.window(layer) for layer in range(model.num_layers)} - {None}
    in_logits = encoding_class(model.position_encoding).in_logits
    chosen = (resolve_backend(model.attention_backend, demand._replace(window=w), in_logits) for w in (None, *windows))
    attention = ", in local layers ".join(dict.fromkeys(f"{backend} attention ({why})" for backend, why in chosen))
    layers = "compiled layers, " if compiles(model.compile, device) else ""
    graphs = "CUDA graphs of layers, " if uses_graphs(config, device) else ""
    return f"{attention}, {layers}{graphs}{config.training.precision}"


def missing_graphs(config: Config, device: torch.device) -> tuple[str, ...]:
    """Return a line about the reason why `--cuda-graphs auto` has no effect; nothing if it has one."""
    reason = why_not_graphs(config, device) if config.parallel.cuda_graphs == "auto" else None
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
