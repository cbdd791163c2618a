"""Ranks that see a GPU and ranks that see none do not wait for each other."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from megatron_ddrp.errors import UserError
from megatron_ddrp.parallel.rendezvous import refuse_other_devices


def outcomes(*backends: str) -> list[UserError | None]:
    """Return the error of each rank, or None; all ranks share one store."""
    store = dist.HashStore()

    def meet(rank: int) -> UserError | None:
        try:
            refuse_other_devices(store, rank, len(backends), backends[rank])
        except UserError as error:
            return error
        return None

    with ThreadPoolExecutor(len(backends)) as pool:
        return list(pool.map(meet, range(len(backends))))


@pytest.mark.parametrize("backends", [("nccl", "gloo"), ("gloo", "nccl"), ("nccl", "gloo", "nccl")])
def test_ranks_on_other_devices_are_refused_on_every_rank(backends: tuple[str, ...]) -> None:
    for error in outcomes(*backends):
        assert error is not None and error.agreed
        assert f"a GPU on some ranks but none on {socket.gethostname()}, and" in str(error)


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_ranks_on_one_kind_of_device_meet(backend: str) -> None:
    assert outcomes(backend, backend) == [None, None]
