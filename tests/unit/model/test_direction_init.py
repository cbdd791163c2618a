"""How DDRP's D starts (`--direction-init`), and that nothing pulls this gain towards 0."""

import pytest
import torch
from torch import nn

from megatron_ddrp.arguments import build_parser
from megatron_ddrp.config import Config, ModelConfig
from megatron_ddrp.engine.build import build_optimizer, decays
from megatron_ddrp.model import build_model
from megatron_ddrp.model.positions import LayerPositions
from megatron_ddrp.model.positions.tables import DIRECTION_INITS, SPREAD, Ddrp
from megatron_ddrp.parallel.process_group import Ranks

RANKS = Ranks(0, 1, torch.device("cpu"))


def encoding(start):
    torch.manual_seed(0)
    return Ddrp(ModelConfig(direction_init=start))


def test_the_flag_offers_exactly_the_starts_there_are():
    action = next(a for a in build_parser()._actions if a.dest == "direction_init")
    assert sorted(action.choices) == sorted(DIRECTION_INITS)


@pytest.mark.parametrize(
    "start, mean, deviation",
    [("ones", 1, 0.02), ("spread", 1, SPREAD), ("free", 0, 1), ("embedding", 0, 0.02)],
)
def test_rows_are_drawn_around_one_number(start, mean, deviation):
    direction = encoding(start).direction
    count = direction.numel()
    assert abs(direction.mean() - mean) < 5 * deviation / count**0.5
    assert abs(direction.std() - deviation) < 5 * deviation / (2 * count) ** 0.5


@pytest.mark.parametrize("start, lowest, highest", [("spread", 0.7, 0.9), ("ones", 0.99, 1.0)])
def test_left_and_right_start_apart_under_spread_and_alike_under_ones(start, lowest, highest):
    model = encoding(start)
    (table,) = model(torch.zeros(1, 1, dtype=torch.int64))
    reach = len(model.distance) - 1
    steps = torch.arange(1, reach + 1)
    cosine = torch.cosine_similarity(table[0, reach + steps], table[0, reach - steps], dim=-1).mean()
    assert lowest < cosine < highest


@pytest.mark.parametrize("table", ["shared", "per-layer"])
def test_weight_decay_leaves_d_alone_and_shrinks_the_distances(table):
    sizes = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 9, "seq_length": 5}
    model = build_model(ModelConfig(**sizes, relative_table=table))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = build_optimizer(model, Config().replace(optimizer={"weight_decay": 0.5, "lr": 0.1}), RANKS)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        is_spared = name.endswith((".bias", ".direction")) or "norm." in name
        factor = 1.0 if is_spared else 0.95  # 1 - lr * decay
        torch.testing.assert_close(parameter.detach(), factor * before[name], rtol=1e-6, atol=0)
    kept = [name for name in before if name.endswith(".direction")]
    assert len(kept) == (1 if table == "shared" else 2) and not any(decays(name, "ddrp") for name in kept)
    assert all(decays(name, "ddrp") for name in before if name.endswith(".distance"))


class Part(LayerPositions):
    gains = frozenset({"factor"})

    def __init__(self, config):
        super().__init__(config)
        self.factor, self.other = (nn.Parameter(torch.ones(3)) for _ in range(2))


class Plugged(nn.Module):
    def __init__(self):
        super().__init__()
        self.scaling, self.squares = nn.LayerNorm(3), nn.RMSNorm(3)
        self.map, self.part = nn.Linear(3, 3), Part(ModelConfig())


def test_weight_decay_spares_norms_of_any_name_and_the_gains_of_a_layer_part():
    model = Plugged()
    decayed, spared = (group["params"] for group in build_optimizer(model, Config(), RANKS).param_groups)
    expected = ["scaling.weight", "scaling.bias", "squares.weight", "map.bias", "part.factor"]
    assert {id(x) for x in spared} == {id(model.get_parameter(name)) for name in expected}
    assert {id(x) for x in decayed} == {id(model.map.weight), id(model.part.other)}
