"""The table of devices: peaks by name, and the time of a step by a share of the peak, worked out by hand."""

from __future__ import annotations

import pytest

from megatron_ddrp.config import Config
from megatron_ddrp.run.devices import DEVICES, SHARE, device_named, why_not
from megatron_ddrp.run.flops import flop_per_token, step_seconds

BASE = Config().replace(training={"micro_batch_size": 32, "global_batch_size": 4096, "fp16": True})


def test_a_step_takes_its_flop_at_a_share_of_the_peak_of_all_ranks() -> None:
    seconds = flop_per_token(BASE).total * 4096 * 512 / (64 * 989.4e12 * SHARE)
    assert step_seconds(BASE, 64, DEVICES["h100"]) == pytest.approx(seconds)
    recomputed = BASE.replace(parallel={"checkpoint_activations": True})
    assert step_seconds(recomputed, 64, DEVICES["h100"]) == pytest.approx(4 / 3 * seconds)


def test_older_devices_refuse_bf16() -> None:
    bf16 = BASE.replace(training={"fp16": False, "bf16": True})
    for device in DEVICES.values():
        assert why_not(BASE, device) is None and (why_not(bf16, device) is None) == device.is_recent


@pytest.mark.parametrize(
    ("name", "precision", "tf32", "peak"),
    [
        ("Tesla V100-SXM2-32GB", "fp16", True, 125),
        ("Tesla V100-PCIE-16GB", "fp32", True, 14),
        ("NVIDIA A100-SXM4-80GB", "bf16", True, 312),
        ("NVIDIA A100 80GB PCIe", "fp32", True, 156),
        ("NVIDIA A100-PCIE-40GB", "fp32", False, 19.5),
        ("NVIDIA A10", "bf16", True, 125),
        ("NVIDIA A40", "bf16", True, 149.7),
        ("NVIDIA L4", "bf16", True, 121),
        ("NVIDIA L40S", "bf16", True, 362.05),
        ("NVIDIA GeForce RTX 4090", "bf16", True, 165.2),
        ("NVIDIA H100 80GB HBM3", "bf16", True, 989.4),
        ("NVIDIA H100 PCIe", "bf16", True, 756),
        ("NVIDIA H200", "fp16", True, 989.4),
        ("NVIDIA B200", "fp32", False, None),
        ("AMD Instinct MI300X", "bf16", True, 1307.4),
        ("NVIDIA A10G", "bf16", True, None),
        ("NVIDIA L40", "bf16", True, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", True, None),
        ("NVIDIA GeForce RTX 4090 D", "bf16", True, None),
    ],
)
def test_a_devices_peak_is_found_by_its_name(name, precision, tf32, peak):
    device = device_named(name)
    assert (device and device.tflops(precision, tf32)) == peak
