"""Muon against its slow twin, learning rates of each decay style against values worked out by hand, AdamW's numbers,
and which devices train in which precision."""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ddrp.config import Config, ObjectiveConfig, OptimizerConfig, ParallelConfig, TrainingConfig
from megatron_ddrp.engine import optimizers as muon
from megatron_ddrp.engine.build import allow_tf32, build_optimizer, precision_fault, precision_remarks
from megatron_ddrp.engine.checkpoint import check_optimizer
from megatron_ddrp.engine.layout import GradientClipping, Setup
from megatron_ddrp.engine.optimizer_state import USED_NAMES, check_deepspeed
from megatron_ddrp.engine.optimizers import MOMENTUM, AdamW, Muon, hidden_matrices, learning_rate
from megatron_ddrp.memory import by_zero_stage
from megatron_ddrp.model import build_model, on_meta_device
from megatron_ddrp.parallel.process_group import Ranks
from tests.reference import muon as twin
from tests.refusals import refused, wrong_arguments
from tests.unit.model.tiny import tiny_config


def test_a_wrapped_optimizer_of_torch_clips_once_also_where_another_one_was_made_before() -> None:
    """torch then has a step that runs the hooks, and so would the step that calls it."""
    torch.optim.RAdam([torch.nn.Parameter(torch.zeros(1))])
    step: Any = torch.optim.RAdam.step

    class RAdam(muon.Optimizer, torch.optim.RAdam):
        moments = ("exp_avg", "exp_avg_sq")
        update = torch.optim.RAdam.step

    assert step.hooked and not hasattr(RAdam.update, "hooked")


RANKS = Ranks(0, 1, torch.device("cpu"))
SETTINGS = OptimizerConfig(optimizer="muon", lr=0.1, weight_decay=0.3)
LAYER = {f"attention.{name}.weight" for name in ("query", "key", "value", "output")}
LAYER |= {"feed_forward.input.weight", "feed_forward.output.weight"}
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


def make(settings=SETTINGS, bf16=False, ranks=RANKS, clipped=False, **changes: Any) -> tuple[torch.nn.Module, Muon]:
    torch.manual_seed(0)
    config = tiny_config(**changes)
    model = build_model(config)
    parallel, training = ParallelConfig(zero_stage=0), TrainingConfig(bf16=bf16)
    chosen = Config(model=config, training=training, optimizer=settings, parallel=parallel)
    optimizer = cast(Muon, build_optimizer(model, chosen, ranks))
    if clipped:
        optimizer.register_step_pre_hook(GradientClipping(model, 1.0, RANKS))
    return model, optimizer


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> dict[str, Tensor]:
    gradients = give_gradients(model, seed)
    optimizer.step()
    return gradients


def give_gradients(model: torch.nn.Module, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def weights_of(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def off(got: Tensor, before: Tensor, expected: list[list[float]]) -> float:
    """The distance of a change from the expected one, in units of the latter."""
    wanted = torch.tensor(expected, dtype=torch.float64)
    return float((got.double() - wanted).norm() / (wanted - before.double()).norm())


@pytest.mark.parametrize("name", ["layers.0.attention.key.weight", "layers.1.feed_forward.output.weight"])
def test_two_steps_are_those_of_the_twin_to_the_precision_of_fp32(name: str) -> None:
    model, optimizer = make()
    before = weights_of(model)[name]
    gradients = [step(model, optimizer, seed)[name].tolist() for seed in (1, 2)]
    after = weights_of(model)[name]
    assert off(after, before, twin.steps(before.tolist(), gradients, 0.1, 0.3)) < 1e-5


def test_a_gpus_stacks_have_the_same_steps_and_few_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of operations does not grow with the layers, and a stack may be cut."""
    counts, weights = [], []
    for layers, stacks, largest in ((2, False, 1), (2, True, 2**25), (2, True, 300), (4, True, 2**25)):
        monkeypatch.setattr(muon, "LARGEST_STACK", largest)
        model, optimizer = make(num_layers=layers)
        optimizer.multiplies_stacks = stacks
        for seed in (1, 2):
            give_gradients(model, seed)
            with Operations() as seen:
                optimizer.step()
        counts.append(seen.count)
        weights.append(weights_of(model))
    assert counts[0] > counts[2] > counts[1] == counts[3]
    for stacked in weights[1:3]:
        for name, weight in weights[0].items():
            assert torch.allclose(stacked[name], weight, rtol=1e-5, atol=1e-6), name


class Operations(TorchDispatchMode):
    """Counts torch's operations, views aside."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def test_its_scale_gives_the_matrices_a_rate_of_their_own() -> None:
    """Twice the rate with half the scale and half the decay: matrices take the same step, all others another."""
    after = []
    for changes in ({}, {"lr": 0.2, "weight_decay": 0.15, "optimizer_options": ("scale=0.1",)}):
        model, optimizer = make(dataclasses.replace(SETTINGS, **changes))
        step(model, optimizer, 1)
        after.append((weights_of(model), hidden_matrices(model)))
    (weights, matrices), (others, _) = after
    for name, weight in weights.items():
        assert torch.allclose(weight, others[name], rtol=1e-5, atol=1e-7) == (name in matrices), name


@pytest.mark.parametrize("data_size", [1, 2, 5])
def test_data_parallel_ranks_take_turns(data_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each matrix is orthonormalised by one rank, and the work of ranks differs by one matrix at most."""
    done = Counter[int]()
    monkeypatch.setattr(muon, "copy_from_data_rank", lambda owner, tensor, ranks: None)
    for rank in range(data_size):
        model, optimizer = make(ranks=RANKS._replace(data_rank=rank, data_size=data_size))
        monkeypatch.setattr(muon, "orthonormal", lambda matrix, rank=rank: done.update([rank]) or matrix)
        step(model, optimizer, 1)
    assert done.total() == len(hidden_matrices(model)) and max(done.values()) - min(done.values()) <= 1


@pytest.mark.parametrize("size", [0.0, 1e-9, 1e-7, 1e-5])
def test_a_tiny_matrix_is_divided_as_in_the_released_code(size: float) -> None:
    """The norm gets 1e-7 more. A maximum of the two would double a matrix whose norm is 1e-7."""
    matrix = torch.randn(3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    matrix *= size / matrix.norm()
    wanted = torch.tensor(twin.newton_schulz(matrix.tolist()), dtype=torch.float64)
    torch.testing.assert_close(muon.orthonormal(matrix), wanted, rtol=1e-9, atol=1e-15)


def test_newton_schulz_in_bf16_is_that_of_torch() -> None:
    """torch's Muon multiplies in bf16, and so do we on a GPU and in runs with --bf16."""
    model, optimizer = make(bf16=True)
    before, gradients = weights_of(model), step(model, optimizer, 1)
    for name in hidden_matrices(model):
        theirs = before[name].clone().requires_grad_()
        theirs.grad = gradients[name]
        torch.optim.Muon([theirs], 0.1, 0.3, adjust_lr_fn="match_rms_adamw").step()
        assert off(model.get_parameter(name).detach(), before[name], theirs.tolist()) < 0.004


def test_everything_else_takes_the_step_of_adamw() -> None:
    model, optimizer = make()
    plain = make()[0]
    same_numbers = dataclasses.replace(SETTINGS, optimizer="adamw", optimizer_options=())
    adamw = build_optimizer(plain, Config(model=tiny_config(), optimizer=same_numbers), RANKS)
    for pair in ((model, optimizer), (plain, adamw)):
        step(*pair, 1)
    ours, theirs = weights_of(model), weights_of(plain)
    matrices = hidden_matrices(model)
    assert {name for name in ours if not torch.equal(ours[name], theirs[name])} == set(matrices)
    kept = {name: set(optimizer.state[parameter]) for name, parameter in model.named_parameters()}
    assert all((kept[name] == {MOMENTUM}) == (name in matrices) for name in kept)
    assert all({"exp_avg", "exp_avg_sq"} < kept[name] for name in kept.keys() - matrices.keys())


OF_DEBERTA = {f"layers.{i}.layer_position.{kind}.weight" for i in (0, 1) for kind in ("query", "key")}
PROJECTIONS = {"tupe-r": {"embeddings.position.query.weight", "embeddings.position.key.weight"}, "deberta": OF_DEBERTA}
PROJECTIONS |= dict.fromkeys(("absolute", "ddrp", "t5", "rope", "alibi-asym", "deberta-v2"), set())


@pytest.mark.parametrize(("encoding", "projections"), PROJECTIONS.items())
def test_it_takes_the_layers_and_the_projections_of_positions(encoding: str, projections: set[str]) -> None:
    found = hidden_matrices(build_model(tiny_config(position_encoding=encoding)))
    assert found.keys() == {f"layers.{i}.{name}" for i in (0, 1) for name in LAYER} | projections


def test_it_takes_the_maps_of_geglu_and_the_layers_of_a_generator() -> None:
    found = hidden_matrices(build_model(tiny_config(ffn="geglu")))
    maps = {f"layers.0.feed_forward.{name}.weight" for name in ("input", "gate", "output")}
    assert {name for name in found if "layers.0.feed_forward" in name} == maps
    config, objective = tiny_config(num_attention_heads=3), ObjectiveConfig(objective="electra")
    found = hidden_matrices(build_model(config, objective=objective))
    assert len(found) == 4 * len(LAYER) and sum("generator" in name for name in found) == 2 * len(LAYER)
    assert not any(word in name for name in found for word in ("head", "embeddings", "norm"))


def test_gradients_are_clipped_once() -> None:
    model, optimizer = make(clipped=True)
    gradients = step(model, optimizer, 1)
    norm = torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum().sqrt()
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        key, share = (MOMENTUM, 0.05) if MOMENTUM in state else ("exp_avg", 0.1)
        torch.testing.assert_close(state[key], share * gradients[name] / norm, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("steps_before", [0, 1])
def test_a_step_with_nan_is_as_if_it_had_not_been(steps_before: int) -> None:
    (model, optimizer), (spared, other) = pairs = make(clipped=True), make(clipped=True)
    for pair in pairs * steps_before:
        step(*pair, 1)
    give_gradients(model, 2)
    for parameter in hidden_matrices(model).values():
        parameter.grad[0] = torch.nan
    optimizer.step()
    for pair in pairs:
        step(*pair, 3)
    for parameter, same in zip(model.parameters(), spared.parameters(), strict=True):
        assert torch.equal(parameter, same)
        state, expected = optimizer.state[parameter], other.state[same]
        assert state.keys() == expected.keys() and all(torch.equal(state[key], expected[key]) for key in state)


def test_the_first_lines_name_what_it_takes() -> None:
    model = build_model(tiny_config(position_encoding="tupe-a"))
    assert AdamW.remarks(model) == ()
    [line] = Muon.remarks(model)
    assert line.startswith("optimizer: muon for 14 matrices with 1,920 parameters (")
    assert "layers.attention.query 2" in line and "position.key 1" in line
    assert line.endswith(f"adamw for the other {len(list(model.parameters())) - 14} tensors")


def test_its_memory_is_one_moment_of_each_matrix() -> None:
    config = Config(model=tiny_config()).replace(parallel={"zero_stage": 0})
    model, setup = on_meta_device(config.model, config.objective), Setup.planned(config, 1, "cuda")
    adamw, muon = by_zero_stage(model, setup), by_zero_stage(model, setup.replace(optimizer={"optimizer": "muon"}))
    matrices = sum(model.get_parameter(name).numel() for name in hidden_matrices(model))
    assert list(adamw) == [0, 1, 2, 3] and list(muon) == [0]
    assert adamw[0][0].optimizer - muon[0][0].optimizer == 4 * matrices


def test_it_is_refused_where_it_cannot_work_and_beside_the_state_of_the_other() -> None:
    words = "--optimizer muon with --zero-stage 1.*use --zero-stage 0"
    wrong_arguments(words, Config().replace, optimizer={"optimizer": "muon"})
    stored = Config().to_dict()
    del stored["optimizer"]["optimizer"]  # as an older version stored it
    before = Config.from_dict(stored).optimizer
    check_optimizer(Path("run"), before, Config().optimizer)
    muon = Config().replace(optimizer={"optimizer": "muon"}, parallel={"zero_stage": 0})
    words = "its optimizer state comes from --optimizer adamw, this run has muon"
    refused(words, check_optimizer, Path("run"), before, muon.optimizer)


def rates_of(steps: Iterable[int], total: int, **settings: Any) -> list[float]:
    config = OptimizerConfig(**{"lr": 1.0, "lr_warmup_fraction": 0.0} | settings)
    return [learning_rate(step, total, config) for step in steps]


def style(name: str, **settings: Any) -> dict[str, Any]:
    return {"lr_decay_style": name} | settings


ENDS = {"min_lr": 0.2, "lr_decay_iters": 5, "lr_warmup_fraction": 0.2}
WSD = style("wsd", min_lr=0.2, lr_wsd_decay_iters=4, lr_warmup_iters=2)
SLOW = [0.2 + 0.8 * (1 - (done / 4) ** 0.5) for done in range(4)]
RATES = [
    ({}, range(1, 6), 5, [1.0, 0.8, 0.6, 0.4, 0.2]),
    ({"lr_warmup_fraction": 1 / 3}, range(1, 7), 6, [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
    ({"min_lr": 0.2}, range(1, 5), 4, [1.0, 0.8, 0.6, 0.4]),
    (style("cosine"), range(1, 5), 4, [1.0, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2]),
    (style("cosine", lr_warmup_fraction=0.5, min_lr=0.5), range(1, 5), 4, [0.5, 1.0, 1.0, 0.75]),
    (style("constant", lr_warmup_fraction=0.5), range(1, 5), 4, [0.5, 1.0, 1.0, 1.0]),
    # It halves at four times the warm-up: 40 steps are behind step 41.
    (style("inverse-square-root", lr_warmup_fraction=0.1), (10, 11, 41, 91), 100, [1.0, 1.0, 0.5, 1 / 3]),
    # WSD falls over the last tenth or over so many steps, and the line of a longer run to its new end.
    (style("wsd"), range(1, 101), 100, [*[1.0] * 90, *(1 - tenth / 10 for tenth in range(10))]),
    (WSD, range(1, 11), 10, [0.5, 1, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4]),
    (WSD | {"lr_wsd_decay_style": "minus_sqrt"}, range(7, 11), 10, SLOW),
    ({}, [6], 10, [0.5]),
    ({}, [6], 20, [0.75]),
    # A decay that ends before the run keeps the lowest rate.
    (ENDS, range(1, 9), 8, [1, 1, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2]),
    (ENDS | style("cosine"), [4], 8, [0.6]),
    (ENDS | style("wsd", lr_wsd_decay_iters=2), range(3, 8), 8, [1, 1, 0.6, 0.2, 0.2]),
    (ENDS | style("constant"), [8], 8, [1.0]),
    (ENDS | style("inverse-square-root", min_lr=0.0), (5, 6, 7), 8, [0.5, 0.2**0.5, 0.0]),
]


@pytest.mark.parametrize(("settings", "steps", "total", "expected"), RATES)
def test_rates_by_hand(settings, steps, total, expected) -> None:
    assert rates_of(steps, total, **settings) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("fraction, steps, expected", [(0.07, 100, 7), (0.28, 25, 7), (0.05, 2048, 103), (1e-5, 10, 1)])
def test_a_share_that_is_a_whole_number_of_steps_takes_no_step_more(fraction: float, steps: int, expected: int) -> None:
    assert OptimizerConfig(lr_warmup_fraction=fraction).warmup_steps(steps) == expected


MISFITS = [
    ({"lr_wsd_decay_iters": 5}, "--lr-wsd-decay-iters 5 with --lr-decay-style linear"),
    ({"lr_wsd_decay_style": "minus_sqrt"}, "--lr-wsd-decay-style minus_sqrt with --lr-decay-style linear"),
    (style("wsd", lr_wsd_decay_iters=10, lr_warmup_iters=1), "more than --train-iters 10"),
    ({"lr_decay_iters": 4, "lr_warmup_iters": 4}, "--lr-decay-iters 4: the warm-up alone has 4 steps"),
    (style("wsd", lr_wsd_decay_iters=4, lr_warmup_iters=1, lr_decay_iters=4), "more than --lr-decay-iters 4"),
]


@pytest.mark.parametrize(("settings", "message"), MISFITS)
def test_a_decay_that_does_not_fit_is_refused(settings: dict[str, Any], message: str) -> None:
    wrong_arguments(message, Config().replace, optimizer=settings, training={"train_iters": 10})


SHARES = [0.5, np.float32(0.5), np.array(0.5), torch.tensor(0.5), "0.5", None, 10**400, -1, math.nan]


@pytest.mark.parametrize("share", SHARES, ids=lambda share: repr(share)[:20])
def test_a_share_is_any_number_of_at_least_0(share: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a plug-in: of Python, numpy or torch; anything else is one line."""
    monkeypatch.setattr("megatron_ddrp.engine.optimizers.linear", lambda step, warmup, last, config: share)
    if isinstance(share, (str, int, type(None))) or math.isnan(share):
        refused("--lr-decay-style linear gave .* for step 1: expected a share", rates_of, (1, 2), 2)
    else:
        assert [(type(rate), rate) for rate in rates_of((1, 2), 2, lr=2.0)] == [(float, 1.0)] * 2


@pytest.mark.parametrize("stage, name", [(stage, name) for stage in USED_NAMES for name in USED_NAMES[stage]], ids=str)
def test_one_missing_name_is_enough(stage, name):
    optimizer = SimpleNamespace(**dict.fromkeys(USED_NAMES[stage]))
    engine = SimpleNamespace(zero_optimization_stage=lambda: stage, optimizer=optimizer)
    check_deepspeed(engine)
    delattr(optimizer, name)
    words = rf"^DeepSpeed \S+: SimpleNamespace has no {name}, .*requirements-lock"
    refused(words, check_deepspeed, engine)


def test_adamw_has_the_numbers_of_the_flags():
    numbers = {"lr": 0.3, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_eps": 1e-5, "weight_decay": 0.2}
    model = torch.nn.ModuleDict({"map": torch.nn.Linear(2, 3)})
    groups = build_optimizer(model, Config().replace(optimizer=numbers), RANKS).param_groups
    assert [(group["lr"], group["betas"], group["eps"]) for group in groups] == [(0.3, (0.8, 0.95), 1e-5)] * 2
    assert [(len(group["params"]), group["weight_decay"]) for group in groups] == [(1, 0.2), (1, 0.0)]


@pytest.fixture
def set_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, tuple[int, int]], None]:
    def set_to(name: str, capability: tuple[int, int]) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)

    return set_to


def test_bf16_needs_compute_capability_8(set_gpu) -> None:
    for capability in ((7, 0), (7, 5), (8, 0), (9, 0)):
        set_gpu("Tesla V100", capability)
        fault, number = precision_fault("bf16", CUDA) or "", "{}.{}".format(*capability)
        assert (f"Tesla V100 has compute capability {number}" in fault and "--fp16" in fault) == (capability < (8, 0))
        assert bool(fault) == (capability < (8, 0))
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


def test_runs_are_told_of_a_precision_that_is_faster_on_their_device(set_gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    fp32, bf16 = Config(), Config().replace(training={"bf16": True})
    set_gpu("A100", (8, 0))
    line = "A100 computes in bfloat16: --bf16 is faster than TF32 and halves the activations"
    assert precision_remarks(fp32, CUDA) == [line]
    [line] = precision_remarks(Config().replace(training={"tf32": False}, parallel={"zero_stage": 0}), CUDA)
    assert "--bf16 is faster than fp32" in line
    assert precision_remarks(bf16, CUDA) == []
    set_gpu("V100", (7, 0))
    assert precision_remarks(fp32, CUDA) == []
    for capability, slow in (("AVX2", True), ("AVX512", False), ("DEFAULT", False)):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda found=capability: found)
        remarks = precision_remarks(bf16, CPU)
        assert bool(remarks) == slow and all("this CPU has no AVX-512" in line for line in remarks)
        assert precision_remarks(fp32, CPU) == []


def test_tf32_is_for_gpus_alone_and_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", asked.append)
    for allowed, device in ((True, CPU), (True, CUDA), (False, CUDA)):
        allow_tf32(allowed, device)
    assert asked == ["high", "highest"]
