"""Shares of the operations of a profile, on events as torch's profiler makes them."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import EventList, FunctionEvent

from megatron_ddrp.config import Config
from megatron_ddrp.engine.layout import Setup
from megatron_ddrp.parallel.process_group import Ranks
from megatron_ddrp.run import flops as profile
from megatron_ddrp.run.flops import StepProfile, shares_of


def launch(number: int, name: str, kernel: str, begin: int, microseconds: int) -> list[FunctionEvent]:
    """An operation of the host that takes 5 µs, and the kernel that it launches."""
    host = FunctionEvent(number, name, 0, begin, begin + 5, device_type=DeviceType.CPU, use_device="cuda", stack=[])
    host.append_kernel(kernel, 0, microseconds)
    on_gpu = FunctionEvent(
        100 + number, kernel, 7, begin, begin + microseconds, device_type=DeviceType.CUDA, use_device="cuda", stack=[]
    )
    return [host, on_gpu]


def named_range(number: int, begin: int, end: int) -> FunctionEvent:
    return FunctionEvent(
        number,
        "Optimizer.step#AdamW.step",
        7,
        begin,
        end,
        device_type=DeviceType.CUDA,
        use_device="cuda",
        is_user_annotation=True,
        stack=[],
    )


def test_a_kernel_counts_once_and_a_named_range_not_at_all():
    events = [*launch(1, "aten::mm", "gemm", 0, 300), *launch(2, "aten::add", "add", 400, 100), named_range(3, 0, 500)]
    listed = EventList(events, use_device="cuda")
    listed._build_tree()
    assert shares_of(listed.key_averages(), on_gpu=True) == [("gemm", 0.75), ("add", 0.25)]
    on_host = shares_of(listed.key_averages(), on_gpu=False)
    assert dict(on_host) == pytest.approx({"aten::mm": 0.5, "aten::add": 0.5, "gemm": 0, "add": 0, on_host[-1][0]: 0})


def test_the_seconds_of_a_profile_are_those_of_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config().replace(
        checkpoint={"save": "run"}, logging={"profile": True, "profile_step_start": 2, "profile_step_end": 6}
    )
    made = StepProfile(Setup(config, Ranks(0, 1, torch.device("cpu"))), steps_done=0)
    made._began = 10.0
    monkeypatch.setattr(profile.time, "perf_counter", lambda: 18.0)
    monkeypatch.setattr(profile, "gather_objects", lambda item: [item])
    monkeypatch.setattr(StepProfile, "_stop", lambda self: "profiler")
    monkeypatch.setattr(StepProfile, "_write", lambda self, profiler, seconds: f"{seconds} s per step")
    assert made.finish(5) == [] and made.finish(6) == ["2.0 s per step"]
