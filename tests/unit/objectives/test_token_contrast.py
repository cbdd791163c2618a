"""The contrast of tokens against its loop twin, and as an objective: options, weight, padding and packing."""

import pytest
import torch

from megatron_ddrp.config import ObjectiveConfig
from megatron_ddrp.errors import UserError
from megatron_ddrp.model import build_model
from megatron_ddrp.model.stages import Draws
from megatron_ddrp.objectives.masked import contrast_sum
from tests.reference.contrast import contrast
from tests.unit.model.tiny import named_sums, packed_batch, tiny_batch, tiny_config

CONTRAST = ObjectiveConfig(objective="token-contrast")


def contrasting_model(objective=CONTRAST):
    torch.manual_seed(0)
    return build_model(tiny_config(seq_length=16), objective=objective).double()


@pytest.mark.parametrize("margin", [0.9, 1.2, 2.0])
def test_the_sum_and_its_gradient_are_those_of_the_loops(margin):
    torch.manual_seed(1)
    hidden = torch.randn(3, 6, 5, dtype=torch.float64, requires_grad=True)
    documents = torch.zeros(3, 2, 6, dtype=torch.bool)
    own = {(0, 0): [0, 1, 2, 3], (0, 1): [4, 5], (1, 0): [0, 1, 2], (1, 1): [3], (2, 0): [0]}  # the rest is padding
    for (row, document), tokens in own.items():
        documents[row, document, tokens] = True
    fast = contrast_sum(hidden, documents, margin)
    slow = sum(contrast(hidden[row], tokens, margin) for (row, _), tokens in own.items())
    torch.testing.assert_close(fast, slow, rtol=0, atol=1e-12)
    got, expected = (torch.autograd.grad(x, hidden, retain_graph=True)[0] for x in (fast, slow))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    assert expected[0].any() and not expected[2].any()


def test_equal_tokens_reach_the_margin_and_zero_vectors_give_no_nan():
    documents = torch.ones(1, 1, 3, dtype=torch.bool)
    assert contrast_sum(torch.ones(1, 3, 4), documents, 0.5).item() == pytest.approx(0.5)
    zeros = torch.zeros(1, 3, 4, requires_grad=True)
    contrast_sum(zeros, documents, 1.5).backward()
    assert zeros.grad is not None and zeros.grad.isfinite().all()


def test_the_model_gives_it_beside_masked_lm_and_packing_changes_nothing():
    model, batch = contrasting_model(), tiny_batch(lengths=(7, 4, 2))
    none = Draws.none(3, 2)
    sums = named_sums(model, batch, none)
    hidden = model.encode(batch.input_ids, batch.segment_ids, batch.document_ids, batch.position_ids)
    expected = sum(contrast(row, list(range(n)), 0.5) for row, n in zip(hidden, (7, 4, 2), strict=True))
    torch.testing.assert_close(sums["contrast_loss"], expected)
    assert sums["lm_loss"] > 0 and sums["contrast_loss"] > 0
    packed = packed_batch(batch, [[0, 2], [1]])
    draws = Draws(torch.empty(2, 2, 0, dtype=torch.long), none.heads)
    torch.testing.assert_close(named_sums(model, packed, draws), sums)


def test_options_are_read_and_act():
    changed = ObjectiveConfig(objective="token-contrast", objective_options=("weight=0.2", "margin=0.9"))
    weak, strong = (contrasting_model(objective) for objective in (CONTRAST, changed))
    assert {term.name: term.weight for term in strong.head.objective.terms}["contrast_loss"] == 0.2
    batch = tiny_batch()
    sums = [named_sums(model, batch, Draws.none(3, 2)) for model in (weak, strong)]
    assert sums[1]["contrast_loss"] > sums[0]["contrast_loss"] and sums[1]["lm_loss"] == sums[0]["lm_loss"]


@pytest.mark.parametrize(
    "words, line",
    [
        (("margn=1",), "takes weight, margin"),
        (("margin=wide",), "'wide' is not a number; give margin=0.5"),
        (("margin=3",), "must lie in"),
        (("margin",), "'' is not a number"),
    ],
)
def test_wrong_options_are_refused_by_name(words, line):
    with pytest.raises(UserError, match=line):
        ObjectiveConfig(objective="token-contrast", objective_options=words)


def test_an_objective_without_options_takes_none():
    with pytest.raises(UserError, match="--objective mlm has no options"):
        ObjectiveConfig(objective="mlm", objective_options=("margin=1",))
