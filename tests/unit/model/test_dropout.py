"""Dropout: in each attention backend the right share, rescaled, one mask for both passes; on the tables of DeBERTa;
none in evaluation."""

import pytest
import torch
from torch import nn

from megatron_ddrp.model.attention import cpu as blocks
from megatron_ddrp.model.attention.backends import BACKENDS
from megatron_ddrp.model.attention.cpu import _draw_kept
from megatron_ddrp.model.attention.logits import Attending
from megatron_ddrp.model.positions import PositionTerms
from tests.unit.model.tiny import some_draws, tiny_batch, tiny_model

NONE = torch.empty(0, dtype=torch.long)


@pytest.mark.parametrize("rate", [0.9999, 0.99999, 0.9999999])
def test_a_rate_just_below_one_keeps_almost_nothing(rate):
    assert _draw_kept(torch.empty(100_000), rate).float().mean() < 5e-4


@pytest.mark.parametrize("rate", [0.1, 0.5])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_share_is_dropped_and_the_rest_rescaled(backend, rate):
    torch.manual_seed(0)
    batch, heads, n = 4, 4, 32
    zeros = torch.zeros(batch, heads, n, n)
    identity = torch.eye(n).expand(batch, heads, n, n)  # the context is then the probabilities, 1/n before dropout
    ids = torch.ones(batch, n, dtype=torch.long)
    context, _ = BACKENDS[backend](Attending(zeros, zeros, identity, PositionTerms(1.0), ids, NONE, rate))
    dropped = context == 0
    torch.testing.assert_close(context[~dropped], torch.full_like(context[~dropped], 1 / n / (1 - rate)))
    count = dropped.numel()
    assert abs(dropped.sum().item() - rate * count) < 5 * (count * rate * (1 - rate)) ** 0.5
    for left, right in ((dropped[0], dropped[1]), (dropped[:, 0], dropped[:, 1]), (dropped[..., 0], dropped[..., 1])):
        assert not torch.equal(left, right)  # rows, heads and keys draw their own


@pytest.mark.parametrize("heads", [[], [0, 1]], ids=str)
@pytest.mark.parametrize("backend, kept_length", [*((name, 512) for name in BACKENDS), ("blocked", 0)])
def test_the_gradient_is_that_of_the_mask_drawn_in_the_forward_pass(backend, kept_length, heads, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_ELEMENTS", 1)
    monkeypatch.setattr(blocks, "KEPT_LENGTH", kept_length)
    torch.manual_seed(0)
    ids = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    inputs = [torch.randn(2, 2, 4, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    table = torch.randn(1, 5, 3, dtype=torch.float64, requires_grad=True)

    def attend(query, key, value, table):
        torch.manual_seed(7)  # finite differences must meet the same mask
        terms = PositionTerms(0.5, query_table=table, lowest=-2, highest=2)
        context, cosine = BACKENDS[backend](Attending(query, key, value, terms, ids, torch.tensor(heads).long(), 0.4))
        context = context * (ids > 0)[:, None, :, None]
        return context if cosine is None else (context, cosine)

    assert torch.autograd.gradcheck(attend, (*inputs, table))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_cosine_of_logits_knows_no_dropout(backend):
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 3, 5, 4, dtype=torch.float64) for _ in range(3))
    ids, heads = torch.ones(2, 5, dtype=torch.long), torch.tensor([0, 2])
    without, with_dropout = (
        BACKENDS[backend](Attending(query, key, value, PositionTerms(0.5), ids, heads, rate))[1] for rate in (0.0, 0.6)
    )
    assert torch.equal(without, with_dropout)


@pytest.mark.parametrize("encoding", ["deberta", "deberta-v2"])
def test_dropout_acts_on_debertas_table_in_every_layer_and_in_training_alone(encoding):
    model = tiny_model(position_encoding=encoding, hidden_dropout=0.25, seq_length=64, relative_distance=32)
    shared = model.embeddings.position(torch.zeros(1, 64, dtype=torch.long))
    identity = nn.Identity()  # so that both projections of the table are the table

    def projected(layer):
        part = layer.layer_position
        part.key = part.query = identity  # version 1; version 2 is given the maps
        found = [x.transpose(0, 1).flatten(1) for x in part.of_layer(shared, identity, identity)[:2]]
        assert torch.equal(*found)
        return found[0]

    for layer in model.layers:
        dropped = projected(layer)
        torch.testing.assert_close(dropped, torch.where(dropped == 0, 0, shared[0] * 4 / 3))
        assert 0.15 < (dropped == 0).double().mean() < 0.35
        assert not torch.equal(projected(layer), dropped)
        layer.eval()
        assert torch.equal(projected(layer), shared[0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("which", ["hidden_dropout", "attention_dropout"])
def test_dropout_acts_in_training_and_not_in_evaluation(which, backend):
    batch = tiny_batch()
    draws = some_draws(batch)
    plain = tiny_model(attention_backend=backend)
    dropping = tiny_model(attention_backend=backend, **{which: 0.5})
    dropping.load_state_dict(plain.state_dict())
    with torch.no_grad():
        expected = plain(batch, draws).sums
        assert not torch.allclose(dropping(batch, draws).sums, dropping(batch, draws).sums)
        assert torch.equal(dropping.eval()(batch, draws).sums, expected)


def test_a_seed_repeats_the_masks():
    batch = tiny_batch()
    draws, model = some_draws(batch), tiny_model(hidden_dropout=0.3, attention_dropout=0.3)
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(model(batch, draws).sums.detach())
    assert torch.equal(results[0], results[1]) and not torch.allclose(results[0], results[2])
