"""Bit sums and the comparison of weights between ranks; whole replays are in tests/integration/test_faults.py."""

import pytest
import torch

from megatron_ddrp.engine.proofs import bit_sum, refuse_other_weights
from megatron_ddrp.errors import UserError


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_any_flipped_bit_changes_the_sum(dtype: torch.dtype) -> None:
    size = dtype.itemsize
    for bit in range(8 * size):
        numbers = torch.linspace(-3, 3, 12, dtype=dtype).view(3, 4).t()
        before = bit_sum(numbers)
        flat = numbers.t().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[size]).view(-1)
        flat[5] ^= 1 << bit if bit < 8 * size - 1 else -(1 << bit)
        assert bit_sum(numbers) != before, bit


def test_the_sum_does_not_depend_on_the_order_or_the_strides() -> None:
    numbers = torch.randn(5, 7)
    assert bit_sum(numbers) == bit_sum(numbers.t()) == bit_sum(numbers.flip(0)) == bit_sum(numbers.clone())
    assert bit_sum(torch.ones(()).expand(3, 4)) == 12 * bit_sum(torch.ones(()))


def told(*sums: int) -> list[tuple[str, dict[str, int]]]:
    """Return what ranks tell about two weights, of which the second is theirs alone."""
    return [(f"host{rank}", {"norm.weight": own, f"part {rank}": rank}) for rank, own in enumerate(sums)]


def test_equal_weights_and_weights_of_one_rank_are_accepted() -> None:
    refuse_other_weights(told(4, 4, 4), 0)
    refuse_other_weights([("host0", {}), ("host1", {})], 0)


@pytest.mark.parametrize(
    ("sums", "named"),
    [
        ((4, 5), "rank 0 (host host0) and rank 1 (host host1) hold"),
        ((4, 4, 5), "rank 2 (host host2) holds"),
        ((6, 4, 4, 4, 5), "rank 0 (host host0) and rank 4 (host host4) hold"),
        ((4, 5, 6), "rank 0 (host host0) and rank 1 (host host1) and rank 2 (host host2) hold"),
    ],
)
def test_a_majority_of_ranks_is_right(sums: tuple[int, ...], named: str) -> None:
    with pytest.raises(UserError) as refusal:
        refuse_other_weights(told(*sums), 7)
    assert str(refusal.value).startswith(f"{named} other bits of norm.weight than the ranks that share it: ")
    assert "a checkpoint of step 7 or earlier into DIR/latest" in str(refusal.value)
    assert refusal.value.agreed
