"""`spread` against an index gather, `collect_values` as its exact adjoint, in every shape, layout and precision."""

import pytest
import torch

from megatron_ddrp.model.attention.logits import collect_values, spread, spread_values
from megatron_ddrp.model.positions import PositionTerms

pytestmark = pytest.mark.usefixtures("torch_seed")
BOUNDS = [(0, 0), (-1, 1), (-3, 3), (-4, 3), (-1, 6), (0, 5), (-5, 0), (-20, 20)]
LENGTHS = [1, 2, 3, 7, 8, 19]


def gather(per_offset, lowest, highest):
    """The definition: entry (i, j) is column clip(i − j, lowest, highest) − lowest."""
    n = per_offset.shape[-2]
    place = torch.arange(n)
    column = (place[:, None] - place).clamp(lowest, highest) - lowest
    return per_offset.gather(-1, column.expand(*per_offset.shape[:-2], n, n))


@pytest.mark.parametrize("lowest, highest", BOUNDS)
@pytest.mark.parametrize("n", LENGTHS)
def test_spread_equals_a_gather_in_values_and_gradients(n, lowest, highest):
    per_offset = torch.randn(2, 3, n, highest - lowest + 1, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 3, n, n, dtype=torch.float64)
    fast, slow = spread(per_offset, lowest, highest), gather(per_offset, lowest, highest)
    assert torch.equal(fast, slow)
    (fast_gradient,) = torch.autograd.grad((fast * weight).sum(), per_offset)
    (slow_gradient,) = torch.autograd.grad((slow * weight).sum(), per_offset)
    torch.testing.assert_close(fast_gradient, slow_gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize("lowest, highest", BOUNDS)
@pytest.mark.parametrize("n", LENGTHS)
def test_collect_is_the_adjoint_of_spread(n, lowest, highest):
    num_relative = highest - lowest + 1
    per_offset = torch.randn(4, n, num_relative, dtype=torch.float64)
    per_pair = torch.randn(4, n, n, dtype=torch.float64)
    left = (spread_values(per_offset, highest) * per_pair).sum()
    right = (per_offset * collect_values(per_pair, num_relative, highest)).sum()
    torch.testing.assert_close(left, right, rtol=0, atol=1e-11)


@pytest.mark.parametrize("n, lowest, highest", [(5, -2, 1), (3, -6, 4), (4, 0, 0)])
def test_gradcheck(n, lowest, highest):
    per_offset = torch.randn(2, n, highest - lowest + 1, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda p: spread(p, lowest, highest), per_offset)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(2, 6, 3, 8).transpose(1, 2),  # heads after the sequence in memory
        lambda: torch.randn(2, 3, 8, 6).transpose(-1, -2),
        lambda: torch.randn(2, 3, 6, 8).flip(-1)[..., ::1],
        lambda: torch.randn(1, 1, 6, 8).expand(2, 3, 6, 8),
        lambda: torch.randn(2, 3, 12, 16)[..., ::2, ::2],
        lambda: torch.randn(6, 2, 3, 8).movedim(0, 2),
    ],
)
def test_memory_layout_does_not_matter(make):
    per_offset = make()
    assert torch.equal(spread(per_offset, -4, 3), gather(per_offset, -4, 3))
    per_pair = torch.randn(2, 6, 3, 6).transpose(1, 2)
    assert torch.equal(collect_values(per_pair, 8, 3), collect_values(per_pair.contiguous(), 8, 3))


def test_inputs_are_left_alone():
    per_offset, per_pair = torch.randn(2, 6, 8), torch.randn(2, 6, 6)
    copies = per_offset.clone(), per_pair.clone()
    spread(per_offset, -4, 3).add_(1.0)
    collect_values(per_pair, 8, 3).add_(1.0)
    assert torch.equal(per_offset, copies[0]) and torch.equal(per_pair, copies[1])


@pytest.mark.parametrize("dtype, rounding", [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_half_precision_moves_exactly_and_sums_in_fp32(dtype, rounding):
    per_offset = torch.randn(2, 40, 31).to(dtype)
    assert torch.equal(spread(per_offset, -15, 15), gather(per_offset, -15, 15))
    per_pair = torch.randn(2, 400, 400)
    per_pair = (per_pair - per_pair.mean(-1, keepdim=True)).to(dtype)  # rows that cancel, as softmax gradients do
    exact = collect_values(per_pair.double(), 31, 15)
    # One rounding at the end of each sum, not a difference of rounded sums.
    torch.testing.assert_close(collect_values(per_pair, 31, 15).double(), exact, rtol=2 * rounding, atol=1e-3)


def test_half_precision_gives_no_gradient_to_offsets_that_do_not_occur():
    per_pair = torch.randn(8, 40, 40).bfloat16()
    ends = collect_values(per_pair, 2 * 60 - 1, 59)[..., [0, -1]]
    assert ends.abs().max() < 1e-4


def test_bounds_without_a_row_for_offset_zero_are_refused():
    for lowest, highest in [(1, 3), (-3, -1)]:
        with pytest.raises(AssertionError, match="offset 0"):
            spread(torch.zeros(4, 3), lowest, highest)
        with pytest.raises(AssertionError, match="offset 0"):
            PositionTerms(1.0, lowest=lowest, highest=highest)
    with pytest.raises(AssertionError):
        spread(torch.zeros(4, 6), -3, 3)
