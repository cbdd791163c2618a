"""What parts of a pipeline send each other: every bit, every shape, and gradients the same way back."""

from typing import Any, NamedTuple

import pytest
import torch

from megatron_ddrp.errors import UserError
from megatron_ddrp.model import build_model
from megatron_ddrp.model.stages import Inputs, NoteInputs, State
from megatron_ddrp.parallel.pipeline import HEADER, Courier, PipelinePart, split_stages
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


def test_what_enters_the_first_part_travels_the_same_way() -> None:
    batch = tiny_batch()
    inputs = Inputs.of(
        batch, some_draws(batch), NoteInputs(torch.tensor([3]), torch.randn(1, 5), torch.tensor([[0, 4]]))
    )
    courier = Courier()
    floats, rest = courier.send(inputs)
    assert floats.shape == (0,), "a note receives no gradient"
    assert_same(courier.receive(floats, rest), inputs)


def test_more_tensors_than_a_header_describes_are_refused() -> None:
    batch = tiny_batch()
    many = tuple(torch.zeros(1) for _ in range(HEADER))
    inputs = Inputs.of(batch, some_draws(batch))
    state = State(inputs, torch.randn(3, 7, 5), many, inputs.draws.heads, torch.ones(2, 2), torch.zeros(()), None)
    with pytest.raises(UserError, match=f"header of [0-9]+ numbers, at most {HEADER} are allowed: .* fewer tensors"):
        Courier().send(state)


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
