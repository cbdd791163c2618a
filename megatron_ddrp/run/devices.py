"""The GPUs of the estimates: their peaks, memory and links, and the rates that they are assumed to sustain."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

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
    "triton": (66 / 650, 72 / 650),
    "flash": (200 / 650, 120 / 650),
}
"""Attention kernel → its FLOP rates forward and backward ÷ that of matrix products, on an H100 with 64-wide heads, rows
of 512 and dropout. `triton` was measured there, `flash` as the sum of both passes (docs/benchmarks.md); `sdpa`, torch's
memory-efficient kernel with a dense bias, is an assumption. For long rows FlashAttention-2's authors report up to 335
TFLOP/s (arXiv:2307.08691)."""


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
