"""Whole models against the loop twin, in sums, hidden states and every parameter's gradient; DeBERTa's mask decoder.

The causal phase: no token's output depends on what follows, in every encoding and backend; nothing else of an objective
acts.
"""

from unittest import mock

import pytest
import torch

from megatron_ddrp.arguments import parse_arguments
from megatron_ddrp.config import ENCODINGS, ModelConfig, ObjectiveConfig
from megatron_ddrp.data.batches.batch import IGNORED_LABEL
from megatron_ddrp.model import build_model, count_parameters, encoder, on_meta_device
from megatron_ddrp.model.attention.backends import BACKENDS
from megatron_ddrp.model.stages import Draws, layout_of
from megatron_ddrp.objectives.contract import CausalLM, make_objective
from tests.refusals import refused
from tests.unit.model.tiny import (
    assert_every_backend_equals_the_twin,
    assert_same_gradients,
    encode,
    gradients,
    packed_batch,
    some_draws,
    tiny_batch,
    tiny_config,
    tiny_model,
    twin_sums,
)

NOTHING = Draws.none(3, 2)


@pytest.mark.parametrize("order, relative_table", [("post", "shared"), ("pre", "per-layer")])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_model_equals_the_twin(encoding, order, relative_table):
    """DeBERTa with its decoder, as it comes; the longest row has offsets on both sides of r_s = 4."""
    model = tiny_model(position_encoding=encoding, layernorm_position=order, relative_table=relative_table)
    batch = tiny_batch(lengths=(6, 1, 3), seq=6)
    assert assert_every_backend_equals_the_twin(model, batch, some_draws(batch))[:3].abs().min() > 1e-3


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


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("relative_table", ["shared", "per-layer"])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_activation_checkpointing_changes_nothing_and_recomputes(encoding, relative_table, dropout):
    """DeBERTa's decoder goes through the last layer twice more."""
    variant = {"position_encoding": encoding, "relative_table": relative_table}
    batch, results = tiny_batch(), []
    for recomputes in (False, True):
        config, calls = tiny_config(**variant, hidden_dropout=dropout, attention_dropout=dropout), []
        model = build_model(config, recomputes).double()
        model.load_state_dict(tiny_model(**variant).state_dict())
        model.layers[-1].feed_forward.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        torch.manual_seed(3)
        sums = model(batch, some_draws(batch)).sums
        results.append({"sums": sums, **gradients(model, sums)})
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


@pytest.mark.parametrize("encoding", ["deberta", "deberta-v2", "alibi"])
def test_model_with_local_layers_equals_the_twin(encoding):
    """In the last of two layers a token attends to two others on either side; the mask decoder applies it too."""
    model = tiny_model(position_encoding=encoding, local_attention=5, global_every=2, deberta_emd=True)
    assert [layer.attention.window for layer in model.layers] == [None, 2]
    assert [layer.layer_position.is_local for layer in model.layers] == [False, True]
    batch = packed_batch(tiny_batch(lengths=(6, 1, 4)), [[0, 1], [2]])
    assert_every_backend_equals_the_twin(model, batch, some_draws(batch))


def uneven_batch():
    """Rows with 3, 0 and 1 predicted places, not at their ends."""
    batch = tiny_batch(lengths=(6, 2, 3), seq=6, predicted=0)
    labels = batch.labels.clone()
    labels[0, [0, 2, 4]], labels[2, 1] = torch.tensor([5, 1, 9]), 7
    return batch._replace(labels=labels)


@pytest.mark.parametrize("order", ["post", "pre"])
def test_the_decoders_sum_and_gradients_equal_the_twin_for_uneven_rows(order, monkeypatch):
    watched = mock.Mock(wraps=encoder.attend_from)
    monkeypatch.setattr(encoder, "attend_from", watched)
    model, batch = tiny_model(position_encoding="deberta", layernorm_position=order), uneven_batch()
    sums, expected = model(batch, NOTHING).sums, twin_sums(model, batch, NOTHING)
    torch.testing.assert_close(sums, expected, rtol=1e-11, atol=1e-11)
    assert_same_gradients(gradients(model, sums), gradients(model, expected))
    asked = [call.args[0].shape for call in watched.call_args_list]
    assert asked == [(3, 3, 3, 4)] * 2  # two applications; rows, heads, the most that one row predicts, head size


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_any_encoding_can_be_given_the_decoder_and_it_is_on_for_deberta_unless_told_otherwise(encoding):
    model = tiny_model(position_encoding=encoding, deberta_emd=True, relative_table="per-layer")
    assert_every_backend_equals_the_twin(model, packed_batch(uneven_batch(), [[1, 2], [0]]), NOTHING)
    for emd, expected in ((None, encoding == "deberta"), (True, True), (False, False)):
        model = on_meta_device(tiny_config(position_encoding=encoding, deberta_emd=emd))
        assert (model.mask_decoder is not None, len(model.stages())) == (expected, 3 if expected else 4)


def test_a_model_of_one_layer_decodes_from_the_embeddings():
    model, batch = tiny_model(position_encoding="deberta", num_layers=1), uneven_batch()
    draws = some_draws(batch, heads=((0, 2),))
    torch.testing.assert_close(model(batch, draws).sums, twin_sums(model, batch, draws), rtol=1e-10, atol=1e-10)


def test_the_decoder_costs_one_embedding_a_place_and_is_the_encodings_unless_given():
    given, counts = {None: [], True: ["--deberta-emd"], False: ["--no-deberta-emd"]}, {}
    for emd, words in given.items():
        assert parse_arguments(words).config.model.deberta_emd is emd
        counts[emd] = count_parameters(on_meta_device(ModelConfig(position_encoding="deberta", deberta_emd=emd)))
    assert [a - b for a, b in zip(counts[True], counts[False], strict=True)] == [512 * 768] * 2
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
OTHER_HALF = {name: ("relative", slice(0, 4)) for name in ("bert-r", "deberta", "deberta-v2")}
OTHER_HALF |= {"t5": ("relative", slice(16, 32)), "tupe-r": ("relative", slice(17, 32))}
OTHER_HALF |= {"ddrp": ("direction", slice(1, 2)), "alibi-asym": ("right", slice(0, 3))}
"""Encoding → its parameter with entries for following tokens, and these."""


def causal_batch(changed=None):
    """Two documents in the first row and one with padding in the second; each token predicts the next.

    With `changed` the token at that place of the first row is another one.
    """
    batch = packed_batch(tiny_batch(lengths=(4, 3, 5)), [[0, 1], [2]])
    labels = torch.full_like(batch.labels, IGNORED_LABEL)
    for row, documents in enumerate(batch.document_ids.tolist()):
        for place, (own, following) in enumerate(zip(documents, documents[1:], strict=False)):
            if own == following != 0:
                labels[row, place] = batch.input_ids[row, place + 1]
    if changed is not None:
        batch.input_ids[0, changed] = (batch.input_ids[0, changed] + 4) % 11
    return batch._replace(labels=labels)


def sums_of(model, batch, backend):
    for layer in model.layers:
        layer.attention.backend = backend
    return model(batch, OF_TWO, None, layout_of(batch, causal=True)).sums


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MODELS)
def test_a_changed_token_changes_no_output_before_it_and_none_of_another_document(name, backend, monkeypatch):
    model, ends = tiny_model(**MODELS[name]), mock.create_autospec(CausalLM.sums, side_effect=CausalLM.sums)
    monkeypatch.setattr(CausalLM, "sums", ends)
    for changed in (None, 0, 1, 3, 5):
        sums_of(model, causal_batch(changed), backend)
    plain, *others = (call.args[1].predicted for call in ends.call_args_list)
    predicting = [0, 1, 2, 4, 5]  # of the first row; the ends of its documents, 3 and 6, predict nothing
    for changed, other in zip((0, 1, 3, 5), others, strict=True):
        moved = ((other - plain).abs().amax(-1) > 1e-9).tolist()
        own_document = range(4) if changed < 4 else range(4, 7)
        reached = [place for place in predicting if place >= changed and place in own_document]
        assert moved == [place in reached for place in predicting] + [False] * 4
        unreached = [n for n, is_moved in enumerate(moved) if not is_moved]
        assert torch.equal(other[unreached], plain[unreached])


@pytest.mark.parametrize("name", MODELS)
def test_sums_and_gradients_equal_the_twins_and_following_entries_get_none(name):
    model, batch = tiny_model(**MODELS[name]), causal_batch()
    expected = twin_sums(model, batch, OF_TWO, causal=True)[[0, 3]]
    wanted, encoding = gradients(model, expected, (1.0,)), MODELS[name]["position_encoding"]
    for backend in BACKENDS:
        sums = sums_of(model, batch, backend)
        torch.testing.assert_close(sums, expected, rtol=1e-10, atol=1e-10)
        found = gradients(model, sums, (1.0,))
        assert_same_gradients(found, wanted)
        if encoding in OTHER_HALF:
            parameter, entries = OTHER_HALF[encoding]
            gradient = found[f"embeddings.position.{parameter}"]
            assert not gradient[entries].any(), "entries for following tokens learn"
            assert parameter == "right" or gradient.any()


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
