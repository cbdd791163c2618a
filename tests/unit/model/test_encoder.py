"""Whole models: packed rows, recomputed layers and copies of the weights change nothing; DeBERTa's mask decoder and the
causal phase against the loop twin, in sums and every parameter's gradient, in every encoding and backend.
"""

from unittest import mock

import pytest
import torch

from megatron_ddrp.arguments import parse_arguments
from megatron_ddrp.config import ENCODINGS, ObjectiveConfig
from megatron_ddrp.data.batches.batch import IGNORED_LABEL
from megatron_ddrp.model import build_model, encoder, on_meta_device
from megatron_ddrp.model.attention.backends import BACKENDS
from megatron_ddrp.model.stages import Draws, layout_of
from megatron_ddrp.objectives.contract import make_objective
from tests.refusals import refused
from tests.unit.model.tiny import (
    assert_equals_twin,
    assert_same_gradients,
    encode,
    gradients,
    own_draws,
    packed_batch,
    some_draws,
    tiny_batch,
    tiny_config,
    tiny_model,
    twin_sums,
)

NOTHING = Draws.none(3, 2)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("rows", [[[0, 2], [4, 3], [1]], [[0, 3], [1], [2], [4]]], ids=["many", "one-token"])
def test_packing_changes_neither_sums_nor_gradients(encoding, backend, rows):
    """Every document keeps its own [CLS], its own places and its own share of TCD and HCD."""
    model = tiny_model(position_encoding=encoding, attention_backend=backend)
    batch = tiny_batch(lengths=(4, 2, 3, 1, 5), seq=7)
    packed = packed_batch(batch, rows)
    states = (encode(model, each)[each.document_ids > 0].sum(0) for each in (batch, packed))
    torch.testing.assert_close(*states, rtol=1e-11, atol=1e-11)
    expected, sums = (model(each, some_draws(each)).sums for each in (batch, packed))
    torch.testing.assert_close(sums, expected, rtol=1e-11, atol=1e-11)
    assert_same_gradients(gradients(model, sums), gradients(model, expected), atol=1e-10)


RECOMPUTED = [(name, table, "mth") for name in ENCODINGS for table in ("shared", "per-layer")]
RECOMPUTED += [("ddrp", "shared", "electra"), ("ddrp", "shared", "head-disagreement")]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("encoding, relative_table, name", RECOMPUTED)
def test_activation_checkpointing_changes_nothing_and_recomputes(encoding, relative_table, name, dropout):
    """DeBERTa's decoder goes through the last layer twice more."""
    variant = {"position_encoding": encoding, "relative_table": relative_table}
    options = ("value=0.5", "attention=2") if name == "head-disagreement" else ()
    objective = ObjectiveConfig(objective=name, objective_options=options, tcd_weight=1.0, hcd_weight=0.01)
    batch, results = tiny_batch(), []
    for recomputes in (False, True):
        config, calls = tiny_config(**variant, hidden_dropout=dropout, attention_dropout=dropout), []
        model = build_model(config, recomputes, objective).double()
        model.load_state_dict(tiny_model(objective=objective, **variant).state_dict())
        model.layers[-1].feed_forward.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        torch.manual_seed(3)
        sums = model(batch, own_draws(model, batch)).sums
        results.append({"sums": sums, **gradients(model, sums, (1.0,) * 6)})  # of every term
        assert len(calls) == (1 + recomputes) * (3 if model.mask_decoder is not None else 1)
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_stages_compute_with_copies_of_the_weights(encoding, recomputes):
    """float64 weights and copies in fp32 give what a model in fp32 does, and gradients in float64."""
    model, rounded = (tiny_model(position_encoding=encoding) for _ in range(2))
    rounded.float()
    model.checkpoint_activations, model.compute_dtype = recomputes, torch.float32
    batch = tiny_batch()
    sums, expected = (each(batch, some_draws(batch)).sums for each in (model, rounded))
    torch.testing.assert_close(sums, expected, rtol=1e-5, atol=1e-5)
    got = gradients(model, sums)
    assert {gradient.dtype for gradient in got.values()} == {torch.float64}
    own = {name: gradient.double() for name, gradient in gradients(rounded, expected).items()}
    assert_same_gradients(got, own, rtol=1e-4, atol=1e-4)
    model.compute_dtype = None
    assert (model(batch, some_draws(batch)).sums - sums).abs().max() > 1e-8


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_one_token_count_for_nothing_and_terms_that_are_switched_off_are_zero(backend):
    """One token's heads are single numbers, whose cosines of 1 or -1 must not enter; row by row, lest they cancel."""
    model = tiny_model(attention_backend=backend)
    for seed in range(4):
        batch = tiny_batch(lengths=(1,), seed=seed, predicted=0)
        assert model(batch, some_draws(batch)).sums.eq(0).all()
    sums = model(tiny_batch(), NOTHING).sums
    assert sums[0] > 0 and sums[1] == 0 and sums[2] == 0
    torch.testing.assert_close(sums, twin_sums(model, tiny_batch(), NOTHING), rtol=1e-11, atol=1e-11)


def uneven_batch():
    """Rows with 3, 0 and 1 predicted places, not at their ends."""
    batch = tiny_batch(lengths=(6, 2, 3), seq=6, predicted=0)
    labels = batch.labels.clone()
    labels[0, [0, 2, 4]], labels[2, 1] = torch.tensor([5, 1, 9]), 7
    return batch._replace(labels=labels)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_any_encoding_can_be_given_the_decoder_and_it_is_on_for_deberta_unless_told_otherwise(encoding):
    model = tiny_model(position_encoding=encoding, deberta_emd=True, relative_table="per-layer")
    assert_equals_twin(model, packed_batch(uneven_batch(), [[1, 2], [0]]), NOTHING)
    for emd, expected in ((None, encoding == "deberta"), (True, True), (False, False)):
        model = on_meta_device(tiny_config(position_encoding=encoding, deberta_emd=emd))
        assert (model.mask_decoder is not None, len(model.stages())) == (expected, 3 if expected else 4)


def test_a_model_of_one_layer_decodes_from_the_embeddings_for_as_many_places_as_a_row_predicts(monkeypatch):
    watched = mock.Mock(wraps=encoder.attend_from)
    monkeypatch.setattr(encoder, "attend_from", watched)
    model, batch = tiny_model(position_encoding="deberta", num_layers=1), uneven_batch()
    draws = some_draws(batch, heads=((0, 2),))
    torch.testing.assert_close(model(batch, draws).sums, twin_sums(model, batch, draws), rtol=1e-10, atol=1e-10)
    asked = [call.args[0].shape for call in watched.call_args_list]
    assert asked == [(3, 3, 3, 4)] * 2  # two applications; rows, heads, the most that one row predicts, head size


def test_the_decoder_can_be_asked_for_and_has_places_for_the_trained_length():
    for emd, words in ((None, []), (True, ["--deberta-emd"]), (False, ["--no-deberta-emd"])):
        assert parse_arguments(words).config.model.deberta_emd is emd
    model, batch = build_model(tiny_config(position_encoding="deberta", seq_length=6)), tiny_batch()
    refused("rows of 7 tokens: this model has positions for --seq-length 6 only", model, batch, some_draws(batch))


@pytest.mark.parametrize("which", ["hidden_dropout", "attention_dropout"])
def test_the_decoders_dropout_acts_in_training_and_not_in_evaluation(which):
    model, batch = tiny_model(position_encoding="deberta", **{which: 0.5}).eval(), uneven_batch()
    last = model.layers[-1]
    last.decode = mock.Mock(wraps=last.decode)
    torch.testing.assert_close(model(batch, NOTHING).sums, twin_sums(model, batch, NOTHING), rtol=1e-11, atol=1e-11)
    for training in (False, True):
        last.train(training)
        decoded = (last.decode(*last.decode.call_args.args) for _ in range(2))
        assert torch.equal(*decoded) != training


OF_TWO = Draws.none(2, 2)
LOCAL = {"local_attention": 4, "global_every": 2}
"""The second of two layers attends to the two tokens before."""
MODELS = {name: {"position_encoding": name} for name in ENCODINGS}
MODELS |= {f"{name}, local": {"position_encoding": name, **LOCAL} for name in ("deberta", "rope", "alibi")}
MODELS["deberta-v2, decoder"] = {"position_encoding": "deberta-v2", "deberta_emd": True, "layernorm_position": "pre"}


def causal_batch():
    """Two documents in the first row and one with padding in the second; each token predicts the next."""
    batch = packed_batch(tiny_batch(lengths=(4, 3, 5)), [[0, 1], [2]])
    labels = torch.full_like(batch.labels, IGNORED_LABEL)
    for row, documents in enumerate(batch.document_ids.tolist()):
        for place, (own, following) in enumerate(zip(documents, documents[1:], strict=False)):
            if own == following != 0:
                labels[row, place] = batch.input_ids[row, place + 1]
    return batch._replace(labels=labels)


@pytest.mark.parametrize("name", MODELS)
def test_sums_and_gradients_of_the_causal_phase_equal_the_twins(name):
    """So no token reads one that follows, and entries of tables for following tokens do not learn."""
    assert_equals_twin(tiny_model(**MODELS[name]), causal_batch(), OF_TWO, causal=True)


@pytest.mark.parametrize("objective", ["mlm", "mth", "token-contrast", "head-disagreement"])
def test_every_objective_has_the_same_causal_phase(objective):
    config = ObjectiveConfig(objective=objective, objective_phases="clm:0.5")
    model, batch = tiny_model(objective=config), causal_batch()
    causal = make_objective(config).causal
    draws = causal.draw(batch.map(torch.Tensor.numpy), model.config, 1, 1)
    assert draws.token_mask.shape == (2, 1, 0) and draws.heads.shape == (2, 0) and draws.own is None
    sums = model(batch, draws, None, layout_of(batch, causal=True)).sums
    assert causal.sum_names == ("clm_loss", "clm_correct")
    torch.testing.assert_close(sums, twin_sums(model, batch, OF_TWO, causal=True)[[0, 3]], rtol=1e-10, atol=1e-10)
    assert not torch.isclose(sums[0], twin_sums(model, batch, OF_TWO)[0]), "the mask does nothing"
