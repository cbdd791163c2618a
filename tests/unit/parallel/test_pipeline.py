"""Parts of a pipeline, maps that share an input, and parameters cut for tensor parallelism.

Parts send each other every bit, every shape, and gradients the same way back. Maps that share an input have the
gradients of plain linear maps, one exchange for all, behind the weights' products. Parts of parameters are disjoint,
equal, complete, and go by attention heads.
"""

from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ddrp.config import ENCODINGS
from megatron_ddrp.model import build_model
from megatron_ddrp.model.encoder import SelfAttention
from megatron_ddrp.model.stages import Inputs, NoteInputs, State
from megatron_ddrp.parallel.pipeline import (
    HEADER,
    Courier,
    Entrance,
    PipelinePart,
    column_map,
    column_maps,
    local_parameters,
    name_parameters,
    own_part,
    split_dimension,
    split_stages,
)
from megatron_ddrp.parallel.process_group import Ranks
from megatron_ddrp.parallel.tensor_parallel import PARALLEL, SelfAttentionOfRanks, own_randomness, specialise
from tests.refusals import refused
from tests.unit.model.tiny import some_draws, tiny_batch, tiny_config, tiny_model


class Left(NamedTuple):
    """What an objective leaves for its last stage."""

    sums: torch.Tensor
    count: torch.Tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_arrive_as_they_were(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    batch = tiny_batch()
    notes = NoteInputs(torch.tensor([3, 4]), torch.randn(2, 5), torch.tensor([[0, 4]]))
    inputs = Inputs.of(batch, some_draws(batch)._replace(heads=torch.empty(2, 0, dtype=torch.long)), notes)
    floating = (torch.randn(3, 7, 5).to(dtype), torch.randn(1, 9, 4), torch.randn(()), torch.randn(2))
    hidden, table, cosine, sums = (x.requires_grad_() for x in floating)
    counted = torch.ones(len(batch.input_ids), 2)
    state = State(inputs, hidden, (table,), inputs.draws.heads, counted, cosine, Left(sums, torch.tensor(7)))
    courier = Courier((Left,))
    floats, rest = courier.send(state)
    assert floats.dim() == rest.dim() == 1 and floats.dtype == dtype and rest.dtype == torch.uint8
    arrived = courier.receive(floats, rest)
    assert_same(arrived, state)
    weights = torch.randn_like(hidden)
    ((arrived.hidden * weights).sum() + 2 * arrived.head_cosine + 3 * arrived.own.sums.sum()).backward()
    assert torch.equal(hidden.grad, weights) and cosine.grad == 2 and torch.equal(sums.grad, torch.full((2,), 3.0))
    assert torch.equal(table.grad, torch.zeros_like(table)), "a tensor that is not read has a gradient too"


def assert_same(got: Any, expected: Any) -> None:
    """Both hold the same named tuples, tensors, numbers and None."""
    assert type(got) is type(expected)
    if isinstance(got, torch.Tensor):
        assert got.dtype == expected.dtype and torch.equal(got, expected)
    elif isinstance(got, tuple):
        for one, other in zip(got, expected, strict=True):
            assert_same(one, other)
    else:
        assert got == expected


def test_what_enters_the_first_part_travels_the_same_way_and_a_header_has_an_end() -> None:
    batch = tiny_batch()
    inputs = Inputs.of(
        batch, some_draws(batch), NoteInputs(torch.tensor([3]), torch.randn(1, 5), torch.tensor([[0, 4]]))
    )
    courier = Courier()
    floats, rest = courier.send(inputs)
    assert floats.shape == (0,), "a note receives no gradient"
    assert_same(courier.receive(floats, rest), inputs)
    batch = tiny_batch()
    many = tuple(torch.zeros(1) for _ in range(HEADER))
    inputs = Inputs.of(batch, some_draws(batch))
    state = State(inputs, torch.randn(3, 7, 5), many, inputs.draws.heads, torch.ones(2, 2), torch.zeros(()), None)
    refused(f"header of [0-9]+ numbers, at most {HEADER} are allowed: .* fewer tensors", Courier().send, state)


@pytest.mark.parametrize("encoding", ["absolute", "tupe-r", "deberta", "ddrp"])
@pytest.mark.parametrize("num_parts", [2, 3])
def test_parts_in_a_row_are_the_model(encoding: str, num_parts: int) -> None:
    model = tiny_model(position_encoding=encoding, num_layers=3)
    batch = tiny_batch()
    draws = some_draws(batch, heads=((0, 2), (1, 2), (0, 1)))
    parts = split_stages(model.stages(), num_parts)
    courier = Courier()
    sent = courier.send(Inputs.of(batch, draws))
    for number, stages in enumerate(parts):
        sent = PipelinePart(stages, number == num_parts - 1, recompute=False, courier=courier)(sent)
    torch.testing.assert_close(sent.sums, model(batch, draws).sums)


@pytest.mark.parametrize(
    "expected", [[1, 1], [2, 1], [1, 2, 1], [2, 2, 1], [3, 3, 3, 3], [3, 4, 3, 3], [3, 4, 4, 3], [4, 4, 4, 3], [1] * 5]
)
def test_layers_are_shared_out_evenly_and_in_order_and_inner_parts_take_one_more(expected: list[int]) -> None:
    model = build_model(tiny_config(num_layers=sum(expected), position_encoding="absolute"))
    parts = split_stages(model.stages(), len(expected))
    assert [stage for part in parts for stage in part] == model.stages()
    assert [sum(stage in list(model.layers) for stage in part) for part in parts] == expected
    assert parts[0][0] is model.embeddings and parts[-1][-1] is model.head


def test_each_micro_batch_is_seeded_by_its_number() -> None:
    seen: list[int] = []
    batch = tiny_batch()
    courier = Courier()
    part = PipelinePart([torch.nn.Identity()], last=True, recompute=False, courier=courier)

    def take_one() -> None:
        part(courier.send(Inputs.of(batch, some_draws(batch))))

    for _ in range(2):
        part.begin_step(seen.append)
        take_one()
        take_one()
    part.eval()
    take_one()
    assert seen == [0, 1, 0, 1]


PRODUCTS = ("mm", "addmm_", "addmm")


class Order(TorchDispatchMode):
    """Notes matrix products, and what is noted by hand."""

    def __init__(self):
        super().__init__()
        self.events = []

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        name = function.overloadpacket.__name__
        if name in PRODUCTS:
            self.events.append(name)
        return function(*arguments, **(named or {}))


def noting(events):
    """An entrance of one rank, whose exchange doubles the gradient at the end."""

    def back(gradient):
        events.append("start")

        def wait():
            events.append("wait")
            return gradient * 2

        return wait

    return Entrance(lambda x: x.view_as(x), back)


def some_maps(count):
    torch.manual_seed(0)
    return [nn.Linear(5, out, bias=out != 4).double() for out in range(3, 3 + count)]


def test_gradients_are_those_of_linear_maps_and_the_inputs_passes_the_exchange():
    maps, x = some_maps(3), torch.randn(2, 4, 5, dtype=torch.double, requires_grad=True)
    parameters = [parameter for each in maps for parameter in each.parameters()]
    targets = [torch.randn(2, 4, each.out_features, dtype=torch.double) for each in maps]

    def gradients(outputs):
        loss = sum((output * target).sum() for output, target in zip(outputs, targets, strict=True))
        return torch.autograd.grad(loss, [x, *parameters])

    of_input, *expected = gradients([each(x) for each in maps])
    exchanged, *own = gradients(column_maps(x, noting([]), maps))
    torch.testing.assert_close(exchanged, 2 * of_input)
    torch.testing.assert_close(own, expected)


def test_one_exchange_runs_while_all_weight_gradients_are_computed():
    maps, x = some_maps(3), torch.randn(4, 5, dtype=torch.double, requires_grad=True)
    order = Order()
    loss = sum(output.sum() for output in column_maps(x, noting(order.events), maps))
    with order:
        loss.backward()
    assert order.events == ["mm", "addmm_", "addmm_", "start", "mm", "mm", "mm", "wait"]


def test_maps_without_a_reader_or_a_bias_and_those_of_zero_3():
    maps, x = some_maps(2), torch.randn(4, 5, dtype=torch.double, requires_grad=True)
    column_maps(x, noting([]), maps)[1].sum().backward()
    torch.testing.assert_close(x.grad, 2 * maps[1].weight.sum(0).expand(4, 5).detach())
    assert not maps[0].weight.grad.any()
    each, x = some_maps(1)[0], torch.randn(4, 5, dtype=torch.double, requires_grad=True)
    torch.testing.assert_close(column_map(x, noting([]), each.weight, None), x @ each.weight.T)
    maps, x = some_maps(2), torch.randn(4, 5, dtype=torch.double, requires_grad=True)
    called = []
    for each in maps:
        each.weight.ds_id = 0
        each.register_forward_hook(lambda *_: called.append(1))
    sum(output.sum() for output in column_maps(x, noting([]), maps)).backward()
    assert len(called) == 2
    torch.testing.assert_close(x.grad, 2 * sum(each.weight.sum(0) for each in maps).expand(4, 5).detach())


SIZES = {"hidden_size": 16, "num_attention_heads": 4, "ffn_hidden_size": 24}


def rank_of(tensor_rank: int, tensor_size: int) -> Ranks:
    return Ranks(tensor_rank, tensor_size, torch.device("cpu"), tensor_rank=tensor_rank, tensor_size=tensor_size)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("relative_table", ["shared", "per-layer"])
def test_parts_make_up_the_whole(encoding: str, relative_table: str) -> None:
    config = tiny_config(position_encoding=encoding, relative_table=relative_table, **SIZES)
    for name, whole in build_model(config).named_parameters():
        parts = [own_part(name, whole, config.encoding, rank_of(rank, 4)) for rank in range(4)]
        dimension = split_dimension(name, config.encoding)
        if dimension is None:
            assert all(part is whole for part in parts), name
        else:
            assert len({part.shape for part in parts}) == 1, name
            assert torch.equal(torch.cat(parts, dimension), whole), name


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_matrix_of_a_layer_is_cut_and_what_all_heads_share_is_not(encoding: str) -> None:
    config = tiny_config(position_encoding=encoding, **SIZES)
    whole = {
        name for name, _ in build_model(config).named_parameters() if split_dimension(name, config.encoding) is None
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


def test_names_of_the_whole_model_survive_cutting_it_and_a_rank_alone_holds_everything() -> None:
    model = build_model(tiny_config(position_encoding="ddrp"))
    name_parameters(model)
    stage = torch.nn.ModuleList(model.stages()[2:])
    names = local_parameters(stage)
    assert "layers.1.attention.query.weight" in names and "layers.0.attention.query.weight" not in names
    assert names["embeddings.token.weight"] is model.embeddings.token.weight, "the head's tied matrix"
    assert local_parameters(build_model(tiny_config())).keys() == dict(model.named_parameters()).keys()
    weight = torch.ones(4, 4)
    assert own_part("layers.0.attention.query.weight", weight, tiny_config().encoding, rank_of(0, 1)) is weight


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
