"""What a run does on the device at hand: refusals of what the device lacks, and the choices that `auto` made for it."""

from __future__ import annotations

import torch

from megatron_ddrp.config import Config, encoding_class
from megatron_ddrp.engine.precision import precision_fault
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError
from megatron_ddrp.model.attention.attending import Demand
from megatron_ddrp.model.attention.backends import refusal, resolve_backend
from megatron_ddrp.model.fused import compiles, why_not_compile

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def check_device(config: Config, device: torch.device) -> None:
    """Refuse a precision, an attention backend or a compilation that a device does not have."""
    precision, backend = config.training.precision, config.model.attention_backend
    faults = {
        f"--{precision}": precision_fault(precision, device),
        f"--attention-backend {backend}": refusal(backend, attention_demand(config, device)),
        "--compile on": why_not_compile(device) if config.model.compile == "on" else None,
    }
    for flag, fault in faults.items():
        if fault:
            raise UserError(f"{flag}: {fault}", WRONG_ARGUMENTS)


def attention_demand(config: Config, device: torch.device) -> Demand:
    """Return what a run demands of an attention backend."""
    model = config.model
    return Demand(device, DTYPES[config.training.precision], model.attention_dropout, model.head_dim)


def choices(config: Config, device: torch.device) -> str:
    """Return the attention backend with the reason for it, whether layers are compiled, and the precision."""
    in_logits = encoding_class(config.model.position_encoding).in_logits
    backend, why = resolve_backend(config.model.attention_backend, attention_demand(config, device), in_logits)
    layers = "compiled layers, " if compiles(config.model.compile, device) else ""
    return f"{backend} attention ({why}), {layers}{config.training.precision}"
