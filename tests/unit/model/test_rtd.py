"""DeBERTaV3's replaced-token detection: where gradients go, the two look-ups, the head's own [CLS], and sizes."""

import numpy as np
import pytest
import torch

from megatron_ddrp.config import ModelConfig, ObjectiveConfig
from megatron_ddrp.data.batches.batch import IGNORED_LABEL
from megatron_ddrp.data.batches.masking import Masker
from megatron_ddrp.model import count_parameters, on_meta_device
from megatron_ddrp.model.stages import Inputs, NoteInputs
from megatron_ddrp.objectives.contract import make_objective
from megatron_ddrp.objectives.electra import half_as_deep
from tests.datasets import fake_tokenizer
from tests.reference.rtd import contextual_logits, discriminator_table
from tests.reference.tensors import assert_same
from tests.unit.model.test_electra import discriminator_view, no_draws, tiny_electra, with_keys
from tests.unit.model.tiny import encode, named_sums, packed_batch, some_draws, tiny_batch

RTD = ObjectiveConfig(objective="rtd", tcd_weight=1.0, hcd_weight=0.01)
SHARED, DIFFERENCE = "embeddings.token.weight", "embeddings.difference.weight"


def tiny_rtd(**changes):
    """As `tiny_electra`, with a difference that is not 0 any more."""
    model = tiny_electra(objective=RTD, **{"num_layers": 3} | changes)
    torch.nn.init.normal_(model.embeddings.difference.weight, std=0.4)
    return model


def draws_of(batch):
    return with_keys(batch, some_draws(batch, heads=((0, 2), (1, 2), (0, 1))))


def gradients_of(model, loss):
    """Parameter → its gradient, for those that take part."""
    parameters = dict(model.named_parameters())
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True, retain_graph=True)
    return {name: g for name, g in zip(parameters, found, strict=True) if g is not None and g.any()}


@pytest.mark.parametrize(
    "changes",
    [
        {"position_encoding": "absolute"},
        {"position_encoding": "deberta", "layernorm_position": "pre"},
        {"position_encoding": "ddrp", "relative_table": "per-layer"},
    ],
    ids=lambda changes: changes["position_encoding"],
)
def test_masked_lm_teaches_the_generator_and_detection_the_discriminator_alone(changes):
    model = tiny_rtd(**changes)
    batch = tiny_batch(lengths=(7, 6, 5), vocab=11)
    sums = named_sums(model, batch, draws_of(batch))
    names = {name for name, _ in model.named_parameters()}
    of_generator = {name for name in names if name.startswith("generator.")} | {SHARED}
    by_masked_lm = gradients_of(model, sums["lm_loss"]).keys()
    by_detection = gradients_of(model, sum(sums[name] for name in ("rtd_loss", "tcd_loss", "hcd_loss"))).keys()
    unused = {n for n in names if "relative" in n or "key.bias" in n or "position" in n}  # some rows, no effect
    assert of_generator - unused <= by_masked_lm <= of_generator
    assert names - of_generator - unused <= by_detection <= names - of_generator
    assert DIFFERENCE in by_detection and SHARED in by_masked_lm


def test_the_shared_table_learns_the_same_to_the_bit_whatever_detection_weighs():
    model, batch = tiny_rtd(), tiny_batch(lengths=(7, 6, 5), vocab=11)
    weighed = []
    for weight in (0.0, 50.0):
        sums = named_sums(model, batch, draws_of(batch))
        weighed.append(gradients_of(model, sums["lm_loss"] + weight * sums["rtd_loss"]))
    assert torch.equal(weighed[0][SHARED], weighed[1][SHARED])
    assert DIFFERENCE not in weighed[0] and weighed[1][DIFFERENCE].any()


def test_two_look_ups_are_the_table_they_stand_for():
    """Losses and every gradient, against a discriminator that reads E_G + E_Δ from one table."""
    model, batch = tiny_rtd(), tiny_batch(lengths=(7, 6, 5), vocab=11)

    def everything():
        sums = named_sums(model, batch, draws_of(batch))
        return sums, gradients_of(model, sums["lm_loss"] + 3 * sums["rtd_loss"] + sums["tcd_loss"])

    sums, gradients = everything()
    embeddings = model.embeddings
    embeddings.look_up = lambda ids: discriminator_table(embeddings.token.weight, embeddings.difference.weight)[ids]
    expected_sums, expected = everything()
    assert gradients.keys() == expected.keys()
    for name, value in expected_sums.items():
        assert torch.equal(sums[name], value), name
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-12, atol=1e-12)


def test_the_head_reads_each_documents_own_first_token():
    """Against loops, of packed rows with padding; every parameter of the head acts."""
    model = tiny_rtd(seq_length=16)
    batch = packed_batch(tiny_batch(lengths=(4, 3, 5)), [[0, 1], [2]])
    state, _ = discriminator_view(model, batch, no_draws(batch))
    hidden = torch.randn(*batch.input_ids.shape, 12, dtype=torch.float64, requires_grad=True)
    params = dict(model.head.named_parameters())
    fast = model.head.logits(hidden, state.inputs.layout.runs)
    documents = batch.document_ids.tolist()
    slow = torch.stack([contextual_logits(*row, params) for row in zip(hidden, documents, strict=True)])
    valid = batch.document_ids > 0
    assert_same(fast[valid], slow[valid], [hidden, *params.values()])
    assert all(g.any() for g in torch.autograd.grad(slow.sum(), [p for p in params.values() if p.dim() > 1]))
    of_first = model.head.logits(hidden)  # as if every row were one document
    assert torch.equal(torch.isclose(fast[valid], of_first[valid]), batch.document_ids[valid] == 1)


def test_a_row_of_several_documents_gives_the_sums_of_one_each():
    model, batch = tiny_rtd(seq_length=16), tiny_batch(lengths=(7, 4, 5), predicted=2)
    packed = packed_batch(batch, [[0, 2], [1]])
    ours, apart = (named_sums(model, each, draws_of(each)) for each in (packed, batch))
    torch.testing.assert_close(ours, apart)
    assert ours["replaced"] > 0 and ours["tcd_loss"] != 0 and ours["hcd_loss"] != 0


def test_the_difference_starts_at_0_and_merging_changes_no_state():
    fresh = tiny_electra(objective=RTD, num_layers=3)
    assert not fresh.embeddings.difference.weight.any()
    model, batch = tiny_rtd(), tiny_batch()
    before, shared = encode(model, batch), model.embeddings.token.weight
    table = discriminator_table(shared, model.embeddings.difference.weight)
    model.merge_embeddings()
    assert torch.equal(model.embeddings.token.weight, table) and torch.equal(encode(model, batch), before)
    assert DIFFERENCE not in dict(model.named_parameters())
    assert model.generator.embeddings.token.weight is shared is model.generator.head.decoder.weight
    encode(model, batch).sum().backward()
    assert model.embeddings.token.weight.grad.any() and shared.grad is None
    model.merge_embeddings()
    assert torch.equal(model.embeddings.token.weight, table)


@pytest.mark.parametrize("layers, half", [(1, 1), (2, 1), (3, 1), (12, 6)])
def test_the_generator_has_half_of_the_layers(layers, half):
    config = ModelConfig(num_layers=layers)
    generator = half_as_deep(config)
    assert generator == ModelConfig(num_layers=half)
    assert make_objective(RTD).generator_config(config) == generator


def test_the_base_models_sizes():
    """Two tables of tokens, 12 and 6 layers, and one of positions and segments for each of the two."""
    model = on_meta_device(ModelConfig(position_encoding="absolute"), RTD)
    hidden, ffn, vocab, positions, segments = 768, 3072, 30522, 512, 2
    norm = 2 * hidden
    layer = 4 * (hidden * hidden + hidden) + (hidden * ffn + ffn) + (ffn * hidden + hidden) + 2 * norm
    inputs = (positions + segments) * hidden + norm
    heads = (hidden * hidden + hidden + norm + vocab) + (hidden * hidden + hidden + norm + hidden + 1)
    assert count_parameters(model) == (2 * vocab * hidden + 2 * inputs + 18 * layer + heads, 2 * positions * hidden)


def test_every_selected_piece_becomes_a_mask():
    tokenizer = fake_tokenizer(np.ones(30, dtype=bool))
    ids = np.random.default_rng(0).integers(10, 30, (8, 40))
    masked, labels = Masker(tokenizer, **RTD.mask_shares)(ids, np.ones_like(ids), 0, np.arange(8))
    chosen = labels != IGNORED_LABEL
    assert chosen.any() and (masked[chosen] == tokenizer.mask_id).all() and (masked[~chosen] == ids[~chosen]).all()


def test_the_weight_of_detection_is_the_objectives_own_unless_given():
    assert {name: ObjectiveConfig(objective=name).rtd_weight for name in ("rtd", "electra", "mlm")} == {
        "rtd": 10.0,
        "electra": 50.0,
        "mlm": 50.0,
    }
    terms = make_objective(ObjectiveConfig(objective="rtd", rtd_weight=0.5)).terms
    assert {term.name: term.weight for term in terms}["rtd_loss"] == 0.5


@pytest.mark.parametrize("objective", ["rtd", "electra"])
def test_generator_and_discriminator_read_the_same_notes(objective):
    model = tiny_electra(objective=ObjectiveConfig(objective=objective, notes=True, notes_mix=0.5))
    batch = tiny_batch(lengths=(7, 6, 5))
    notes = NoteInputs(torch.tensor([2, 9]), torch.ones(2, 12), torch.zeros(0, 1, dtype=torch.long))
    for embeddings in (model.generator.embeddings, model.embeddings):
        plain, read = (embeddings.embed(Inputs.of(batch, no_draws(batch), given)) for given in (None, notes))
        assert (plain != read).any(-1).flatten().nonzero().flatten().tolist() == [2, 9]
