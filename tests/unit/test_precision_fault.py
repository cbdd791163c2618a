"""Which devices train in which precision."""

from __future__ import annotations

import pytest
import torch

from megatron_ddrp.engine.build import precision_fault

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.mark.parametrize("capability, refused", [((7, 0), True), ((7, 5), True), ((8, 0), False), ((9, 0), False)])
def test_bf16_needs_compute_capability_8(
    capability: tuple[int, int], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100")
    fault = precision_fault("bf16", CUDA)
    assert (fault is not None) == refused
    if fault:
        major, minor = capability
        assert f"Tesla V100 has compute capability {major}.{minor}" in fault and "--fp16" in fault
    assert precision_fault("fp16", CUDA) is None and precision_fault("fp32", CUDA) is None


@pytest.mark.parametrize("supported", [False, True])
def test_fp16_on_a_cpu_is_what_deepspeed_says(supported: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr(CPU_Accelerator, "is_fp16_supported", lambda self: supported)
    assert (precision_fault("fp16", CPU) is None) == supported
    assert precision_fault("bf16", CPU) is None
