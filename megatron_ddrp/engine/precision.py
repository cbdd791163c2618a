"""Precisions that a device supports, and the choice of TF32."""

from __future__ import annotations

import torch

from megatron_ddrp.config import Config
from megatron_ddrp.engine.deepspeed_file import import_quietly

NATIVE_BF16 = (8, 0)
"""Lowest compute capability with bfloat16 on NVIDIA's GPUs; `torch.cuda.is_bf16_supported()` counts emulation too."""


def precision_fault(precision: str, device: torch.device) -> str | None:
    """Return the reason why a device cannot train in "fp32", "bf16" or "fp16", or None if it can."""
    if precision == "fp16" and device.type == "cpu":
        import_quietly()
        from deepspeed.accelerator import get_accelerator

        if not get_accelerator().is_fp16_supported():
            return f"there is no GPU here, and this CPU does not compute in float16: {instead_of_fp16()}"
    if precision == "bf16" and device.type == "cuda" and torch.version.hip is None:
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


def allow_tf32(config: Config, device: torch.device) -> None:
    """Let a GPU multiply fp32 matrices in TF32, unless `--no-tf32` is given. CPUs are unaffected."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if config.training.tf32 else "highest")


def precision_remarks(config: Config, device: torch.device) -> list[str]:
    """Return a line if another precision is faster on this device, else nothing."""
    precision = config.training.precision
    if precision == "bf16" and device.type == "cpu" and _multiplies_bf16_slowly():
        return ["this CPU has no AVX-512, so torch multiplies bf16 matrices many times slower than fp32: omit --bf16"]
    if precision != "fp32" or device.type != "cuda" or torch.version.hip is not None:
        return []
    if torch.cuda.get_device_capability(device) < NATIVE_BF16:
        return []
    with_zero = "" if config.parallel.zero_stage else " with --zero-stage 1"
    how = "TF32" if config.training.tf32 else "fp32"
    name = torch.cuda.get_device_name(device)
    return [f"{name} computes in bfloat16: --bf16{with_zero} is faster than {how} and halves the activations"]
