"""What parts of a pipeline send each other: every bit, every shape, and gradients the same way back."""

import pytest
import torch

from megatron_ddrp.model import build_model
from megatron_ddrp.model.bert import first_tensors
from megatron_ddrp.parallel.pipeline import HEADER, PipelinePart, receive, send, split_stages
from tests.unit.model.tiny import some_draws, tiny_batch, tiny_config, tiny_model


@pytest.mark.parametrize("hidden", [torch.float32, torch.bfloat16])
def test_tensors_arrive_as_they_were(hidden: torch.dtype) -> None:
    torch.manual_seed(0)
    floats = [torch.randn(2, 3, 5).to(hidden), torch.randn(3), torch.randn(1, 2, 3, 3).to(hidden)]
    sent = [x.requires_grad_() for x in floats]
    bits = torch.randn(4, 2).view(torch.int32)
    integers = [torch.randint(100, (2, 3)), torch.empty(2, 0, dtype=torch.long), bits]
    flat, described = send((*sent, *integers))
    assert flat.dim() == described.dim() == 1 and len(described) == HEADER + 6 + 8
    arrived = receive(flat, described)
    for got, expected in zip(arrived, (*sent, *integers), strict=True):
        assert got.dtype == expected.dtype and torch.equal(got, expected)
    weights = [torch.randn_like(x) for x in floats]
    arrived[0].mul(weights[0]).sum().add(arrived[1].mul(weights[1]).sum()).backward()
    assert torch.equal(sent[0].grad, weights[0]) and torch.equal(sent[1].grad, weights[1])
    assert torch.equal(sent[2].grad, torch.zeros_like(sent[2])), "unread tensors have a gradient too"


@pytest.mark.parametrize("encoding", ["absolute", "tupe-r", "deberta", "ddrp"])
@pytest.mark.parametrize("num_parts", [2, 3])
def test_parts_in_a_row_are_the_model(encoding: str, num_parts: int) -> None:
    model = tiny_model(position_encoding=encoding, num_layers=3)
    batch = tiny_batch()
    draws = some_draws(batch, heads=((0, 2), (1, 2), (0, 1)))
    parts = split_stages(model.stages(), num_parts)
    tensors = first_tensors(batch, draws)
    for number, stages in enumerate(parts):
        part = PipelinePart(stages, number == 0, number == num_parts - 1, recompute=False)
        tensors = part(tensors)
    torch.testing.assert_close(tensors, model(batch, draws))


@pytest.mark.parametrize("num_layers, num_parts", [(2, 2), (3, 2), (4, 3), (5, 3), (12, 4), (13, 4), (5, 5)])
def test_layers_are_shared_out_evenly_and_in_order(num_layers: int, num_parts: int) -> None:
    model = build_model(tiny_config(num_layers=num_layers, position_encoding="absolute"))
    parts = split_stages(model.stages(), num_parts)
    assert [stage for part in parts for stage in part] == model.stages()
    layers = [sum(stage in list(model.layers) for stage in part) for part in parts]
    assert min(layers) >= 1 and max(layers) - min(layers) <= 1
    assert parts[0][0] is model.embeddings and parts[-1][-1] is model.head


def test_each_micro_batch_is_seeded_by_its_number() -> None:
    seen: list[int] = []
    part = PipelinePart([torch.nn.Identity()], first=True, last=True, recompute=False)
    for _ in range(2):
        part.begin_step(seen.append)
        part(())
        part(())
    part.eval()(())
    assert seen == [0, 1, 0, 1]
