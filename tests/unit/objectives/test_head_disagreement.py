"""Disagreement of heads against its loop twins: each part, all layers of a model, packing, and where it is off."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megatron_ddrp.config import ENCODINGS, Config, ObjectiveConfig, TrainingConfig
from megatron_ddrp.errors import UserError
from megatron_ddrp.memory import Part, activation_bytes
from megatron_ddrp.model.attention.logits import Attended, Attending
from megatron_ddrp.model.positions import PositionTerms
from megatron_ddrp.model.stages import Draws, Inputs
from megatron_ddrp.objectives.contract import make_objective
from megatron_ddrp.objectives.masked import PARTS, agreement, document_lengths
from tests.reference import disagreement as twin
from tests.reference.tensors import assert_same
from tests.unit.model.tiny import encode, named_sums, packed_batch, tiny_batch, tiny_config, tiny_model

ALL = ObjectiveConfig(objective="head-disagreement", objective_options=("value=0.5", "attention=2"))
DOCUMENTS = torch.tensor([[1, 1, 1, 2, 2, 0], [1, 1, 2, 0, 0, 0]])
"""The last document is a single token, which does not count."""
TOKENS = {(0, 1): [0, 1, 2], (0, 2): [3, 4], (1, 1): [0, 1]}


def drawn(batch, objective=ALL):
    draws = Draws.none(len(batch.input_ids), 2)
    return draws._replace(own=make_objective(objective).draw_own(batch.map(lambda x: x.numpy()), 1234, 1))


def own_sums(model, batch):
    sums = named_sums(model, batch, drawn(batch))
    return {part: sums[f"{part}_disagreement_loss"] for part in PARTS}


def test_lengths_are_those_of_documents_of_two_tokens_or_more():
    assert document_lengths(DOCUMENTS.numpy()).tolist() == [[3, 3, 3, 2, 2, 0], [2, 2, 0, 0, 0, 0]]


@pytest.mark.parametrize("part", PARTS)
def test_each_part_and_its_gradient_are_those_of_the_loops(part):
    torch.manual_seed(0)
    query, key, value, context = (torch.randn(2, 3, 6, 4, dtype=torch.float64, requires_grad=True) for _ in range(4))
    bias = torch.randn(1, 3, 6, 6, dtype=torch.float64, requires_grad=True)
    terms = PositionTerms(0.5, bias=bias)
    attending = Attending(query, key, value, terms, DOCUMENTS, torch.empty(0, dtype=torch.long))
    lengths = torch.from_numpy(document_lengths(DOCUMENTS.numpy()))
    fast = agreement(part, Attended(attending, context, lambda x: x.mean(1)), lengths)
    slow = torch.zeros((), dtype=torch.float64)
    for (row, _), tokens in TOKENS.items():
        if part == "attention":
            maps = twin.probabilities(0.5 * query[row] @ key[row].transpose(1, 2) + bias[0], tokens)
            slow = slow - twin.of_maps(maps, tokens)
        else:
            slow = slow - twin.of_vectors((context if part == "output" else value)[row], tokens)
    assert_same(fast, slow, {"attention": [query, key, bias], "output": [context], "value": [value]}[part])
    assert slow > 0


def test_heads_that_are_alike_give_1_per_document_and_zeros_no_nan():
    alike = torch.randn(2, 1, 6, 4).expand(-1, 3, -1, -1)
    lengths = torch.from_numpy(document_lengths(DOCUMENTS.numpy()))
    attended = Attended(SimpleNamespace(value=alike), alike, lambda x: x.mean(1))
    torch.testing.assert_close(agreement("value", attended, lengths), torch.tensor(3.0))
    zeros = torch.zeros(2, 3, 6, 4, requires_grad=True)
    agreement("output", attended._replace(context=zeros), lengths).backward()
    assert zeros.grad is not None and zeros.grad.isfinite().all()


@pytest.mark.parametrize("encoding, local", [("absolute", None), ("ddrp", None), ("rope", 2)])
def test_a_model_sums_its_layers(encoding, local):
    """From each layer's own logits and values, by loops; with local attention, which the second layer has."""
    settings = {"position_encoding": encoding, "local_attention": local}
    model, batch = tiny_model(objective=ALL, **settings), tiny_batch(lengths=(7, 4, 1))
    ours = own_sums(model, batch)
    expected = dict.fromkeys(PARTS, torch.zeros((), dtype=torch.float64))
    state = model.embeddings(Inputs.of(batch, drawn(batch)))
    for layer in model.layers:
        logits, values = layer.logits(state), layer.attention.split(layer.attention.value(state.hidden))
        for row, tokens in enumerate((range(7), range(4))):
            maps = twin.probabilities(logits[row], list(tokens), model.config.window(layer.number))
            parts = {"value": values[row], "output": maps @ values[row]}
            for part, vectors in parts.items():
                expected[part] = expected[part] - twin.of_vectors(vectors, list(tokens))
            expected["attention"] = expected["attention"] - twin.of_maps(maps, list(tokens))
        state = layer(state)
    for part in PARTS:
        torch.testing.assert_close(ours[part], expected[part])


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_row_of_several_documents_gives_the_sums_of_one_each(encoding):
    model = tiny_model(objective=ALL, position_encoding=encoding, seq_length=16)
    batch = tiny_batch(lengths=(7, 4, 5))
    torch.testing.assert_close(own_sums(model, packed_batch(batch, [[0, 2], [1]])), own_sums(model, batch))


def test_recomputed_layers_give_the_same_gradients():
    batch = tiny_batch()
    found = []
    for recomputes in (False, True):
        model = tiny_model(objective=ALL)
        model.checkpoint_activations = recomputes
        sum(own_sums(model, batch).values()).backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_each_part_teaches_what_it_should():
    model, batch = tiny_model(objective=ALL, num_layers=1), tiny_batch()
    attention = dict(model.layers[0].attention.named_parameters())
    maps = ("query", "key", "value", "output")
    for part, taught in {
        "value": {"value"},
        "output": {"query", "key", "value"},
        "attention": {"query", "key"},
    }.items():
        loss = own_sums(model, batch)[part]
        found = torch.autograd.grad(loss, [attention[f"{name}.weight"] for name in maps], allow_unused=True)
        assert {name for name, g in zip(maps, found, strict=True) if g is not None and g.any()} == taught


def test_weights_choose_the_parts_and_nothing_is_computed_without():
    default = make_objective(ObjectiveConfig(objective="head-disagreement"))
    assert default.parts == ("output",) and default.looks_inside and default.kept_maps == 0
    terms = {term.name: (term.weight, term.per) for term in make_objective(ALL).terms}
    assert {name: terms[f"{name}_disagreement_loss"] for name in PARTS} == {
        "value": (0.5, "sequences"),
        "output": (1.0, "sequences"),
        "attention": (2.0, "sequences"),
    }
    none = ObjectiveConfig(objective="head-disagreement", objective_options=("output=0",))
    plain, without = tiny_model(), tiny_model(objective=none)
    assert without.layers[0].attention.judge is None
    batch = tiny_batch()
    assert torch.equal(without(batch, drawn(batch, none)).sums, plain(batch, Draws.none(3, 2)).sums)


def test_the_dry_run_counts_the_maps_that_are_kept():
    part = Part(((0,), (0,)), (12, 12), has_head=True, in_flight=1, moments=0, moments_per_element=2)
    model, training = tiny_config(), TrainingConfig(micro_batch_size=4)
    of_outputs = Config(model, ObjectiveConfig(objective="head-disagreement"), training=training)
    less, more = (activation_bytes(part, c, 4) for c in (of_outputs, replace(of_outputs, objective=ALL)))
    assert more - less == 2 * (4 * 3 * 7 * 7) * 4  # layers x maps x bytes


def test_an_encoder_is_not_looked_into(monkeypatch):
    model, batch = tiny_model(objective=ALL), tiny_batch()
    plain = encode(tiny_model(), batch)
    monkeypatch.setattr("megatron_ddrp.objectives.masked.agreement", None)
    assert torch.equal(encode(model, batch), plain)


def test_a_weight_below_0_is_refused():
    with pytest.raises(UserError, match="output is -1.0: it must be at least 0"):
        ObjectiveConfig(objective="head-disagreement", objective_options=("output=-1",))
