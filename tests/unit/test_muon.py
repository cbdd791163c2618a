"""Muon against its slow twin, what it takes and what it leaves to AdamW, and its refusals."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ddrp.config import Config, ObjectiveConfig, OptimizerConfig, ParallelConfig, TrainingConfig
from megatron_ddrp.engine import optimizers as muon
from megatron_ddrp.engine.build import build_optimizer
from megatron_ddrp.engine.checkpoint import check_optimizer
from megatron_ddrp.engine.layout import GradientClipping, Setup
from megatron_ddrp.engine.optimizers import MOMENTUM, AdamW, Muon, hidden_matrices
from megatron_ddrp.errors import UserError
from megatron_ddrp.memory import by_zero_stage
from megatron_ddrp.model import build_model, on_meta_device
from megatron_ddrp.parallel.process_group import Ranks
from tests.reference import muon as twin
from tests.unit.model.tiny import tiny_config

RANKS = Ranks(0, 1, torch.device("cpu"))
SETTINGS = OptimizerConfig(optimizer="muon", lr=0.1, weight_decay=0.3)
LAYER = {f"{block}.weight" for block in ("attention.query", "attention.key", "attention.value", "attention.output")} | {
    "feed_forward.input.weight",
    "feed_forward.output.weight",
}


def make(
    settings: OptimizerConfig = SETTINGS, bf16: bool = False, ranks: Ranks = RANKS, **changes: Any
) -> tuple[torch.nn.Module, Muon]:
    torch.manual_seed(0)
    config = tiny_config(**changes)
    model = build_model(config)
    parallel, training = ParallelConfig(zero_stage=0), TrainingConfig(bf16=bf16)
    chosen = Config(model=config, training=training, optimizer=settings, parallel=parallel)
    return model, cast(Muon, build_optimizer(model, chosen, ranks))


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
    before, gradients = weights_of(model)[name], []
    for seed in (1, 2):
        gradients.append(give_gradients(model, seed)[name].tolist())
        optimizer.step()
    after = weights_of(model)[name]
    assert off(after, before, twin.steps(before.tolist(), gradients, 0.1, 0.3)) < 1e-5
    for changed in (
        twin.steps(before.tolist(), gradients, 0.1, 0.0),
        twin.steps(before.tolist(), gradients, 0.1, 0.3, nesterov=False),
        twin.steps(before.tolist(), gradients[1:], 0.1, 0.3),
        twin.steps(before.tolist(), gradients, 0.09, 0.3),
    ):
        assert off(after, before, changed) > 0.04


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
        give_gradients(model, 1)
        optimizer.step()
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
        give_gradients(model, 1)
        optimizer.step()
    assert done.total() == len(hidden_matrices(model)) and max(done.values()) - min(done.values()) <= 1


@pytest.mark.parametrize("size", [0.0, 1e-9, 1e-7, 1e-5])
def test_a_tiny_matrix_is_divided_as_in_the_released_code(size: float) -> None:
    """The norm gets 1e-7 more. A maximum of the two would double a matrix whose norm is 1e-7."""
    matrix = torch.randn(3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    matrix *= size / matrix.norm()
    wanted = torch.tensor(twin.newton_schulz(matrix.tolist()), dtype=torch.float64)
    torch.testing.assert_close(muon.orthonormal(matrix), wanted, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize(("bf16", "bound"), [(False, 0.03), (True, 0.004)])
def test_newton_schulz_is_that_of_torch(bf16: bool, bound: float) -> None:
    """torch's Muon multiplies in bf16, and so do we on a GPU and in runs with --bf16."""
    model, optimizer = make(bf16=bf16)
    before, gradients = weights_of(model), give_gradients(model, 1)
    optimizer.step()
    for name in hidden_matrices(model):
        theirs = before[name].clone().requires_grad_()
        theirs.grad = gradients[name]
        torch.optim.Muon([theirs], 0.1, 0.3, adjust_lr_fn="match_rms_adamw").step()
        assert off(model.get_parameter(name).detach(), before[name], theirs.tolist()) < bound


def test_everything_else_takes_the_step_of_adamw() -> None:
    model, optimizer = make()
    plain = make()[0]
    same_numbers = dataclasses.replace(SETTINGS, optimizer="adamw", optimizer_options=())
    adamw = build_optimizer(plain, Config(model=tiny_config(), optimizer=same_numbers), RANKS)
    for each, chosen in ((model, optimizer), (plain, adamw)):
        give_gradients(each, 1)
        chosen.step()
    ours, theirs = weights_of(model), weights_of(plain)
    matrices = hidden_matrices(model)
    assert {name for name in ours if not torch.equal(ours[name], theirs[name])} == set(matrices)
    kept = {name: set(optimizer.state[parameter]) for name, parameter in model.named_parameters()}
    assert all((kept[name] == {MOMENTUM}) == (name in matrices) for name in kept)
    assert all({"exp_avg", "exp_avg_sq"} < kept[name] for name in kept.keys() - matrices.keys())


@pytest.mark.parametrize(
    ("encoding", "projections"),
    [
        ("absolute", set()),
        ("ddrp", set()),
        ("t5", set()),
        ("rope", set()),
        ("alibi-asym", set()),
        ("deberta-v2", set()),
        ("tupe-r", {"embeddings.position.query.weight", "embeddings.position.key.weight"}),
        ("deberta", {f"layers.{i}.layer_position.{kind}.weight" for i in (0, 1) for kind in ("query", "key")}),
    ],
)
def test_it_takes_the_layers_and_the_projections_of_positions(encoding: str, projections: set[str]) -> None:
    config = tiny_config(position_encoding=encoding)
    found = hidden_matrices(build_model(config))
    assert found.keys() == {f"layers.{i}.{name}" for i in (0, 1) for name in LAYER} | projections


def test_the_two_first_maps_of_geglu_are_two_matrices() -> None:
    found = hidden_matrices(build_model(tiny_config(ffn="geglu")))
    assert {name for name in found if "layers.0.feed_forward" in name} == {
        f"layers.0.feed_forward.{name}.weight" for name in ("input", "gate", "output")
    }


def test_it_takes_the_layers_of_a_generator_too() -> None:
    config, objective = tiny_config(num_attention_heads=3), ObjectiveConfig(objective="electra")
    found = hidden_matrices(build_model(config, objective=objective))
    assert len(found) == 4 * len(LAYER) and sum("generator" in name for name in found) == 2 * len(LAYER)
    assert not any(word in name for name in found for word in ("head", "embeddings", "norm"))


def test_gradients_are_clipped_once_before_either_steps() -> None:
    model, optimizer = make()
    optimizer.register_step_pre_hook(GradientClipping(model, 1.0, RANKS))
    gradients = give_gradients(model, 1)
    optimizer.step()
    norm = torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum().sqrt()
    for name, parameter in model.named_parameters():
        state, key, share = optimizer.state[parameter], "exp_avg", 0.1
        if MOMENTUM in state:
            key, share = MOMENTUM, 0.05
        torch.testing.assert_close(state[key], share * gradients[name] / norm, rtol=1e-4, atol=1e-8)


def test_a_norm_that_is_not_finite_changes_nothing() -> None:
    model, optimizer = make()
    optimizer.register_step_pre_hook(GradientClipping(model, 1.0, RANKS))
    before = weights_of(model)
    give_gradients(model, 1)
    next(model.parameters()).grad[0] = torch.inf
    optimizer.step()
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(model).items())
    give_gradients(model, 1)
    optimizer.step()
    assert not any(torch.equal(weight, before[name]) for name, weight in weights_of(model).items())


def test_a_step_with_nan_is_as_if_it_had_not_been() -> None:
    (model, optimizer), (spared, other) = make(), make()
    for chosen, each in ((optimizer, model), (other, spared)):
        chosen.register_step_pre_hook(GradientClipping(each, 1.0, RANKS))
        give_gradients(each, 1)
        chosen.step()
    give_gradients(model, 2)
    for parameter in hidden_matrices(model).values():
        parameter.grad[0] = torch.nan
    optimizer.step()
    assert_equal_bits(model, optimizer, spared, other)
    for chosen, each in ((optimizer, model), (other, spared)):
        give_gradients(each, 3)
        chosen.step()
    assert_equal_bits(model, optimizer, spared, other)


def assert_equal_bits(model: torch.nn.Module, optimizer: Muon, other_model: torch.nn.Module, other: Muon) -> None:
    """Weights, momenta, AdamW's moments and its number of steps are equal."""
    for parameter, same in zip(model.parameters(), other_model.parameters(), strict=True):
        assert torch.equal(parameter, same)
        state, expected = optimizer.state[parameter], other.state[same]
        assert state.keys() == expected.keys() and all(torch.equal(state[key], expected[key]) for key in state)


def test_the_first_lines_name_what_it_takes() -> None:
    config = Config(model=tiny_config(position_encoding="tupe-a"))
    model = build_model(config.model)
    assert AdamW.remarks(model) == ()
    [line] = Muon.remarks(model)
    assert line.startswith("optimizer: muon for 14 matrices with 1,920 parameters (")
    assert "layers.attention.query 2" in line and "position.key 1" in line
    assert line.endswith(f"adamw for the other {len(list(model.parameters())) - 14} tensors")


def test_its_memory_is_one_moment_of_each_matrix() -> None:
    config = Config(model=tiny_config()).replace(parallel={"zero_stage": 0})
    model = on_meta_device(config.model, config.objective)
    setup = Setup.planned(config, 1, "cuda")
    adamw = by_zero_stage(model, setup)
    muon = by_zero_stage(model, setup.replace(optimizer={"optimizer": "muon"}))
    matrices = sum(model.get_parameter(name).numel() for name in hidden_matrices(model))
    assert list(adamw) == [0, 1, 2, 3] and list(muon) == [0]
    assert adamw[0][0].optimizer - muon[0][0].optimizer == 4 * matrices


def test_it_is_refused_where_it_cannot_work() -> None:
    with pytest.raises(UserError, match="--optimizer muon with --zero-stage 1.*use --zero-stage 0") as refused:
        Config().replace(optimizer={"optimizer": "muon"})
    assert refused.value.exit_code == 2 and "\n" not in str(refused.value)


def test_state_of_the_other_optimizer_is_refused() -> None:
    stored = Config().to_dict()
    del stored["optimizer"]["optimizer"]  # as an older version stored it
    check_optimizer(Path("run"), Config.from_dict(stored).optimizer, Config().optimizer)
    muon = Config().replace(optimizer={"optimizer": "muon"}, parallel={"zero_stage": 0})
    with pytest.raises(UserError, match="its optimizer state comes from --optimizer adamw, this run has muon"):
        check_optimizer(Path("run"), Config.from_dict(stored).optimizer, muon.optimizer)
