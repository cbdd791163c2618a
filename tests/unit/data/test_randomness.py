"""Counter-based draws: pure, uniform, independent of how they are asked for; the shuffle is a bijection."""

import numpy as np
import pytest
from scipy import stats

from megatron_ddrp.data.randomness import fold_in, hash_uint64, permute, to_unit


def test_values_are_frozen():
    """A change of these numbers changes every run's data: it must be a decision, not a side effect."""
    draws = hash_uint64(1234, "mask-order", 3, np.array([0, 1]))
    assert draws.tolist() == [1074841977364916073, 11525570127649832071]
    assert permute(np.arange(7), 7, 1234, "shuffle", 0).tolist() == [0, 6, 5, 2, 4, 3, 1]


def test_draws_are_elementwise_functions_of_their_counters():
    grid = hash_uint64(1, "p", np.arange(4)[:, None], np.arange(5))
    assert grid.shape == (4, 5) and grid.dtype == np.uint64
    assert grid[2, 3] == hash_uint64(1, "p", 2, 3)
    assert hash_uint64(1, "p", 2, 3).shape == ()
    assert np.array_equal(grid, fold_in(hash_uint64(1, "p", np.arange(4))[:, None], np.arange(5)))
    assert hash_uint64(1, "p", np.arange(0)).shape == (0,)


def test_seed_purpose_and_every_counter_matter():
    draws = [
        hash_uint64(seed, purpose, a, b)
        for seed in (0, 1, -1, 2**70)
        for purpose in ("p", "q", "")
        for a in range(3)
        for b in range(3)
    ]
    assert len({int(draw) for draw in draws}) == len(draws)


def test_no_overflow_warnings():
    with np.errstate(all="raise"):
        hash_uint64(2**63, "p", 2**62, np.array([2**62]))


def test_uniform_is_uniform_and_uncorrelated():
    draws = to_unit(hash_uint64(7, "test", np.arange(200)[:, None], np.arange(500)))
    assert draws.min() >= 0 and draws.max() < 1
    assert stats.kstest(draws.ravel(), "uniform").pvalue > 1e-4
    for first, second in ((draws[:, :-1], draws[:, 1:]), (draws[:-1], draws[1:])):
        assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.02
    bits = np.unpackbits(hash_uint64(7, "bits", np.arange(20_000)).view(np.uint8)).reshape(20_000, 64).mean(axis=0)
    assert np.all(np.abs(bits - 0.5) < 0.02)


@pytest.mark.parametrize("size", [*range(1, 34), 97, 127, 128, 129, 255, 256, 257, 1009, 4096, 65_537])
def test_permute_is_a_bijection(size):
    place = permute(np.arange(size), size, 5, "shuffle", 2)
    assert place.dtype == np.int64
    assert np.array_equal(np.sort(place), np.arange(size))
    some = np.arange(size)[:: max(1, size // 7)]
    assert np.array_equal(permute(some, size, 5, "shuffle", 2), place[some]), "a place does not depend on the others"


def test_permute_handles_huge_ranges_at_single_points():
    size = 10**12 + 39
    place = permute(np.arange(1000), size, 5, "shuffle", 0)
    assert np.unique(place).size == 1000 and place.min() >= 0 and place.max() < size
    assert stats.kstest(place / size, "uniform").pvalue > 1e-4


def test_permute_epochs_seeds_and_purposes_differ():
    base = permute(np.arange(1000), 1000, 5, "shuffle", 0)
    for other in (("shuffle", 1, 5), ("shuffle", 0, 6), ("valid", 0, 5)):
        purpose, epoch, seed = other
        assert np.mean(permute(np.arange(1000), 1000, seed, purpose, epoch) == base) < 0.02
    both = permute(np.arange(1000) % 500, 500, 5, "shuffle", np.arange(1000) // 500)
    assert np.array_equal(both[500:], permute(np.arange(500), 500, 5, "shuffle", 1)), "epochs may be an array"


@pytest.mark.parametrize("size", [2, 3, 7, 16, 61])
def test_permute_places_are_uniform_over_epochs(size):
    epochs = 3000
    place = permute(np.arange(size), size, 11, "shuffle", np.arange(epochs)[:, None])  # [epochs, size]
    for index in {0, size // 2, size - 1}:
        counts = np.bincount(place[:, index], minlength=size)
        assert stats.chisquare(counts).pvalue > 1e-5


def test_permute_neighbours_are_scattered():
    size = 10_000
    place = permute(np.arange(size), size, 1, "shuffle", 0)
    assert abs(np.corrcoef(np.arange(size), place)[0, 1]) < 0.05
    assert abs(np.corrcoef(place[:-1], place[1:])[0, 1]) < 0.05


@pytest.mark.parametrize("index", [-1, 5])
def test_permute_refuses_indices_outside_the_range(index):
    with pytest.raises(ValueError, match=r"expected within \[0, 5\)"):
        permute([index], 5, 0, "shuffle", 0)
