"""Triton attention where there is no GPU: its maths under Triton's interpreter, its refusals, and that it compiles."""

import importlib.metadata
import importlib.util
import json
import re

import kernels
import pytest
import torch

from megatron_ddrp.config.registry import ENCODINGS
from megatron_ddrp.model import fused
from megatron_ddrp.model.attention.backends import resolve_backend
from megatron_ddrp.model.attention.gpu.triton_attention import Facts, plan_of, triton_attention, why_not_triton
from megatron_ddrp.model.attention.logits import Demand
from tests.unit.model.attention_cases import make_case
from tests.unit.model.triton_interpreter import assert_checks_pass, needs_triton, run


@needs_triton
def test_maths_under_the_interpreter():
    assert_checks_pass("triton_kernels.py", 50)


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
    monkeypatch.setenv("CC", "cc")
    monkeypatch.setattr(fused.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    reason = why_not_triton(Demand(torch.device(device), dtype, 0.1, head_dim))
    if expected is None:
        assert reason is None
    else:
        assert reason is not None and re.search(expected, reason) and "\n" not in reason


def test_missing_triton_and_full_dropout_are_named(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("CC", "cc")
    monkeypatch.setattr(fused.importlib.util, "find_spec", lambda name: name)
    reason = why_not_triton(Demand(torch.device("cpu"), torch.float32, 1.0, 64))
    assert reason is not None and "dropout below 1, got 1.0" in reason
    monkeypatch.setattr(fused.importlib.util, "find_spec", lambda name: None)
    fused.missing_for_triton.cache_clear()
    reason = why_not_triton(Demand(torch.device("cpu"), torch.float32, 0.0, 64))
    assert reason is not None and "needs the package triton" in reason


def test_without_a_c_compiler_auto_takes_another_backend(monkeypatch):
    """Triton builds its launcher with one; a GPU machine may have none."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(fused.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    demand = Demand(torch.device("cuda"), torch.bfloat16, 0.1, 64)
    assert "needs a C compiler" in str(why_not_triton(demand))
    assert resolve_backend("auto", demand, True)[0] != "triton"


def test_call_where_it_cannot_serve_is_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    case = make_case([[1] * 4], -1, 1)
    with pytest.raises(ValueError, match="use another backend"):
        triton_attention(case.attending())


@pytest.mark.parametrize(
    ("seq", "window", "covered"),
    [
        *((8192, 0, 512), (8192, 192, 512), (8192, 193, 1024), (8192, 448, 1024), (8192, 449, 2048), (8192, 960, 2048)),
        *((512, 192, 512), (512, 256, 1024), (512, 510, 2048), (512, 511, 512), (8192, None, 8192), (100, None, 512)),
    ],
)
def test_kernels_look_through_the_places_of_a_tile_and_its_window_on_both_sides(seq, window, covered):
    """The widest tile of these kernels has 128 queries; the number of places is a power of two from 512 on.

    The places begin a window before the tile, also where the row begins later.
    """
    shapes = ((1, 128, 64), None, None, None)
    facts = Facts((1, seq, 1, 64), torch.bfloat16, (9, 0), 0.125, -64, 63, shapes, window, 0.0, 0)
    assert plan_of(facts).constants["S_PAD"] == covered


COMPILED_HERE = [
    "ddrp hcd, 64, forward, sm_90",
    "ddrp hcd, 64, query_gradient, sm_90",
    "ddrp hcd, 64, key_gradient, sm_90",
    "ddrp hcd, 64, compare, sm_90",
    "ddrp hcd, 64, pull, sm_80",
    "ddrp, 64, key_gradient, sm_80",
    "deberta, 64, key_gradient, sm_90",
    "tupe-a, 64, bias_gradient, sm_80",
    "ddrp, 128, forward, sm_80",
    "deberta, 128, query_gradient, sm_90",
    "alibi, 64, forward, sm_80",
    "ddrp hcd local, 64, key_gradient, sm_90",
]
"""Of the shipped kernels those that the suite compiles; `python benchmarks/kernels.py --write` compiles all."""


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or importlib.metadata.version("triton") != kernels.TRITON,
    reason=f"the bounds are those of triton {kernels.TRITON}",
)
@pytest.mark.slow
def test_kernels_compile_within_their_bounds(tmp_path, monkeypatch):
    """For GPUs that are not there: type errors that the interpreter forgives show here, and so does a spill."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    bounds = json.loads(kernels.BOUNDS.read_text(encoding="utf-8"))
    shipped = {name: rest for name, *rest in kernels.cases(list(ENCODINGS), kernels.HEAD_SIZES, (0, 2))}
    assert list(bounds) == list(shipped), "python benchmarks/kernels.py --write compiles them anew"
    for name in COMPILED_HERE:
        capability, launch = shipped[name]
        got, bound = kernels.compile_launch(launch, capability), kernels.Compiled(**bounds[name])
        assert got.instruction == bound.instruction, name
        assert got.spilled <= bound.spilled and got.shared <= bound.shared, (name, got, bound)


def test_few_kernels_spill_and_matrices_are_multiplied_by_the_fastest_instruction():
    """What is left: a few bytes where the compiler gives a thread fewer registers than it could, and kernels whose
    tiles of 32 keys keep everything in registers, which Hopper's instruction for 64 rows would not."""
    bounds = json.loads(kernels.BOUNDS.read_text(encoding="utf-8"))
    spilled = {name: row["spilled"] for name, row in bounds.items() if row["spilled"]}
    assert len(spilled) <= 8 and max(spilled.values(), default=0) <= 48, spilled
    slow = {name for name, row in bounds.items() if name.endswith("sm_90") and row["instruction"] != "wgmma"}
    assert {name.removesuffix("sm_90") for name in slow} <= {
        f"{name}{hcd}, {width}, key_gradient, "
        for name in ("deberta", "deberta-v2")
        for hcd in ("", " hcd")
        for width in (64, 128)
    }, slow
    assert all(row["instruction"] == "mma.sync" for name, row in bounds.items() if name.endswith("sm_80"))
