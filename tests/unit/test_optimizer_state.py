"""The numbers of the optimizer; a DeepSpeed that has renamed what checkpoints need is refused before training."""

from types import SimpleNamespace

import pytest
import torch

from megatron_ddrp.config import Config
from megatron_ddrp.engine.build import build_optimizer
from megatron_ddrp.engine.optimizer_state import USED_NAMES, check_deepspeed
from megatron_ddrp.errors import UserError
from megatron_ddrp.parallel.process_group import Ranks


def engine(stage, names):
    optimizer = SimpleNamespace(**dict.fromkeys(names))
    return SimpleNamespace(zero_optimization_stage=lambda: stage, optimizer=optimizer)


@pytest.mark.parametrize(
    ("stage", "name"), [(stage, name) for stage, names in USED_NAMES.items() for name in names], ids=str
)
def test_one_missing_name_is_enough(stage, name):
    check_deepspeed(engine(stage, USED_NAMES[stage]))
    with pytest.raises(UserError, match=rf"^DeepSpeed \S+: SimpleNamespace has no {name}, .*requirements-lock"):
        check_deepspeed(engine(stage, set(USED_NAMES[stage]) - {name}))


def test_adamw_has_the_numbers_of_the_flags():
    numbers = {"lr": 0.3, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_eps": 1e-5, "weight_decay": 0.2}
    model, ranks = torch.nn.ModuleDict({"map": torch.nn.Linear(2, 3)}), Ranks(0, 1, torch.device("cpu"))
    groups = build_optimizer(model, Config().replace(optimizer=numbers), ranks).param_groups
    assert [(group["lr"], group["betas"], group["eps"]) for group in groups] == [(0.3, (0.8, 0.95), 1e-5)] * 2
    assert [(len(group["params"]), group["weight_decay"]) for group in groups] == [(1, 0.2), (1, 0.0)]
