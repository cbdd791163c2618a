"""Masked-LM sums against the loop twin."""

import pytest
import torch

from megatron_ddrp.data.batches.batch import IGNORED_LABEL
from megatron_ddrp.model.heads import masked_lm_sum
from tests.reference import losses


def test_sum_equals_the_twin_in_values_and_gradients():
    torch.manual_seed(0)
    logits = (torch.randn(6, 9, dtype=torch.float64) * 5).requires_grad_()
    labels = torch.tensor([0, 8, IGNORED_LABEL, 3, 3, IGNORED_LABEL])
    fast, slow = masked_lm_sum(logits, labels), losses.masked_lm(logits, labels)
    torch.testing.assert_close(fast, slow, rtol=1e-13, atol=0)
    (got,), (expected,) = torch.autograd.grad(fast, logits), torch.autograd.grad(slow, logits)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-13)


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
