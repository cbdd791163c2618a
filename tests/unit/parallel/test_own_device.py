"""The GPU of a rank, by the number of GPUs that the launcher lets it see. Without a GPU: torch's answers are set."""

import os

import pytest
import torch

from megatron_ddrp.errors import UserError
from megatron_ddrp.parallel.process_group import own_device


@pytest.fixture
def host(monkeypatch):
    """Return a function that sets the number of GPUs that torch sees, and the variables of the launcher."""

    def show(gpus, **variables):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "get_arch_list", list)
        monkeypatch.delenv("SLURM_LOCALID", raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return show


def test_each_rank_has_the_gpu_of_its_number(host):
    host(8, LOCAL_RANK="3", SLURM_LOCALID="3")
    assert own_device(3) == torch.device("cuda", 3)
    assert os.environ["LOCAL_RANK"] == "3"


def test_slurm_shows_each_rank_its_own_gpu_as_number_0(host):
    host(1, LOCAL_RANK="3", SLURM_LOCALID="3")
    assert own_device(3) == torch.device("cuda", 0)
    assert os.environ["LOCAL_RANK"] == "0"  # DeepSpeed takes its device from there


@pytest.mark.parametrize(
    ("gpus", "variables", "expected"),
    [
        (1, {}, "sees 1 GPU, and each rank needs its own: start at most 1 per host"),
        (1, {"SLURM_LOCALID": "0"}, "sees 1 GPU, "),  # torchrun, started once per host by srun
        (2, {"SLURM_LOCALID": "2"}, "sees 2 GPUs, .* at most 2 per host"),
    ],
)
def test_more_ranks_than_gpus_end_in_one_line(host, gpus, variables, expected):
    host(gpus, LOCAL_RANK="2", **variables)
    with pytest.raises(UserError, match=f"^rank 2 of this host {expected}"):
        own_device(2)


def test_without_a_gpu_every_rank_has_the_cpu(host):
    host(0, LOCAL_RANK="2")
    assert own_device(2) == torch.device("cpu")
