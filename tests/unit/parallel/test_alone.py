"""The process group of a single rank: without a port where torch's backend for it copies, else the real one."""

import datetime

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version

from megatron_ddrp.parallel import rendezvous


@pytest.fixture
def join_alone(monkeypatch):
    """Form the group as `start` does for one process; returns the backend's name. The group is gone after the test."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)

    def join():
        rendezvous.join("gloo", datetime.timedelta(seconds=60))
        return dist.get_backend()

    yield join
    if dist.is_initialized():
        dist.destroy_process_group()


def test_one_rank_needs_no_real_backend_from_torch_2_13_on(join_alone):
    assert join_alone() == ("fake" if Version(torch.__version__) >= Version("2.13") else "gloo")


@pytest.mark.parametrize(
    "call", ["all_gather_into_tensor", "reduce_scatter_tensor", "reduce_scatter", "all_to_all_single"]
)
def test_a_call_that_copies_nothing_is_not_trusted(join_alone, monkeypatch, call):
    real = getattr(dist, call)
    monkeypatch.setattr(dist, call, lambda *arguments, **options: None)
    assert join_alone() == "gloo"
    monkeypatch.setattr(dist, call, real)
    total = torch.ones(2)
    dist.all_reduce(total)
    assert total.tolist() == [1.0, 1.0]
