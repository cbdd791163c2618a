"""Stages of models with a generator: sizes, what is shared, where gradients go, and what the discriminator sees.

ELECTRA's, and DeBERTaV3's replaced-token detection with its two look-ups and the head's own [CLS].
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_ddrp.config import ENCODINGS, ModelConfig, ObjectiveConfig
from megatron_ddrp.data.batches.batch import IGNORED_LABEL
from megatron_ddrp.data.batches.masking import Masker
from megatron_ddrp.model import Electra, build_model, count_parameters, on_meta_device
from megatron_ddrp.model.bert import generator_config
from megatron_ddrp.model.heads import gumbel_argmax
from megatron_ddrp.model.stages import Draws, Inputs, NoteInputs
from megatron_ddrp.objectives.contract import make_objective
from megatron_ddrp.objectives.electra import half_as_deep
from tests.datasets import fake_tokenizer
from tests.reference.objectives import (
    contextual_logits,
    discriminator_table,
    generator_input,
    masked_lm,
    replaced_token_detection,
)
from tests.reference.tensors import assert_same
from tests.unit.model.tiny import (
    encode,
    named_sums,
    packed_batch,
    some_draws,
    tiny_batch,
    tiny_config,
    tiny_model,
    with_keys,
)

ELECTRA = ObjectiveConfig(objective="electra")


def tiny_electra(objective=ELECTRA, **changes):
    """float64, every bias and LayerNorm random."""
    return tiny_model(objective=objective, **changes)


def no_draws(batch, step=1):
    return with_keys(batch, Draws.none(len(batch.input_ids), 2), step)


def discriminator_view(model, batch, draws):
    """(what the sampling stage hands on, what it was given)."""
    state = Inputs.of(batch, draws)
    for stage in model.stages():
        if type(stage).__name__ == "SamplingStage":
            return stage(state), state
        state = stage(state)
    raise AssertionError("no sampling stage")


@pytest.mark.parametrize(
    "heads, size, expected", [(12, 1 / 3, 4), (12, 0.25, 3), (4, 0.25, 1), (2, 0.25, 1), (3, 1 / 3, 1), (10, 0.25, 2)]
)
def test_the_generator_has_some_whole_heads_of_the_discriminators_size(heads, size, expected):
    config = ModelConfig(num_attention_heads=heads, hidden_size=16 * heads, num_layers=3, ffn_hidden_size=7)
    generator = generator_config(config, ObjectiveConfig(objective="electra", generator_size=size))
    assert (generator.num_attention_heads, generator.head_dim, generator.hidden_size) == (expected, 16, 16 * expected)
    assert (generator.ffn_size, generator.num_layers) == (4 * 16 * expected, 3)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("order", ["post", "pre"])
def test_every_parameter_learns_and_the_generator_not_from_the_discriminator(encoding, order):
    model = tiny_electra(position_encoding=encoding, layernorm_position=order)
    batch = tiny_batch(lengths=(7, 6, 5), vocab=11)
    sums = named_sums(model, batch, with_keys(batch, some_draws(batch)))
    parameters = dict(model.named_parameters())

    def learned(loss):
        found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True, retain_graph=True)
        return {n for n, g in zip(parameters, found, strict=True) if g is not None and g.abs().max() > 0}

    by_generator, by_discriminator = (
        learned(sum(sums[name] for name in names)) for names in (["lm_loss"], ["rtd_loss", "tcd_loss", "hcd_loss"])
    )
    generator = {name for name in parameters if name.startswith("generator.")}
    assert not by_discriminator & generator
    lent = {"embeddings.token.weight", "embeddings.segment.weight", "embeddings.norm.weight", "embeddings.norm.bias"}
    lent |= {"embeddings.absolute.weight"} & parameters.keys()
    assert by_generator & (parameters.keys() - generator) == lent
    unused = {n for n in parameters if "relative" in n or "key.bias" in n or "position" in n}  # some rows, no effect
    assert parameters.keys() - (by_generator | by_discriminator) <= unused
    assert {"embeddings.token.weight", "generator.embeddings.projection.weight"} <= by_generator
    assert {"embeddings.token.weight", "head.dense.weight", "layers.0.attention.query.weight"} <= by_discriminator


@pytest.mark.parametrize(
    "changes",
    [
        {"position_encoding": "absolute"},
        {"position_encoding": "ddrp"},
        {"position_encoding": "ddrp", "absolute_embedding": True, "layernorm_position": "pre"},
    ],
    ids=lambda changes: " ".join(map(str, changes.values())),
)
def test_the_generators_input_is_that_of_the_loops(changes):
    """The discriminator's embeddings and their LayerNorm, then the projection; of packed rows too."""
    model = tiny_electra(objective=ObjectiveConfig(objective="electra", generator_size=2 / 3), **changes)
    embeddings, lending = model.generator.embeddings, model.embeddings
    batch = packed_batch(tiny_batch(lengths=(4, 3, 5)), [[0, 1], [2]])
    params = {
        "token": lending.token.weight,
        "segment": lending.segment.weight,
        "norm.weight": lending.norm.weight,
        "norm.bias": lending.norm.bias,
        "projection.weight": embeddings.projection.weight,
        "projection.bias": embeddings.projection.bias,
    }
    if lending.absolute is not None:
        params["absolute"] = lending.absolute.weight
    fast = embeddings.embed(Inputs.of(batch, no_draws(batch)))
    assert fast.shape == (2, 7, 8)
    rows = zip(batch.input_ids.tolist(), batch.segment_ids.tolist(), batch.position_ids.tolist(), strict=True)
    assert_same(fast, torch.stack([generator_input(params, *row) for row in rows]), list(params.values()))


def test_the_sums_are_those_of_the_loops():
    model = tiny_electra(vocab_size=5)
    batch = tiny_batch(lengths=(7, 6, 5), vocab=5, predicted=3)
    seen_both = set()
    for step in range(6):
        draws = no_draws(batch, step)
        state, entered = discriminator_view(model, batch, draws)
        chosen = batch.labels != IGNORED_LABEL
        logits = model.generator.head.logits(model.generator.head.last_hidden(entered.hidden[chosen]))
        originals = torch.where(chosen, batch.labels, batch.input_ids)
        keys = draws.own.keys[chosen]
        sampled = gumbel_argmax(logits, keys)[1]
        assert (sampled < 5).all(), "a piece of the vocabulary's padding was drawn"
        seen = originals.clone()
        seen[chosen] = sampled
        valid = batch.document_ids > 0
        assert torch.equal(state.inputs.batch.labels, (seen != originals).long().masked_fill(~valid, IGNORED_LABEL))
        hidden = encode(model, batch._replace(input_ids=seen))
        rtd = replaced_token_detection(model.head.logits(hidden), seen.tolist(), originals.tolist(), valid.tolist())
        sums = named_sums(model, batch, draws)
        torch.testing.assert_close(sums["rtd_loss"], rtd[0])
        assert [int(sums[k]) for k in ("rtd_correct", "replaced", "replaced_found")] == list(rtd[1:])
        torch.testing.assert_close(sums["lm_loss"], masked_lm(logits, batch.labels[chosen]))
        assert int(sums["generator_correct"]) == int((logits.argmax(-1) == batch.labels[chosen]).sum())
        seen_both |= set((sampled != batch.labels[chosen]).tolist())
    assert seen_both == {True, False}, "the draws never met, or always met, the original: the test shows little"


def test_recomputed_layers_give_the_same():
    batch = tiny_batch()
    draws = with_keys(batch, some_draws(batch))
    plain, recomputed = tiny_electra(), tiny_electra()
    recomputed.checkpoint_activations = True
    torch.testing.assert_close(recomputed(batch, draws).sums, plain(batch, draws).sums, rtol=0, atol=0)


def test_the_base_models_sizes():
    """Discriminator without a vocabulary head; generator of 4 heads: 256 wide, FFN 1,024, all embeddings shared."""
    model = on_meta_device(ModelConfig(position_encoding="absolute"), ELECTRA)
    assert isinstance(model, Electra)
    total, position = count_parameters(model)
    hidden, width, ffn, layers, vocab = 768, 256, 1024, 12, 30522
    norm = 2 * width
    layer = 4 * (width * width + width) + (width * ffn + ffn) + (ffn * width + width) + 2 * norm
    generator = hidden * width + width + layers * layer + (width * hidden + hidden) + 2 * hidden + vocab
    discriminator = 109_514_298 - vocab - 2 * hidden + hidden + 1  # no LayerNorm or vocabulary bias in the head
    assert total == generator + discriminator
    assert position == 512 * hidden
    former = on_meta_device(model.config, replace(ELECTRA, generator_embeddings="own"))
    assert count_parameters(former) == (total + 512 * width + norm, position + 512 * width)


def test_the_encoder_is_the_discriminator():
    model = tiny_electra()
    batch = tiny_batch()
    bert = build_model(tiny_config()).double()
    own = dict(model.named_parameters())
    for name, parameter in bert.named_parameters():
        if name in own and not name.startswith("head."):
            parameter.data.copy_(own[name])
    torch.testing.assert_close(encode(model, batch), encode(bert, batch))


def test_the_former_layout_projects_first_and_normalises_at_the_generators_width():
    former = replace(ELECTRA, generator_embeddings="own")
    model = tiny_electra(objective=former, position_encoding="absolute")
    embeddings, batch = model.generator.embeddings, tiny_batch()
    summed = model.embeddings.token(batch.input_ids) + model.embeddings.segment(batch.segment_ids)
    summed = embeddings.projection(summed) + embeddings.absolute.weight[batch.position_ids]
    expected = torch.nn.functional.layer_norm(summed, (4,), embeddings.norm.weight, embeddings.norm.bias, 1e-12)
    ours = embeddings.embed(Inputs.of(batch, no_draws(batch)))
    torch.testing.assert_close(ours, expected)
    lent = {"embeddings.absolute.weight", "embeddings.norm.weight", "embeddings.norm.bias"}
    parameters = dict(model.named_parameters())
    own = {f"generator.{name}" for name in lent}
    assert own <= parameters.keys()
    assert not own & dict(tiny_electra(position_encoding="absolute").named_parameters()).keys()
    loss = named_sums(model, batch, with_keys(batch, some_draws(batch)))["lm_loss"]
    found = torch.autograd.grad(
        loss, [parameters[name] for name in sorted(lent | own)], allow_unused=True, materialize_grads=True
    )
    assert [bool(gradient.any()) for gradient in found] == [False] * 3 + [True] * 3


RTD = ObjectiveConfig(objective="rtd", tcd_weight=1.0, hcd_weight=0.01)
SHARED, DIFFERENCE = "embeddings.token.weight", "embeddings.difference.weight"


def tiny_rtd(**changes):
    """As `tiny_electra`, with a difference that is not 0 any more."""
    model = tiny_electra(**{"objective": RTD, "num_layers": 3} | changes)
    if hasattr(model.embeddings, "difference"):
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


@pytest.mark.parametrize("objective", [replace(RTD, objective="electra"), RTD], ids=["electra", "rtd"])
def test_a_row_of_several_documents_gives_the_sums_of_one_each(objective):
    model, batch = tiny_rtd(objective=objective, seq_length=16), tiny_batch(lengths=(7, 4, 5), predicted=2)
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


def test_the_base_models_sizes_with_two_tables():
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
