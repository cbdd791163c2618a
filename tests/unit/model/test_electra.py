"""Models with a generator, ELECTRA's and DeBERTaV3's: sizes, what is shared, where gradients go, what is seen."""

from functools import partial

import pytest
import torch

from megatron_ddrp.config import ENCODINGS, ModelConfig, ObjectiveConfig
from megatron_ddrp.data.batches.batch import IGNORED_LABEL
from megatron_ddrp.model import Electra, count_parameters, on_meta_device
from megatron_ddrp.model.bert import generator_config
from megatron_ddrp.model.heads import gumbel_argmax
from megatron_ddrp.model.stages import Inputs, NoteInputs, layout_of
from megatron_ddrp.objectives.contract import make_objective
from megatron_ddrp.objectives.electra import half_as_deep
from tests.reference import objectives as loops
from tests.reference.tensors import assert_same
from tests.unit.model.tiny import encode, gradients, named_sums, own_draws, packed_batch, tiny_batch, tiny_model

ELECTRA, RTD = (ObjectiveConfig(objective=name, tcd_weight=1.0, hcd_weight=0.01) for name in ("electra", "rtd"))
tiny_electra = partial(tiny_model, objective=ELECTRA)
SHARED, DIFFERENCE = "embeddings.token.weight", "embeddings.difference.weight"


def learned_from(model, loss):
    """Parameter → its gradient, for those that take part."""
    return {name: g for name, g in gradients(model, loss.unsqueeze(0), (1.0,)).items() if g.any()}


def tiny_rtd(**changes):
    """Return `tiny_electra` with a difference that is not 0 any more."""
    model = tiny_electra(**{"objective": RTD, "num_layers": 3} | changes)
    if hasattr(model.embeddings, "difference"):
        torch.nn.init.normal_(model.embeddings.difference.weight, std=0.4)
    return model


def test_the_generator_has_some_whole_heads_of_the_discriminators_size_or_half_of_the_layers():
    third = 1 / 3
    for heads, size, expected in (*((n, 0.25, n // 4 or 1) for n in (12, 4, 2, 10)), (12, third, 4), (3, third, 1)):
        config = ModelConfig(num_attention_heads=heads, hidden_size=16 * heads, num_layers=3, ffn_hidden_size=7)
        generator = generator_config(config, ObjectiveConfig(objective="electra", generator_size=size))
        assert (generator.num_attention_heads, generator.head_dim) == (expected, 16)
        assert (generator.hidden_size, generator.ffn_size, generator.num_layers) == (16 * expected, 64 * expected, 3)
    for layers, half in ((1, 1), (2, 1), (3, 1), (12, 6)):
        config = ModelConfig(num_layers=layers)
        assert half_as_deep(config) == make_objective(RTD).generator_config(config) == ModelConfig(num_layers=half)


@pytest.mark.parametrize("objective", [ELECTRA, RTD], ids=["electra", "rtd"])
@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("order, table", [("post", "shared"), ("pre", "per-layer")])
def test_every_parameter_learns_and_each_model_from_its_own_loss_alone(encoding, order, table, objective):
    """In ELECTRA both losses reach all embeddings; with two tables detection reaches only their difference."""
    changes = {"position_encoding": encoding, "layernorm_position": order, "relative_table": table}
    model = tiny_rtd(objective=objective, **changes)
    sums = named_sums(model, tiny_batch(lengths=(7, 6, 5), vocab=11))
    names = {name for name, _ in model.named_parameters()}
    by_generator = learned_from(model, sums["lm_loss"]).keys()
    by_discriminator = learned_from(model, sum(sums[name] for name in ("rtd_loss", "tcd_loss", "hcd_loss"))).keys()
    generator = {name for name in names if name.startswith("generator.")}
    lent = {f"embeddings.{name}" for name in ("segment.weight", "norm.weight", "norm.bias", "absolute.weight")} & names
    assert by_generator - generator == {SHARED} | (lent if objective is ELECTRA else set())
    assert not by_discriminator & generator
    may_rest = {name for name in names if "relative" in name or "key.bias" in name or "position" in name}
    assert names - (by_generator | by_discriminator) <= may_rest  # whose rows may not be read, or whose effect cancels
    assert {"head.dense.weight", "layers.0.attention.query.weight"} <= by_discriminator
    assert ({SHARED, DIFFERENCE} & by_discriminator) == {SHARED if objective is ELECTRA else DIFFERENCE}
    assert objective is RTD or "generator.embeddings.projection.weight" in by_generator


@pytest.mark.parametrize(
    "encoding, changes",
    [("absolute", {}), ("ddrp", {}), ("ddrp", {"absolute_embedding": True, "layernorm_position": "pre"})],
)
def test_the_generator_reads_the_discriminators_embeddings_and_their_norm_through_its_projection(encoding, changes):
    """Packed rows are among them."""
    objective = ObjectiveConfig(objective="electra", generator_size=2 / 3)
    model = tiny_electra(objective=objective, position_encoding=encoding, **changes)
    embeddings, lending = model.generator.embeddings, model.embeddings
    batch = packed_batch(tiny_batch(lengths=(4, 3, 5)), [[0, 1], [2]])
    embedded = lending.token(batch.input_ids) + lending.segment(batch.segment_ids)
    if lending.absolute is not None:
        embedded = embedded + lending.absolute(batch.position_ids)
    fast = embeddings.embed(Inputs.of(batch, own_draws(model, batch)))
    assert fast.shape == (2, 7, 8)
    lent = [p for name, p in lending.named_parameters() if not name.startswith("position.")]
    assert_same(fast, embeddings.projection(lending.norm(embedded)), [*lent, *embeddings.projection.parameters()])


def test_the_sums_are_those_of_the_loops():
    model = tiny_electra(vocab_size=5)
    batch = tiny_batch(lengths=(7, 6, 5), vocab=5, predicted=3)
    seen_both = set()
    for step in range(6):
        draws = own_draws(model, batch, step)
        state = Inputs.of(batch, draws)
        for stage in model.stages()[: len(model.generator.layers) + 2]:  # the last one samples
            entered, state = state, stage(state)
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
        detected = model.head.logits(encode(model, batch._replace(input_ids=seen)))
        rtd = loops.replaced_token_detection(detected, seen.tolist(), originals.tolist(), valid.tolist())
        sums = named_sums(model, batch, draws)
        torch.testing.assert_close(sums["rtd_loss"], rtd[0])
        assert [int(sums[k]) for k in ("rtd_correct", "replaced", "replaced_found")] == list(rtd[1:])
        torch.testing.assert_close(sums["lm_loss"], loops.masked_lm(logits, batch.labels[chosen]))
        assert int(sums["generator_correct"]) == int((logits.argmax(-1) == batch.labels[chosen]).sum())
        seen_both |= set((sampled != batch.labels[chosen]).tolist())
    assert seen_both == {True, False}, "the draws never met, or always met, the original: the test shows little"


def test_the_encoder_is_the_discriminator():
    plain, bert, batch = tiny_electra(), tiny_model(), tiny_batch()
    own = dict(plain.named_parameters())
    for name, parameter in bert.named_parameters():
        if name in own and not name.startswith("head."):
            parameter.data.copy_(own[name])
    torch.testing.assert_close(encode(plain, batch), encode(bert, batch))


def test_the_base_models_sizes():
    """ELECTRA: a discriminator without a vocabulary head; a generator of 4 heads, 256 wide, FFN 1,024, all embeddings
    shared. DeBERTaV3: two tables of tokens, 12 and 6 layers, one of positions and segments for each of the two."""
    model = on_meta_device(ModelConfig(position_encoding="absolute"), ELECTRA)
    assert isinstance(model, Electra)
    positions = 512 * 768
    assert count_parameters(model) == (119_386_427, positions)
    assert count_parameters(on_meta_device(model.config, RTD)) == (176_471_611, 2 * positions)


def test_two_look_ups_are_the_table_they_stand_for():
    """Losses and every gradient, against a discriminator that reads E_G + E_Δ from one table."""
    model, batch = tiny_rtd(), tiny_batch(lengths=(7, 6, 5), vocab=11)

    def everything():
        sums = named_sums(model, batch)
        return sums, learned_from(model, sums["lm_loss"] + 3 * sums["rtd_loss"] + sums["tcd_loss"])

    sums, found = everything()
    tables = model.embeddings.token.weight, model.embeddings.difference.weight
    model.embeddings.look_up = lambda ids: (tables[0].detach() + tables[1])[ids]
    expected_sums, expected = everything()
    torch.testing.assert_close(sums, expected_sums, rtol=0, atol=0)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_the_head_reads_each_documents_own_first_token():
    """Against loops, of packed rows with padding; every parameter of the head acts."""
    model = tiny_rtd(seq_length=16)
    batch = packed_batch(tiny_batch(lengths=(4, 3, 5)), [[0, 1], [2]])
    hidden = torch.randn(*batch.input_ids.shape, 12, dtype=torch.float64, requires_grad=True)
    params = dict(model.head.named_parameters())
    fast = model.head.logits(hidden, layout_of(batch).runs)
    documents = batch.document_ids.tolist()
    slow = torch.stack([loops.contextual_logits(*row, params) for row in zip(hidden, documents, strict=True)])
    valid = batch.document_ids > 0
    assert_same(fast[valid], slow[valid], [hidden, *params.values()])
    assert all(g.any() for g in torch.autograd.grad(slow.sum(), [p for p in params.values() if p.dim() > 1]))
    of_first = model.head.logits(hidden)  # as if every row were one document
    assert torch.equal(torch.isclose(fast[valid], of_first[valid]), batch.document_ids[valid] == 1)


def test_a_generator_shares_embeddings_of_any_width():
    """ELECTRA small: token, segment and absolute embeddings narrower than both models, tied to the output matrix."""
    objective = ObjectiveConfig(objective="electra", generator_size=1 / 3)
    model, batch = tiny_model(objective=objective, embedding_size=6, position_encoding="absolute"), tiny_batch()
    assert model.generator.embeddings.projection.weight.shape == (4, 6)
    assert model.generator.head.dense.weight.shape == (6, 4)
    sums = named_sums(model, batch)
    (gradient,) = torch.autograd.grad(sums["lm_loss"], model.embeddings.token.weight)
    assert gradient.abs().max() > 1e-3 and sums["rtd_loss"] > 0


def test_the_difference_starts_at_0_and_merging_changes_no_state():
    fresh = tiny_electra(objective=RTD, num_layers=3)
    assert not fresh.embeddings.difference.weight.any()
    model, batch = tiny_rtd(), tiny_batch()
    before, shared = encode(model, batch), model.embeddings.token.weight
    table = shared.detach() + model.embeddings.difference.weight
    model.merge_embeddings()
    assert torch.equal(model.embeddings.token.weight, table) and torch.equal(encode(model, batch), before)
    assert DIFFERENCE not in dict(model.named_parameters())
    assert model.generator.embeddings.token.weight is shared is model.generator.head.decoder.weight
    encode(model, batch).sum().backward()
    assert model.embeddings.token.weight.grad.any() and shared.grad is None
    model.merge_embeddings()
    assert torch.equal(model.embeddings.token.weight, table)


def test_the_weight_of_detection_is_the_objectives_own_unless_given():
    weights = {"rtd": 10.0, "electra": 50.0, "mlm": 50.0}
    assert {name: ObjectiveConfig(objective=name).rtd_weight for name in weights} == weights
    terms = make_objective(ObjectiveConfig(objective="rtd", rtd_weight=0.5)).terms
    assert {term.name: term.weight for term in terms}["rtd_loss"] == 0.5


@pytest.mark.parametrize("objective", ["rtd", "electra"])
def test_generator_and_discriminator_read_the_same_notes(objective):
    model = tiny_electra(objective=ObjectiveConfig(objective=objective, notes=True, notes_mix=0.5))
    batch = tiny_batch(lengths=(7, 6, 5))
    notes = NoteInputs(torch.tensor([2, 9]), torch.ones(2, 12), torch.zeros(0, 1, dtype=torch.long))
    for embeddings in (model.generator.embeddings, model.embeddings):
        plain, read = (embeddings.embed(Inputs.of(batch, own_draws(model, batch), given)) for given in (None, notes))
        assert (plain != read).any(-1).flatten().nonzero().flatten().tolist() == [2, 9]
