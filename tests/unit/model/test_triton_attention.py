"""Triton attention where there is no GPU: its maths under Triton's interpreter, its refusals, and that it compiles."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_ddrp.model.attention.gpu import triton_attention as module
from megatron_ddrp.model.attention.gpu.triton_attention import triton_attention, why_not_triton
from tests.unit.model.attention_cases import make_case

ROOT = Path(__file__).parents[3]
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def run(arguments, **environment):
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "TRITON_"))} | environment
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=variables, capture_output=True, text=True, timeout=500, check=False
    )


@needs_triton
def test_maths_under_the_interpreter():
    """In a process of its own: see triton_interpreted.py, where each check can be read and run alone."""
    checks = str(Path(__file__).with_name("triton_interpreted.py"))
    result = run(["-m", "pytest", checks, "-p", "no:cacheprovider"], TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    assert result.returncode == 0, result.stdout + result.stderr
    passed = re.search(r"(\d+) passed", result.stdout)
    assert passed and int(passed[1]) >= 25, result.stdout


def test_package_needs_no_triton():
    script = "import sys; sys.modules['triton'] = None; import megatron_ddrp.model.attention.gpu.triton_attention"
    result = run(["-c", script])
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    "device, capability, dtype, head_dim, expected",
    [
        ("cpu", None, torch.bfloat16, 64, "needs an NVIDIA GPU, got cpu"),
        ("cuda", (7, 0), torch.float16, 64, "compute capability 8.0 .* this GPU has 7.0: use sdpa"),
        ("cuda", (8, 0), torch.float64, 64, "takes bfloat16, float16 or float32, got float64"),
        ("cuda", (9, 0), torch.bfloat16, 256, "heads up to 128 wide, got 256"),
        ("cuda", (8, 0), torch.bfloat16, 128, None),
    ],
)
def test_reasons_not_to_serve(device, capability, dtype, head_dim, expected, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    reason = why_not_triton(torch.device(device), dtype, 0.1, head_dim)
    if expected is None:
        assert reason is None
    else:
        assert reason is not None and re.search(expected, reason) and "\n" not in reason


def test_missing_triton_and_full_dropout_are_named(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: name)
    reason = why_not_triton(torch.device("cpu"), torch.float32, 1.0, 64)
    assert reason is not None and "dropout below 1, got 1.0" in reason
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    reason = why_not_triton(torch.device("cpu"), torch.float32, 0.0, 64)
    assert reason is not None and "needs the package triton" in reason


def test_call_where_it_cannot_serve_is_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    case = make_case([[1] * 4], -1, 1)
    with pytest.raises(ValueError, match="use another backend"):
        triton_attention(case.attending())


COMPILE = """
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from megatron_ddrp.model.attention.gpu import triton_kernels
from megatron_ddrp.model.positions import PositionTerms
from megatron_ddrp.model.attention.gpu.triton_attention import _Problem

def zeros(*shape):
    return torch.zeros(*shape, dtype=torch.bfloat16)

vectors = zeros(2, 20, 3, 16)
tables = zeros(1, 8, 16), zeros(3, 8, 16), zeros(1, 3, 20, 20)
terms = PositionTerms(0.2, *tables, lowest=-4, highest=3, offset_bias=zeros(3, 8))
ids = torch.ones(2, 20, dtype=torch.long)
constants = _Problem(vectors, vectors, vectors, terms, ids, torch.ones(1, dtype=torch.long), 0.1).constants
constants |= {"BLOCK_M": 32, "BLOCK_N": 32}
types = dict.fromkeys(("drop_below", "B", "H", "S"), "i32") | dict.fromkeys(("ids", "seed"), "*i64")
types |= dict.fromkeys(("lse", "delta"), "*fp32") | dict.fromkeys(constants, "constexpr") | {"scale": "fp32"}
for name in ("forward", "query_gradient", "key_gradient", "bias_gradient"):
    kernel = getattr(triton_kernels, name + "_kernel")
    source = ASTSource(kernel, {x: types.get(x, "*bf16") for x in kernel.arg_names}, constants)
    for capability in (80, 90):
        compiled = compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4, "num_stages": 1})
        assert f"sm_{capability}" in compiled.asm["ptx"] and "mma" in compiled.asm["ptx"]
        print("compiled", name, capability)
"""


@needs_triton
@pytest.mark.slow
def test_kernels_compile_for_gpus_that_are_not_there(tmp_path):
    """Triton's compiler and ptxas need no GPU: type errors that the interpreter forgives show here."""
    result = run(["-W", "ignore", "-c", COMPILE], TRITON_CACHE_DIR=str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("compiled") == 8
