"""Masked LM, the MTH regularisers, disagreement of heads and contrast of tokens against their loop twins."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from megatron_ddrp.config import ENCODINGS, Config, ObjectiveConfig, TrainingConfig
from megatron_ddrp.engine.layout import Setup
from megatron_ddrp.memory import RankPart, activation_bytes
from megatron_ddrp.model import embeddings as similarity
from megatron_ddrp.model.attention.logits import Attended, Attending
from megatron_ddrp.model.heads import masked_lm_sum
from megatron_ddrp.model.positions import PositionTerms
from megatron_ddrp.model.stages import Inputs
from megatron_ddrp.objectives import contract
from megatron_ddrp.objectives.contract import Rate, Term, make_objective
from megatron_ddrp.objectives.masked import PARTS, MaskedLM, agreement, contrast_sum, document_lengths
from tests.reference import objectives as twin
from tests.reference.tensors import assert_same, random
from tests.refusals import refused
from tests.unit.model.tiny import encode, named_sums, own_draws, packed_batch, tiny_batch, tiny_config, tiny_model

pytestmark = pytest.mark.usefixtures("torch_seed")
LENGTHS = (7, 4, 2, 1, 0)
COUNTED = 3
"""Rows of `LENGTHS` with at least two valid tokens."""
SEQ, HIDDEN = 7, 6
VALID = torch.arange(SEQ) < torch.tensor(LENGTHS)[:, None]
COSINES = {1: similarity.token_cosine, 2: partial(similarity.token_cosine, squared=True)}
CONTRAST = ObjectiveConfig(objective="token-contrast")


@pytest.mark.parametrize("as_rate", [False, True])
def test_two_terms_or_rates_of_one_name_are_refused(as_rate, monkeypatch):
    class Twice(MaskedLM):
        rates = (*MaskedLM.rates, Rate("lm_loss", "lm_loss", "predicted")) if as_rate else MaskedLM.rates

        @property
        def terms(self):
            return super().terms if as_rate else (*super().terms, Term("lm_loss", "predicted", "mlm", 0.5))

    monkeypatch.setattr(contract, "objective_class", lambda name: Twice)
    line = "^--objective mlm: 2 of its terms and rates are named 'lm_loss': rename one, or"
    refused(line, contract.make_objective, ObjectiveConfig(objective="mlm"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_and_reduced_in_fp32(dtype):
    logits, labels = torch.randn(4000, 5).to(dtype), torch.randint(5, (4000,))
    loss = masked_lm_sum(logits, labels)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), masked_lm_sum(logits.double(), labels), rtol=1e-6, atol=0)
    hidden = (torch.randn(2, 300, 64) * 30).to(dtype)  # squares beyond fp16
    mask = torch.ones(2, 1, 300, dtype=torch.long)
    for cosine in COSINES.values():
        got = cosine(hidden, mask)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), cosine(hidden.double(), mask), rtol=0, atol=1e-6)


@pytest.mark.parametrize("tokens", [2, 3, 50])
@pytest.mark.parametrize("power", [1, 2])
def test_tcd_equals_the_twin(tokens, power):
    hidden = random(len(LENGTHS), SEQ, HIDDEN)
    token_mask = VALID.long()
    if tokens < 50:  # the last ones, so that the sample is not simply a prefix
        token_mask = token_mask * (VALID.flip(-1).cumsum(-1).flip(-1) <= tokens)
    fast = COSINES[power](hidden, token_mask.unsqueeze(1)).squeeze(1)
    assert fast.shape == (len(LENGTHS),) and fast[COUNTED:].eq(0).all()
    samples = [token_mask[row].nonzero().flatten().tolist() for row in range(COUNTED)]
    slow = torch.stack([twin.tcd(hidden[row], samples[row], power) for row in range(COUNTED)])
    assert_same(fast[:COUNTED], slow, [hidden], atol=1e-12)
    others = VALID.long() - token_mask
    both = COSINES[power](hidden, torch.stack((token_mask, others), 1)).unbind(1)  # as two documents of a row
    torch.testing.assert_close(both, (fast, COSINES[power](hidden, others.unsqueeze(1)).squeeze(1)))
    # Rows with fewer than two tokens and tokens outside the sample get no gradient at all.
    (gradient,) = torch.autograd.grad(fast.sum(), hidden)
    marked = (token_mask > 0) & (torch.tensor(LENGTHS) >= 2)[:, None]
    assert gradient.isfinite().all() and gradient[~marked].eq(0).all() and gradient[marked].abs().sum(-1).gt(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zero_vectors_give_finite_values_and_gradients(dtype):
    hidden = torch.zeros(2, 4, 3, dtype=dtype, requires_grad=True)
    query = torch.zeros(2, 2, 4, 3, dtype=dtype, requires_grad=True)
    valid = torch.ones(2, 4, dtype=torch.bool)
    allowed = (valid.unsqueeze(-1) & valid.unsqueeze(-2)).unsqueeze(1)
    documents = valid.unsqueeze(1)
    values = [
        similarity.token_cosine(hidden, documents.long()),
        similarity.token_cosine(hidden, documents.long(), squared=True),
        similarity.cosine_of_gram(similarity.content_gram(query, query, documents, 1.0)),
        similarity.content_cosine_of_all(query, query, documents),
        similarity.logits_cosine(query @ query.transpose(-1, -2), allowed, documents),
    ]
    for value in values:
        assert value.isfinite().all()
        value.sum().backward()
    assert hidden.grad.isfinite().all() and query.grad.isfinite().all()


ALL = ObjectiveConfig(objective="head-disagreement", objective_options=("value=0.5", "attention=2"))
DOCUMENTS = torch.tensor([[1, 1, 1, 2, 2, 0], [1, 1, 2, 0, 0, 0]])
"""The last document is a single token, which does not count."""


def own_sums(model, batch):
    sums = named_sums(model, batch)
    return {part: sums[f"{part}_disagreement_loss"] for part in PARTS}


def test_documents_of_one_token_do_not_count_and_heads_of_zeros_have_a_gradient():
    assert document_lengths(DOCUMENTS.numpy()).tolist() == [[3, 3, 3, 2, 2, 0], [2, 2, 0, 0, 0, 0]]
    zeros, lengths = torch.zeros(2, 3, 6, 4, requires_grad=True), torch.from_numpy(document_lengths(DOCUMENTS.numpy()))
    agreement("output", Attended(SimpleNamespace(), zeros, lambda x: x.mean(1)), lengths).backward()
    assert zeros.grad is not None and zeros.grad.isfinite().all()


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
    for row, tokens in ((0, [0, 1, 2]), (0, [3, 4]), (1, [0, 1])):
        if part == "attention":
            maps = twin.probabilities(0.5 * query[row] @ key[row].transpose(1, 2) + bias[0], tokens)
            slow = slow - twin.of_maps(maps, tokens)
        else:
            slow = slow - twin.of_vectors((context if part == "output" else value)[row], tokens)
    assert_same(fast, slow, {"attention": [query, key, bias], "output": [context], "value": [value]}[part])
    assert slow > 0


@pytest.mark.parametrize("encoding, local", [("absolute", None), ("ddrp", None), ("rope", 2)])
def test_a_model_sums_its_layers(encoding, local):
    """From each layer's own logits and values, by loops; with local attention, which the second layer has."""
    settings = {"position_encoding": encoding, "local_attention": local}
    model, batch = tiny_model(objective=ALL, **settings), tiny_batch(lengths=(7, 4, 1))
    ours = own_sums(model, batch)
    expected = dict.fromkeys(PARTS, torch.zeros((), dtype=torch.float64))
    state = model.embeddings(Inputs.of(batch, own_draws(model, batch)))
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


def test_an_encoder_is_not_looked_into(monkeypatch):
    model, batch = tiny_model(objective=ALL), tiny_batch()
    plain = encode(tiny_model(), batch)
    monkeypatch.setattr("megatron_ddrp.objectives.masked.agreement", None)
    assert torch.equal(encode(model, batch), plain)


def test_each_part_teaches_what_it_should():
    model, batch = tiny_model(objective=ALL, num_layers=1), tiny_batch()
    attention = dict(model.layers[0].attention.named_parameters())
    maps = ("query", "key", "value", "output")
    learned = {"value": {"value"}, "output": {"query", "key", "value"}, "attention": {"query", "key"}}
    for part, taught in learned.items():
        loss = own_sums(model, batch)[part]
        found = torch.autograd.grad(loss, [attention[f"{name}.weight"] for name in maps], allow_unused=True)
        assert {name for name, g in zip(maps, found, strict=True) if g is not None and g.any()} == taught


def test_weights_choose_the_parts_and_nothing_is_computed_without():
    default = make_objective(ObjectiveConfig(objective="head-disagreement"))
    assert default.parts == ("output",) and default.looks_inside and default.kept_maps == 0
    terms = {term.name: (term.weight, term.per) for term in make_objective(ALL).terms}
    expected = {name: (weight, "sequences") for name, weight in {"value": 0.5, "output": 1.0, "attention": 2.0}.items()}
    assert {name: terms[f"{name}_disagreement_loss"] for name in PARTS} == expected
    none = ObjectiveConfig(objective="head-disagreement", objective_options=("output=0",))
    plain, without = tiny_model(), tiny_model(objective=none)
    assert without.layers[0].attention.judge is None
    batch = tiny_batch()
    assert torch.equal(*(model(batch, own_draws(model, batch)).sums for model in (without, plain)))


def test_the_dry_run_counts_the_maps_that_are_kept():
    part = RankPart(((0,), (0,)), (12, 12), has_head=True, in_flight=1, moments=0, moments_per_element=2)
    model, training = tiny_config(), TrainingConfig(micro_batch_size=4)
    of_outputs = Config(model, ObjectiveConfig(objective="head-disagreement"), training=training)
    runs = (of_outputs, replace(of_outputs, objective=ALL))
    less, more = (activation_bytes(part, Setup.planned(c, 1, "cuda"), 4) for c in runs)
    assert more - less == 2 * (4 * 3 * 7 * 7) * 4  # layers x maps x bytes


def test_wrong_options_are_refused_by_name():
    for name, option, line in (
        ("token-contrast", "margn=1", "takes weight, margin"),
        ("token-contrast", "margin=wide", "'wide' is not a number; give margin=0.5"),
        ("token-contrast", "margin=3", "must lie in"),
        ("token-contrast", "margin", "'' is not a number"),
        ("head-disagreement", "output=-1", "output is -1.0: it must be at least 0"),
        ("mlm", "margin=1", "--objective mlm has no options"),
    ):
        refused(line, ObjectiveConfig, objective=name, objective_options=(option,))


@pytest.mark.parametrize("margin", [0.9, 1.2, 2.0])
def test_the_sum_and_its_gradient_are_those_of_the_loops(margin):
    hidden = torch.randn(3, 6, 5, dtype=torch.float64, requires_grad=True)
    documents = torch.zeros(3, 2, 6, dtype=torch.bool)
    own = {(0, 0): [0, 1, 2, 3], (0, 1): [4, 5], (1, 0): [0, 1, 2], (1, 1): [3], (2, 0): [0]}  # the rest is padding
    for (row, document), tokens in own.items():
        documents[row, document, tokens] = True
    fast = contrast_sum(hidden, documents, margin)
    slow = sum(twin.contrast(hidden[row], tokens, margin) for (row, _), tokens in own.items())
    assert_same(fast, slow, [hidden], atol=1e-12)
    (gradient,) = torch.autograd.grad(slow, hidden)
    assert gradient[0].any() and not gradient[2].any()
    documents = torch.ones(1, 1, 3, dtype=torch.bool)
    assert contrast_sum(torch.ones(1, 3, 4), documents, 0.5).item() == pytest.approx(0.5), "equal tokens"
    zeros = torch.zeros(1, 3, 4, requires_grad=True)
    contrast_sum(zeros, documents, 1.5).backward()
    assert zeros.grad is not None and zeros.grad.isfinite().all()


def test_the_model_gives_it_beside_masked_lm_packing_changes_nothing_and_options_act():
    model, batch = tiny_model(objective=CONTRAST, seq_length=16), tiny_batch(lengths=(7, 4, 2))
    sums, rows = named_sums(model, batch), zip(encode(model, batch), (7, 4, 2), strict=True)
    expected = sum(twin.contrast(hidden, list(range(n)), 0.5) for hidden, n in rows)
    torch.testing.assert_close(sums["contrast_loss"], expected)
    assert sums["lm_loss"] > 0 and sums["contrast_loss"] > 0
    torch.testing.assert_close(named_sums(model, packed_batch(batch, [[0, 2], [1]])), sums)
    changed = ObjectiveConfig(objective="token-contrast", objective_options=("weight=0.2", "margin=0.9"))
    strong = tiny_model(objective=changed, seq_length=16)
    assert {term.name: term.weight for term in strong.head.objective.terms}["contrast_loss"] == 0.2
    more = named_sums(strong, batch)
    assert more["contrast_loss"] > sums["contrast_loss"] and more["lm_loss"] == sums["lm_loss"]
