"""Devices of the smoke tests: every case runs on a CUDA device, some on the CPU too, so that the tests are tested."""

import multiprocessing
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from megatron_ddrp.engine.build import precision_fault
from tests.integration.conftest import flags as flags  # of a tiny run, as the integration tests have them
from tests.integration.launch import fork_server

GPU = "cuda"
NEEDS_GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))


def on_devices(cases: Iterable[tuple[Any, ...]], on_cpu: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Return pytest's parameters (device, *case): all cases on the GPU and those of `on_cpu` on the CPU."""
    on_gpu = [pytest.param(GPU, *case, marks=NEEDS_GPU) for case in cases]
    return [*on_gpu, *(pytest.param("cpu", *case) for case in on_cpu)]


ON_BOTH = on_devices([()], [()])
"""The parameter `device` of a test that has no other."""


def half_precision(device: str) -> str:
    """Return "bf16" where the device computes in it, else "fp16"."""
    return "fp16" if precision_fault("bf16", torch.device(device)) else "bf16"


def context_of(device: str) -> Any:
    """Return the multiprocessing context whose processes compute on a device."""
    return multiprocessing.get_context("spawn") if device == GPU else fork_server()


def need_devices(device: str, count: int) -> None:
    """Skip a test that needs several GPUs where there are fewer."""
    if device == GPU and torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} CUDA devices")
