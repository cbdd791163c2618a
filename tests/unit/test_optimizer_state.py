"""A DeepSpeed that has renamed what checkpoints need is refused before training, not at the first save."""

from types import SimpleNamespace

import pytest

from megatron_ddrp.engine.optimizer_state import USED_NAMES, check_deepspeed
from megatron_ddrp.errors import UserError


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
