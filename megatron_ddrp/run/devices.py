"""GPUs by name: their peaks, for a run's MFU and for the time of a step on a GPU of another machine.

This module does not import torch, since `plan --help` lists its devices.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron_ddrp.config import Config

SHARE = 0.18
"""Share of the dense peak: the MFU of `ddrp` + `mth` at base size on an H100 (docs/lab/benchmarks.md)."""

HOST = 8
"""GPUs per host."""


@dataclass(frozen=True)
class Device:
    """A GPU with its dense TFLOP/s, without sparsity; None where the maker gives no figure."""

    name: str
    """Pattern of whole words in the name from `torch.cuda.get_device_name`."""
    half: float
    """TFLOP/s of bf16 and fp16 on tensor cores, accumulated in fp32."""
    tf32: float | None
    fp32: float | None
    memory: float = 0.0
    """GiB of device memory; 0 in rows that serve for peaks alone."""
    is_recent: bool = True
    """True for compute capability 8.0 and higher: bf16, attention in Triton and torch's flash kernel."""

    def tflops(self, precision: str, tf32: bool) -> float | None:
        """Return the TFLOP/s in "bf16", "fp16" or "fp32"; `tf32` is True if fp32 products may be computed in TF32."""
        if precision != "fp32":
            return self.half
        return self.tf32 if tf32 and self.tf32 else self.fp32


DEVICES = {
    "v100s-pcie": Device(r"V100S-PCIE", 130, None, 16.4, is_recent=False),  # V100 data sheet
    "v100-pcie": Device(r"V100-PCIE", 112, None, 14, is_recent=False),  # V100 data sheet
    "v100": Device(r"V100-SXM\d", 125, None, 15.7, 32, is_recent=False),  # V100 data sheet
    "a100": Device(r"A100", 312, 156, 19.5, 80),  # A100 data sheet, SXM and PCIe alike
    "a40": Device(r"A40", 149.7, 74.8, 37.4),  # A40 data sheet
    "t4": Device(r"T4", 65, None, 8.1, 16, is_recent=False),  # T4 data sheet
    "a10": Device(r"A10", 125, 62.5, 31.2, 24),  # A10 data sheet
    "l4": Device(r"L4", 121, 60, 30.3, 24),  # L4 data sheet, halved: it counts sparsity
    "l40s": Device(r"L40S", 362.05, 183, 91.6),  # L40S data sheet
    "rtx-3060": Device(r"RTX 3060$", 25.5, 12.7, 12.7, 12),  # announcement: 13 fp32, 102 sparse, a quarter
    "rtx-3090": Device(r"RTX 3090$", 71, 35.6, 35.6, 24),  # GA102 whitepaper
    "rtx-4090": Device(r"RTX 4090$", 165.2, 82.6, 82.6, 24),  # Ada whitepaper
    "rtx-5090": Device(r"RTX 5090$", 209.5, 104.8, 104.8, 32),  # Blackwell whitepaper; a quarter of 838 sparse
    "h100-pcie": Device(r"H100 PCIe", 756, 378, 51),  # H100 data sheet, halved
    "h100-nvl": Device(r"H100 NVL", 835.5, 417.5, 60),  # H100 data sheet, halved
    "h100": Device(r"H100 80GB HBM3", 989.4, 494.7, 66.9, 80),  # H100 whitepaper, SXM
    "h200-nvl": Device(r"H200 NVL", 835.5, 417.5, 60),  # H200 data sheet, halved
    "h200": Device(r"H200", 989.4, 494.7, 66.9, 140),  # H200 data sheet, halved: as the H100 SXM
    "b200": Device(r"B200", 2250, 1125, None),  # HGX B200 data sheet, an eighth and halved
    "mi300x": Device(r"MI300X", 1307.4, 653.7, 163.4),  # MI300X data sheet
}
"""Value of `--device` → device; of several that a name matches, the first counts."""

LISTED = {name: device for name, device in DEVICES.items() if device.memory}
"""Devices that `plan` and the dry run give times for."""


def device_named(name: str) -> Device | None:
    """Return the row of a device by its name from `torch.cuda.get_device_name`; None if the table has no such row."""
    return next((device for device in DEVICES.values() if re.search(rf"\b{device.name}\b", name)), None)


def why_not(config: Config, device: Device) -> str | None:
    """Return why a device cannot train in the run's precision, or None."""
    return "it has no bf16" if config.training.precision == "bf16" and not device.is_recent else None


def with_chosen_backend(config: Config, device: Device) -> Config:
    """Return the configuration with the attention that `auto` chooses on a device, if memory depends on it."""
    if config.model.attention_backend == "auto" and device.is_recent and config.model.encoding.in_logits:
        return config.replace(model={"attention_backend": "triton"})
    return config
