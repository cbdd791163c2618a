"""Which devices train in which precision, and what a run on a GPU suggests."""

from __future__ import annotations

import pytest
import torch

from megatron_ddrp.config import Config
from megatron_ddrp.engine.build import allow_tf32, precision_fault, precision_remarks

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
    for capability, advice in (("AVX2", "leave --fp16 out"), ("AVX512", "use --bf16, or neither")):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda found=capability: found)
        assert supported or advice in (precision_fault("fp16", CPU) or "")
    assert precision_fault("bf16", CPU) is None


def test_an_fp32_run_is_told_of_bf16_where_the_gpu_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    capability = (8, 0)
    (line,) = precision_remarks(Config(), CUDA)
    assert line == "A100 computes in bfloat16: --bf16 is faster than TF32 and halves the activations"
    (line,) = precision_remarks(Config().replace(training={"tf32": False}, parallel={"zero_stage": 0}), CUDA)
    assert "--bf16 is faster than fp32" in line
    assert precision_remarks(Config().replace(training={"bf16": True}), CUDA) == []
    assert precision_remarks(Config(), CPU) == []
    capability = (7, 0)
    assert precision_remarks(Config(), CUDA) == []


@pytest.mark.parametrize("capability, slow", [("AVX2", True), ("AVX512", False), ("DEFAULT", False)])
def test_a_bf16_run_is_told_of_a_cpu_that_multiplies_slowly_in_it(
    capability: str, slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    remarks = precision_remarks(Config().replace(training={"bf16": True}), CPU)
    assert bool(remarks) == slow and all("this CPU has no AVX-512" in line for line in remarks)
    assert precision_remarks(Config(), CPU) == []


def test_tf32_is_for_gpus_alone_and_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", asked.append)
    allow_tf32(True, CPU)
    assert asked == []
    allow_tf32(True, CUDA)
    allow_tf32(False, CUDA)
    assert asked == ["high", "highest"]
