"""DeBERTa's enhanced mask decoder: the twin's loss, predicted places alone, only where it belongs, absent when off."""

import pytest
import torch

from megatron_ddrp.arguments import parse_arguments
from megatron_ddrp.config import ENCODINGS, ModelConfig
from megatron_ddrp.data.batches.batch import IGNORED_LABEL
from megatron_ddrp.errors import UserError
from megatron_ddrp.model import build_model, count_parameters, encoder, on_meta_device
from megatron_ddrp.model.stages import Draws
from tests.unit.model.tiny import (
    encode,
    gradients,
    packed_batch,
    some_draws,
    tiny_batch,
    tiny_config,
    tiny_model,
)
from tests.unit.model.twins import twin_decode, twin_encode, twin_sums

NOTHING = Draws.none(3, 2)


def uneven_batch():
    """Rows with 3, 0 and 1 predicted places, not at their ends."""
    batch = tiny_batch(lengths=(6, 2, 3), seq=6, predicted=0)
    labels = batch.labels.clone()
    labels[0, [0, 2, 4]], labels[2, 1] = torch.tensor([5, 1, 9]), 7
    return batch._replace(labels=labels)


@pytest.fixture
def asked(monkeypatch):
    """Shapes of the queries of every attention from chosen places."""
    shapes = []
    original = encoder.attend_from

    def watched(query, *rest):
        shapes.append(tuple(query.shape))
        return original(query, *rest)

    monkeypatch.setattr(encoder, "attend_from", watched)
    return shapes


@pytest.mark.parametrize("order", ["post", "pre"])
def test_sum_and_gradients_equal_the_twin_for_uneven_rows(order, asked):
    model, batch = tiny_model(position_encoding="deberta", layernorm_position=order), uneven_batch()
    sums, expected = model(batch, NOTHING).sums, twin_sums(model, batch, NOTHING)
    torch.testing.assert_close(sums, expected, rtol=1e-11, atol=1e-11)
    expected_gradients = gradients(model, expected)
    for name, gradient in gradients(model, sums).items():
        torch.testing.assert_close(
            gradient, expected_gradients[name], rtol=1e-9, atol=1e-9, msg=lambda m, n=name: n + m
        )
    assert asked == [(3, 3, 3, 4)] * 2  # two applications; rows, heads, the most that one row predicts, head size


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_any_encoding_can_be_given_the_decoder(encoding):
    model = tiny_model(position_encoding=encoding, deberta_emd=True)
    batch, draws = packed_batch(uneven_batch(), [[1, 2], [0]]), NOTHING
    torch.testing.assert_close(model(batch, draws).sums, twin_sums(model, batch, draws), rtol=1e-11, atol=1e-11)


def test_decoded_states_come_in_the_order_of_the_labels():
    model, batch = tiny_model(position_encoding="deberta"), uneven_batch()
    seen = []
    original = model.head.dense.forward
    model.head.dense.forward = lambda hidden: seen.append(hidden) or original(hidden)
    model(batch, NOTHING)
    expected = [twin_decode(model, batch, row, twin_encode(model, batch, row)[0]) for row in (0, 2)]
    torch.testing.assert_close(seen[0], torch.cat(expected), rtol=0, atol=1e-10)


def test_a_model_of_one_layer_decodes_from_the_embeddings():
    model, batch = tiny_model(position_encoding="deberta", num_layers=1), uneven_batch()
    draws = some_draws(batch, heads=((0, 2),))
    torch.testing.assert_close(model(batch, draws).sums, twin_sums(model, batch, draws), rtol=1e-10, atol=1e-10)


def test_labels_elsewhere_change_no_prediction():
    """Each predicted place is asked on its own: the loss is the sum of those of single labels."""
    model, batch = tiny_model(position_encoding="deberta"), uneven_batch()
    total = torch.zeros(4, dtype=torch.float64)
    for row, place in [(0, 0), (0, 2), (0, 4), (2, 1)]:
        labels = torch.full_like(batch.labels, IGNORED_LABEL)
        labels[row, place] = batch.labels[row, place]
        total = total + model(batch._replace(labels=labels), NOTHING).sums
    torch.testing.assert_close(model(batch, NOTHING).sums, total, rtol=1e-11, atol=0)


def test_nothing_to_predict_is_a_zero_loss_with_zero_gradients():
    model, batch = tiny_model(position_encoding="deberta"), tiny_batch(predicted=0)
    sums = model(batch, NOTHING).sums
    assert sums.eq(0).all()
    sums.sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.eq(0).all(), name


def test_each_absolute_row_moves_the_predictions_at_its_place_alone():
    model, batch = tiny_model(position_encoding="deberta"), uneven_batch()
    before = model(batch, NOTHING).sums[0].detach()
    absolute = model.mask_decoder.absolute.weight
    for place in range(7):
        with torch.no_grad():
            kept = absolute[place].clone()
            absolute[place] += torch.randn(12, dtype=torch.float64)
            moved = (model(batch, NOTHING).sums[0] - before).abs() > 1e-9
            absolute[place] = kept
        assert moved == (place in (0, 1, 2, 4)), place


def test_tcd_hcd_and_the_encoder_never_see_it():
    batch = tiny_batch()
    draws, with_decoder = some_draws(batch), tiny_model(position_encoding="deberta")
    without = build_model(tiny_config(position_encoding="deberta", deberta_emd=False)).double()
    state = with_decoder.state_dict()
    del state["mask_decoder.absolute.weight"]
    without.load_state_dict(state)
    assert torch.equal(encode(with_decoder, batch), encode(without, batch))
    decoded, plain = with_decoder(batch, draws).sums, without(batch, draws).sums
    assert torch.equal(decoded[1:3], plain[1:3]) and (decoded[0] - plain[0]).abs() > 1e-3
    torch.testing.assert_close(plain, twin_sums(without, batch, draws), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_it_is_on_for_deberta_unless_told_otherwise(encoding):
    def has_decoder(**changes):
        model = on_meta_device(tiny_config(position_encoding=encoding, **changes))
        assert len(model.stages()) == (3 if model.mask_decoder is not None else 4)
        return model.mask_decoder is not None

    assert has_decoder() == (encoding == "deberta")
    assert has_decoder(deberta_emd=True) and not has_decoder(deberta_emd=False)


def test_it_costs_one_embedding_a_place():
    with_decoder, without = (
        count_parameters(on_meta_device(ModelConfig(position_encoding="deberta", deberta_emd=emd)))
        for emd in (True, False)
    )
    assert [a - b for a, b in zip(with_decoder, without, strict=True)] == [512 * 768] * 2


@pytest.mark.parametrize("which", ["hidden_dropout", "attention_dropout"])
def test_its_dropout_acts_in_training_and_not_in_evaluation(which):
    """With the encoder in evaluation, only the decoder's own applications of the last layer can differ."""
    plain = tiny_model(position_encoding="deberta")
    model = build_model(tiny_config(position_encoding="deberta", **{which: 0.5})).double()
    model.load_state_dict(plain.state_dict())
    batch = uneven_batch()
    with torch.no_grad():
        expected = plain(batch, NOTHING).sums
        assert torch.equal(model.eval()(batch, NOTHING).sums, expected)
        model.embeddings.eval()
        model.layers[0].eval()
        decode = model.layers[-1].decode

        def train_while_decoding(*arguments):
            model.layers[-1].train()
            try:
                return decode(*arguments)
            finally:
                model.layers[-1].eval()

        model.layers[-1].decode = train_while_decoding
        losses = [model(batch, NOTHING).sums[0] for _ in range(2)]
    assert len({x.item() for x in (*losses, expected[0])}) == 3


def test_its_flag_leaves_the_choice_to_the_encoding_unless_given():
    given = [parse_arguments(words).config.model.deberta_emd for words in ([], ["--deberta-emd"], ["--no-deberta-emd"])]
    assert given == [None, True, False]


def test_the_decoder_refuses_rows_beyond_its_positions():
    model, batch = build_model(tiny_config(position_encoding="deberta", seq_length=6)), tiny_batch()
    with pytest.raises(UserError, match="rows of 7 tokens: this model has positions for --seq-length 6 only"):
        model(batch, some_draws(batch))
