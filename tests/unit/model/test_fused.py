"""Compiled regions: no break in a graph, the modules' numbers, dropout that repeats; when `--compile` acts."""

import sys
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_ddrp.config import ObjectiveConfig
from megatron_ddrp.model import fused
from megatron_ddrp.model.attention.logits import spread
from megatron_ddrp.model.bert import SampleKeys
from tests.unit.model.tiny import encode, gradients, some_draws, tiny_batch, tiny_model

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def traced(monkeypatch):
    """Trace regions with autograd, fail at a break in a graph, and run them by torch's own kernels."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(fused, "compile_region", cache(partial(torch.compile, fullgraph=True, backend="aot_eager")))


def region_inputs(tokens, dropout):
    generator = torch.Generator().manual_seed(0)
    hidden, added = (torch.randn(2, tokens, 6, generator=generator).requires_grad_() for _ in range(2))
    weight, bias = (torch.randn(6, generator=generator).requires_grad_() for _ in range(2))
    return (hidden, added), (dropout, weight, bias, 1e-5, False)


def bias_gelu(hidden, added, _, weight, bias, *others):
    return fused.bias_gelu(hidden * added * weight, bias)


def gated_gelu(hidden, added, _, weight, bias, *others):
    return fused.gated_gelu(hidden * weight, added * bias)


def add_rms_norm(hidden, added, dropout, weight, bias, eps, _):
    return fused.add_norm(hidden, added * bias, dropout, weight, None, eps, True)


@pytest.mark.parametrize("region", [fused.add_norm, fused.add_and_norm, add_rms_norm, bias_gelu, gated_gelu])
def test_a_region_gives_the_numbers_of_its_operations(region, traced):
    for tokens in (3, 4, 5):  # one graph serves them
        states, others = region_inputs(tokens, 0.0)
        answers = []
        for results in (fused.run_compiled(region, states, *others), region(*states, *others)):
            results = results if isinstance(results, tuple) else (results,)
            loss = sum((x * torch.arange(x.numel()).view_as(x)).sum() for x in results)
            answers.append((*results, *torch.autograd.grad(loss, (*states, *others[1:3]))))
        for got, expected in zip(*answers, strict=True):
            torch.testing.assert_close(got, expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_dropout_of_a_region_has_one_mask_for_both_passes(traced):
    (hidden, added), _ = region_inputs(50, 0.5)
    result = fused.run_compiled(fused.add, (hidden, added), 0.5)
    (scale,) = torch.autograd.grad(result.sum(), added)
    torch.testing.assert_close(result, hidden + added * scale)
    assert set(scale.unique().tolist()) == {0.0, 2.0} and 0.3 < (scale == 0).float().mean() < 0.7


@pytest.mark.parametrize(
    "read", [slice(3), slice(1, 3), slice(2), slice(1, 2)], ids=["all", "maps", "input", "one map"]
)
@pytest.mark.parametrize("with_bias", [False, True])
def test_maps_of_one_input_have_the_gradients_of_maps_apart(with_bias, read):
    """What nobody reads has no gradient, as the value of a layer that HCD alone reads."""
    torch.manual_seed(0)
    maps = [torch.nn.Linear(4, width) for width in (4, 6)]
    parameters = [parameter for each in maps for parameter in (each.weight, each.bias)]
    x = torch.randn(2, 3, 4, requires_grad=True)
    apart = x, *(torch.nn.functional.linear(x, each.weight, each.bias if with_bias else None) for each in maps)
    answers = []
    for readers in (fused.maps_of(x, maps, with_bias), apart):
        loss = sum((part * part.sin()).sum() for part in readers[read])
        answers.append((*readers, *torch.autograd.grad(loss, [x, *parameters], allow_unused=True)))
    for got, expected in zip(*answers, strict=True):
        assert (got is None) == (expected is None)
        if got is not None:
            torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(
    "changes",
    [
        {"position_encoding": "deberta", "layernorm_position": "post"},  # its mask decoder decodes places
        {
            "objective": ObjectiveConfig(objective="electra", generator_size=1.0),
            "layernorm_position": "pre",
            "ffn_hidden_size": 48,  # the generator's: one graph serves both
        },
        {"layernorm_position": "pre", "ffn": "geglu", "bias": False, "norm": "rmsnorm", "first_norm": False},
        {"layernorm_position": "post", "bias": False},
    ],
    ids=["post", "pre", "modern", "no bias"],
)
def test_a_compiled_model_has_the_sums_and_gradients_of_the_other(changes, traced):
    batch = tiny_batch()
    keys = SampleKeys(torch.arange(batch.labels.numel()).view_as(batch.labels))
    answers = []
    for setting in ("off", "on"):
        model = tiny_model(compile=setting, **changes)
        sums = model(batch, some_draws(batch)._replace(own=keys)).sums
        answers.append({"sums": sums, **gradients(model, sums, range(1, 1 + len(sums)))})
    assert answers[0].keys() == answers[1].keys()
    for name, expected in answers[0].items():
        torch.testing.assert_close(answers[1][name], expected, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("order", ["post", "pre"])
def test_a_compiled_model_drops_nothing_in_evaluation(order, traced):
    batch, changes = tiny_batch(), {"layernorm_position": order, "hidden_dropout": 0.5}
    compiled, plain = (tiny_model(compile=setting, **changes).eval() for setting in ("on", "off"))
    torch.testing.assert_close(encode(compiled, batch), encode(plain, batch))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_dropout_repeats_when_a_layer_is_computed_again(backend, monkeypatch):
    torch.compiler.reset()
    monkeypatch.setattr(fused, "compile_region", cache(partial(torch.compile, fullgraph=True, backend=backend)))
    answers = []
    for recompute in (False, True, False):
        states, _ = region_inputs(16, 0.5)
        run = partial(fused.run_compiled, fused.add, states, 0.5)
        torch.manual_seed(len(answers) // 2)  # 0, 0, 1
        result = checkpoint(run, use_reentrant=False) if recompute else run()
        answers.append((result, *torch.autograd.grad(result.pow(3).sum(), states)))
    for kept, again, other in zip(*answers, strict=True):
        assert torch.equal(kept, again) and not torch.equal(kept, other)


def counted(monkeypatch):
    """Compile regions by a backend that needs no compiler; return the list to which each compiled graph is added."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    monkeypatch.setattr(fused, "compile_region", cache(fused.compile_region.__wrapped__))
    monkeypatch.setattr(fused, "own_copy", cache(fused.own_copy.__wrapped__))
    return graphs


def test_models_of_many_widths_share_no_code(monkeypatch):
    """A sweep over encoders or a comparison holds more than torch's 8 variants of one function in a process."""
    graphs = counted(monkeypatch)
    for width in range(4, 16):
        states = (torch.randn(2, 3, width), torch.randn(2, 3, width))
        norm = (torch.ones(width), None, 1e-5, False)
        for dropout in (0.1, 0.0):
            for _ in range(2):
                fused.run_compiled(fused.add_norm, states, dropout, *norm)
    assert len(graphs) == 24


@torch._dynamo.config.patch(recompile_limit=2)
def test_beyond_the_limit_of_variants_a_region_runs_plainly(monkeypatch):
    graphs = counted(monkeypatch)
    for grad in ((True, True), (True, False), (False, True), (False, False), (True, True)):
        hidden, added = (torch.randn(2, 3, 4, requires_grad=needed) for needed in grad)
        assert torch.equal(fused.run_compiled(fused.add, (hidden, added), 0.0), hidden + added)
    assert len(graphs) == 2


def test_position_terms_trace_without_a_break():
    torch.compiler.reset()
    per_offset = torch.randn(2, 5, 4, requires_grad=True)
    traced_spread = torch.compile(spread, fullgraph=True, backend="aot_eager")
    assert torch.equal(traced_spread(per_offset, -1, 2), spread(per_offset, -1, 2))


def test_compile_acts_by_setting_device_and_triton(monkeypatch, tmp_path):
    (tmp_path / "Python.h").touch()
    compiles = fused.compiles.__wrapped__
    monkeypatch.setattr(fused.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setenv("CC", "cc")
    monkeypatch.setattr(fused, "_headers", lambda: tmp_path)
    for setting, device, capability, expected in (
        ("on", CPU, None, True),
        ("auto", CPU, None, False),
        ("on", GPU, (7, 0), True),
        ("auto", GPU, (7, 0), False),
        ("auto", GPU, (8, 0), True),
        ("off", GPU, (9, 0), False),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, answer=capability: answer)
        assert compiles(setting, device) is expected, (setting, device, capability)
    monkeypatch.setattr(fused, "_headers", lambda: Path("no headers"))
    fused.missing_for_triton.cache_clear()
    assert compiles("auto", GPU) is False
    assert "needs Python.h, which is not in no headers" in fused.why_not_compile(GPU)
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", "")
    fused.missing_for_triton.cache_clear()
    assert compiles("auto", GPU) is False
    assert "needs a C compiler, and neither gcc nor clang is found" in fused.why_not_compile(GPU)
    monkeypatch.setattr(fused.importlib.util, "find_spec", lambda name: None)
    fused.missing_for_triton.cache_clear()
    assert compiles("auto", GPU) is False
    assert "needs the package triton" in fused.why_not_compile(GPU)


def test_a_missing_compiler_is_told(monkeypatch):
    monkeypatch.setenv("CXX", sys.executable)
    assert fused.why_not_compile(CPU) is None
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no-such-compiler is not found" in fused.why_not_compile(CPU)
