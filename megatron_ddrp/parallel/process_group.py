"""Ranks: who we are, sums over all of us, and errors that all of us agree on."""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ddrp.errors import UserError

T = TypeVar("T")


class Ranks(NamedTuple):
    """This process among all of the run."""

    rank: int
    world_size: int
    device: torch.device


def _complete_environment() -> None:
    """Give torch the variables that `deepspeed` and `torchrun` set: under plain `python` and under `srun` as well."""
    if "RANK" in os.environ:
        return
    slurm = "SLURM_PROCID" in os.environ and "MASTER_ADDR" in os.environ
    os.environ["RANK"] = os.environ["SLURM_PROCID"] if slurm else "0"
    os.environ["WORLD_SIZE"] = os.environ["SLURM_NTASKS"] if slurm else "1"
    os.environ["LOCAL_RANK"] = os.environ["SLURM_LOCALID"] if slurm else "0"
    if not slurm:
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        with socket.socket() as probe:  # any free port: no other rank has to find it
            probe.bind(("127.0.0.1", 0))
            os.environ["MASTER_PORT"] = str(probe.getsockname()[1])


def start(timeout_minutes: float) -> Ranks:
    """Join the other ranks (nccl on GPUs, gloo on CPUs). Works under `deepspeed`, `torchrun`, `srun` and `python`."""
    _complete_environment()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo", timeout=datetime.timedelta(minutes=timeout_minutes)
        )
    return Ranks(dist.get_rank(), dist.get_world_size(), device)


def stop() -> None:
    """Leave together: without the barrier a fast rank's exit can abort a slow one."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """The sum over all ranks, in place."""
    dist.all_reduce(tensor)
    return tensor


def barrier() -> None:
    """Wait for all ranks."""
    dist.barrier()


def agree(action: Callable[[], T]) -> T:
    """Run `action` on every rank; where it fails with a `UserError` on any, raise that one error on all of them.

    Without this, a rank that stops alone leaves the others waiting at their next collective until the timeout.
    """
    result, message = None, None
    try:
        result = action()
    except UserError as error:
        message = (str(error), error.exit_code)
    messages: list[tuple[str, int] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, message)
    failures = [m for m in messages if m is not None]
    if failures:
        of_all = UserError(*failures[0])
        of_all.agreed = True
        raise of_all
    return result  # type: ignore[return-value]
