"""Masked-LM sums against the loop twin."""

import pytest
import torch

from megatron_ddrp.config import ObjectiveConfig
from megatron_ddrp.data.batches.batch import IGNORED_LABEL
from megatron_ddrp.errors import UserError
from megatron_ddrp.model import build_model
from megatron_ddrp.model.heads import masked_lm_sum
from megatron_ddrp.objectives import contract
from megatron_ddrp.objectives.contract import Rate, Term, losses_of
from megatron_ddrp.objectives.masked import MaskedLM
from tests.reference import losses
from tests.unit.model.tiny import encode, named_sums, some_draws, tiny_batch, tiny_config


def test_sum_equals_the_twin_in_values_and_gradients():
    torch.manual_seed(0)
    logits = (torch.randn(6, 9, dtype=torch.float64) * 5).requires_grad_()
    labels = torch.tensor([0, 8, IGNORED_LABEL, 3, 3, IGNORED_LABEL])
    fast, slow = masked_lm_sum(logits, labels), losses.masked_lm(logits, labels)
    torch.testing.assert_close(fast, slow, rtol=1e-13, atol=0)
    (got,), (expected,) = torch.autograd.grad(fast, logits), torch.autograd.grad(slow, logits)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("as_rate", [False, True])
def test_two_terms_or_rates_of_one_name_are_refused(as_rate, monkeypatch):
    class Twice(MaskedLM):
        rates = (*MaskedLM.rates, Rate("lm_loss", "lm_loss", "predicted")) if as_rate else MaskedLM.rates

        @property
        def terms(self):
            return super().terms if as_rate else (*super().terms, Term("lm_loss", "predicted", "mlm", 0.5))

    monkeypatch.setattr(contract, "objective_class", lambda name: Twice)
    with pytest.raises(
        UserError, match="^--objective mlm: 2 of its terms and rates are named 'lm_loss': rename one, or"
    ):
        contract.make_objective.__wrapped__(ObjectiveConfig(objective="mlm"))


def test_minus_infinity_at_padding_counts_as_nothing():
    logits = torch.randn(4, 6, dtype=torch.float64)
    padded = torch.cat((logits, torch.full((4, 3), float("-inf"), dtype=torch.float64)), 1)
    labels = torch.tensor([0, 5, 2, 2])
    torch.testing.assert_close(masked_lm_sum(padded, labels), losses.masked_lm(logits, labels), rtol=1e-13, atol=0)


def test_no_predicted_position_is_zero():
    logits = torch.randn(0, 6, requires_grad=True)
    loss = masked_lm_sum(logits, torch.empty(0, dtype=torch.long))
    loss.backward()
    assert loss == 0 and logits.grad.shape == (0, 6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_fp32(dtype):
    torch.manual_seed(0)
    logits, labels = torch.randn(4000, 5).to(dtype), torch.randint(5, (4000,))
    loss = masked_lm_sum(logits, labels)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), masked_lm_sum(logits.double(), labels), rtol=1e-6, atol=0)


@pytest.mark.parametrize("right", [0, 1, 3])
def test_accuracy_counts_the_predicted_tokens_whose_likeliest_piece_is_the_label(right):
    torch.manual_seed(0)
    batch = tiny_batch()
    model = build_model(tiny_config(), objective=ObjectiveConfig(objective="mlm"))
    places = (batch.labels != IGNORED_LABEL).nonzero().tolist()
    assert len(places) > 3
    for number, (row, column) in enumerate(places):
        best = int(model.head.logits(encode(model, batch)[row, column]).argmax())
        batch.labels[row, column] = best if number < right else (best + 1) % model.head.vocab_size
    sums = named_sums(model, batch, some_draws(batch))
    assert sums["lm_correct"] == right
    row = losses_of(
        {**{name: x.item() for name, x in sums.items()}, "predicted": len(places), "sequences": 1, "tokens": 9},
        model.head.objective,
    )
    assert row["lm_accuracy"] == pytest.approx(right / len(places))
