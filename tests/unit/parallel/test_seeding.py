"""The seed of dropout gives the draws of `torch.manual_seed`."""

import pytest
import torch

from megatron_ddrp.parallel.pipeline import seed_draws


@pytest.mark.parametrize("seed", [0, 1234, 2**63 - 1])
def test_draws_follow_the_seed_as_those_of_torch(seed: int) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        expected = torch.rand(9)
        seed_draws(seed, torch.device("cpu"))
        assert torch.equal(torch.rand(9), expected)
        assert not torch.equal(torch.rand(9), expected)
