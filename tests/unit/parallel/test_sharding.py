"""Cutting parameters for tensor parallelism: the parts are disjoint, equal, complete, and go by attention heads."""

import pytest
import torch

from megatron_ddrp.config import ENCODINGS
from megatron_ddrp.model import build_model
from megatron_ddrp.model.encoder import SelfAttention
from megatron_ddrp.parallel.pipeline import local_parameters, name_parameters, own_part, split_dimension
from megatron_ddrp.parallel.process_group import Ranks
from megatron_ddrp.parallel.tensor_parallel import PARALLEL, SelfAttentionOfRanks, own_randomness, specialise
from tests.unit.model.tiny import tiny_config

SIZES = {"hidden_size": 16, "num_attention_heads": 4, "ffn_hidden_size": 24}


def rank_of(tensor_rank: int, tensor_size: int) -> Ranks:
    return Ranks(tensor_rank, tensor_size, torch.device("cpu"), tensor_rank=tensor_rank, tensor_size=tensor_size)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("relative_table", ["shared", "per-layer"])
def test_parts_make_up_the_whole(encoding: str, relative_table: str) -> None:
    config = tiny_config(position_encoding=encoding, relative_table=relative_table, **SIZES)
    for name, whole in build_model(config).named_parameters():
        parts = [own_part(name, whole, config.position_encoding, rank_of(rank, 4)) for rank in range(4)]
        dimension = split_dimension(name, config.position_encoding)
        if dimension is None:
            assert all(part is whole for part in parts), name
        else:
            assert len({part.shape for part in parts}) == 1, name
            assert torch.equal(torch.cat(parts, dimension), whole), name


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_matrix_of_a_layer_is_cut_and_what_all_heads_share_is_not(encoding: str) -> None:
    config = tiny_config(position_encoding=encoding, **SIZES)
    whole = {
        name
        for name, _ in build_model(config).named_parameters()
        if split_dimension(name, config.position_encoding) is None
    }
    assert not [n for n in whole if n.startswith("layers.") and n.endswith("weight") and "norm" not in n]
    assert "embeddings.token.weight" not in whole
    assert {"layers.0.attention.output.bias", "layers.1.feed_forward.output.bias", "head.dense.weight"} <= whole
    tables = {
        "bert-r": {"embeddings.position.relative"},
        "ddrp": {"embeddings.position.direction", "embeddings.position.distance"},
        "deberta": {"embeddings.position.relative"},
        "deberta-v2": {f"embeddings.position.{name}" for name in ("relative", "norm.weight", "norm.bias")},
        "tupe-a": {"embeddings.position.table"},
        "tupe-r": {"embeddings.position.table"},
    }
    assert tables.get(encoding, set()) <= whole
    assert ("embeddings.position.relative" in whole) == (encoding in ("bert-r", "deberta", "deberta-v2"))


def test_a_rank_alone_holds_everything() -> None:
    weight = torch.ones(4, 4)
    assert own_part("layers.0.attention.query.weight", weight, tiny_config().position_encoding, rank_of(0, 1)) is weight


def test_names_of_the_whole_model_survive_cutting_it_into_stages() -> None:
    model = build_model(tiny_config(position_encoding="ddrp"))
    name_parameters(model)
    stage = torch.nn.ModuleList(model.stages()[2:])
    names = local_parameters(stage)
    assert "layers.1.attention.query.weight" in names and "layers.0.attention.query.weight" not in names
    assert names["embeddings.token.weight"] is model.embeddings.token.weight, "the head's tied matrix"
    assert local_parameters(build_model(tiny_config())).keys() == dict(model.named_parameters()).keys()


def test_draws_inside_differ_by_rank_and_those_outside_do_not() -> None:
    def draws(rank: int) -> tuple[float, float, float]:
        torch.manual_seed(3)
        before = float(torch.rand(()))
        with own_randomness(rank_of(rank, 2)):
            inside = float(torch.rand(()))
        return before, inside, float(torch.rand(()))

    (before, inside, after), (other_before, other_inside, other_after) = draws(0), draws(1)
    assert (before, after) == (other_before, other_after)
    assert inside != other_inside and inside != after
    assert draws(1) == (other_before, other_inside, other_after), "recomputing a layer draws the same again"


def test_a_models_own_subclass_meets_the_other_ranks_too() -> None:
    class Mine(SelfAttention):
        factor = 3

    model = build_model(tiny_config())
    model.layers[0].attention.__class__ = Mine
    specialise(model, PARALLEL, ranks="ranks")
    first, second = (layer.attention for layer in model.layers)
    assert isinstance(first, SelfAttentionOfRanks) and isinstance(first, Mine) and first.factor == 3
    assert type(second) is SelfAttentionOfRanks and second.ranks == "ranks"
