"""What devices sustain, and from it the estimated time of a step in a layout; `--dry-run` prints it."""

from __future__ import annotations

from dataclasses import dataclass

LAUNCH_SECONDS = 2e-6
"""The least that a kernel takes on any device, an assumption."""


@dataclass(frozen=True)
class Device:
    """A GPU and its links: sustained rates, which are assumptions, beside the published peaks that they come from."""

    name: str
    """As `torch.cuda.get_device_name` gives it."""
    half: float
    """TFLOP/s of bf16 or fp16 matrix products."""
    single: float
    """TFLOP/s of fp32 ones."""
    bandwidth: float
    """TB/s of device memory."""
    memory: float
    """GiB."""
    inside: float
    """GB/s that a GPU sends to the others of its host."""
    between: float
    """GB/s that a host sends to the other hosts, over all its network cards."""
    runs_triton: bool = True
    """Whether attention in Triton and torch's flash kernel run: compute capability 8.0 and up."""

    def attention(self, kernel: str, is_backward: bool) -> float:
        """Return the TFLOP/s of an attention kernel; its share of `half` is the same on every device."""
        return self.half * ATTENTION_SHARES[kernel if self.runs_triton else "sdpa"][is_backward]

    def seconds(self, num_bytes: float, flop: float = 0, tflops: float = 1) -> float:
        """Return the time of one launch: of its memory traffic or its arithmetic, whichever is longer."""
        return max(num_bytes / (self.bandwidth * 1e12), flop / (tflops * 1e12), LAUNCH_SECONDS)


ATTENTION_SHARES = {
    "sdpa": (200 / 650, 130 / 650),
    "triton": (180 / 650, 120 / 650),
    "flash": (300 / 650, 180 / 650),
}
"""Attention kernel → its FLOP rates forward and backward ÷ that of matrix products, on an H100 with 64-wide heads and
dropout. `sdpa` is torch's memory-efficient kernel with a dense bias. Assumptions; FlashAttention-2's authors report up
to 335 TFLOP/s there (arXiv:2307.08691), for long rows."""

H100 = Device("H100 80GB HBM3", half=650, single=45, bandwidth=2.8, memory=80, inside=360, between=320)
"""Peaks: 989 and 67 TFLOP/s, 3.35 TB/s, NVLink 450 GB/s per direction (H100 data sheet), 8 cards of 400 Gbit/s."""


def _scaled(half: float, single: float, bandwidth: float, inside: float, between: float) -> dict[str, float]:
    """Return a device's sustained rates: of published peaks the shares that the H100 has, of links 80 %."""
    return {
        "half": H100.half * half / 989,
        "single": H100.single * single / 67,
        "bandwidth": H100.bandwidth * bandwidth / 3.35,
        "inside": 0.8 * inside,
        "between": 0.8 * between,
    }


DEVICES = {
    "v100": Device("V100-SXM2-32GB", memory=32, runs_triton=False, **_scaled(125, 15.7, 0.9, 150, 16)),
    "a100": Device("A100-SXM4-80GB", memory=80, **_scaled(312, 19.5, 2.039, 300, 200)),
    "h100": H100,
}
"""Name → device. V100: data sheet (SXM2, 32 GB, NVLink 150 GB/s per direction), hosts linked by 16 GB/s. A100: data
sheet (SXM, 80 GB, NVLink 300 GB/s per direction), 8 cards of 200 Gbit/s per host."""
