"""The masked-LM head: predicted positions only, tied weights, a vocabulary's padding that is never predicted."""

import torch

from megatron_ddrp.data.batches.batch import IGNORED_LABEL
from megatron_ddrp.model import build_model
from megatron_ddrp.model.stages import Draws
from tests.unit.model.tiny import some_draws, tiny_batch, tiny_config, tiny_model
from tests.unit.model.twins import twin_sums


def test_the_sum_equals_the_twin_and_counts_predicted_positions_alone(monkeypatch):
    model, batch = tiny_model(), tiny_batch()
    seen = []
    original = model.head.dense.forward
    monkeypatch.setattr(model.head.dense, "forward", lambda hidden: seen.append(hidden.shape) or original(hidden))
    got = model(batch, Draws.none(3, 2)).sums[0]
    torch.testing.assert_close(got, twin_sums(model, batch, Draws.none(3, 2))[0], rtol=1e-11, atol=0)
    assert seen == [(int((batch.labels != IGNORED_LABEL).sum()), 12)]


def test_input_and_output_embedding_share_storage():
    model = tiny_model()
    assert model.head.decoder.weight is model.embeddings.token.weight
    copy = build_model(tiny_config())
    copy.load_state_dict(model.state_dict())
    assert copy.head.decoder.weight is copy.embeddings.token.weight
    names = [name for name, parameter in model.named_parameters() if parameter is model.head.decoder.weight]
    assert names == ["embeddings.token.weight"]


def test_padding_of_the_vocabulary_is_never_predicted():
    model = tiny_model()
    assert model.head.decoder.out_features == 128
    with torch.no_grad():
        model.head.decoder.bias[11:] = 1e4  # the padding would win if it counted
    hidden = torch.randn(5, 12, dtype=torch.float64)
    logits = model.head.logits(hidden)
    assert logits[:, 11:].eq(float("-inf")).all() and logits[:, :11].isfinite().all()
    assert model.logits(hidden).shape == (5, 11)
    batch = tiny_batch()
    model(batch, Draws.none(3, 2)).sums[0].backward()
    assert model.head.decoder.bias.grad[11:].eq(0).all() and model.head.decoder.bias.grad[:11].ne(0).all()
    assert model.embeddings.token.weight.grad[11:].eq(0).all()


def test_a_vocabulary_without_padding_has_finite_logits():
    model = tiny_model(vocab_size=128)
    assert model.head.logits(torch.randn(5, 12, dtype=torch.float64)).isfinite().all()


def test_nothing_to_predict_is_a_zero_loss_with_zero_gradients():
    model = tiny_model()
    batch = tiny_batch(predicted=0)
    sums = model(batch, Draws.none(3, 2)).sums
    assert torch.equal(sums, torch.zeros(4, dtype=torch.float64))
    sums.sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or parameter.grad.eq(0).all(), name
    assert model.head.dense.weight.grad is not None  # it took part, so every rank reduces the same tensors


def test_a_batch_of_padding_alone_is_zero_and_finite():
    model = tiny_model()
    batch = tiny_batch(lengths=(0, 1), predicted=0)
    sums = model(batch, some_draws(batch)).sums
    assert torch.equal(sums, torch.zeros(4, dtype=torch.float64))
    sums.sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or parameter.grad.eq(0).all(), name
