"""Connection of a run's processes. docs/launching.md, "Ports", says where each process listens."""

from __future__ import annotations

import contextlib
import datetime
import errno
import ipaddress
import os
import socket
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from megatron_ddrp.errors import UserError, shared_error

_STEP_SIZES = {"srun": "SLURM_STEP_NUM_TASKS", "mpirun": "OMPI_COMM_WORLD_SIZE", "mpiexec": "PMI_SIZE"}
"""Launcher → its variable with the number of processes that it started."""


def complete_environment() -> None:
    """Set the variables that `deepspeed` and `torchrun` set for torch, also under plain `python` and `srun`.

    Raises:
        UserError: some of the variables are set by hand and others are missing or no numbers, a launcher started
            several processes that cannot meet (each would train alone), or a batch script of several tasks started one
            process without `srun`, which would wait for the others forever.
    """
    if "RANK" in os.environ:
        _check_variables()
        return
    slurm = {"SLURM_STEP_NUM_TASKS", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
    if not slurm:
        _refuse_lone_processes()
        _refuse_missing_srun()
    os.environ["RANK"] = os.environ["SLURM_PROCID"] if slurm else "0"
    os.environ["WORLD_SIZE"] = os.environ["SLURM_NTASKS"] if slurm else "1"
    os.environ["LOCAL_RANK"] = os.environ["SLURM_LOCALID"] if slurm else "0"


def _check_variables() -> None:
    """Refuse a RANK without the variables that belong to it. With one rank, LOCAL_RANK may be missing."""
    names = ["RANK", "WORLD_SIZE"]
    if os.environ.get("WORLD_SIZE") != "1":
        names += ["LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"]
    for name in names:
        value = os.environ.get(name)
        if value is None:
            raise UserError(f"{name} is not set, but RANK is: let deepspeed or torchrun set both, or set none")
        if name != "MASTER_ADDR" and not value.isdecimal():
            raise UserError(f"{name} is {value!r}, not a number: let deepspeed or torchrun set it")


def _refuse_lone_processes() -> None:
    """Refuse several processes of a launcher that have no place to meet."""
    for launcher, name in _STEP_SIZES.items():
        if (count := os.environ.get(name, "1")) != "1":
            remedy = (
                "export MASTER_ADDR and MASTER_PORT before it" if launcher == "srun" else "use deepspeed or torchrun"
            )
            raise shared_error(
                f"{launcher} started {count} processes, and each would run alone, as they have no address to meet: "
                f"{remedy} (docs/launching.md)"
            )


def _refuse_missing_srun() -> None:
    """Refuse a batch script of several tasks that is meant to meet but did not use `srun`."""
    tasks = os.environ.get("SLURM_NTASKS", "1")
    if tasks != "1" and "MASTER_ADDR" in os.environ:
        raise UserError(
            f"the job has {tasks} tasks, but srun did not start this process, so it would wait for the others: put "
            "srun before the command, or unset MASTER_ADDR for one process alone (docs/launching.md)"
        )


def join(backend: str, timeout: datetime.timedelta) -> None:
    """Form the process group: one rank needs no port, several use a store at MASTER_ADDR."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if _is_loopback(os.environ.get("MASTER_ADDR", "localhost")) and "lo" in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine, so listen to no other
    if world_size == 1:
        _join_alone(backend, timeout)
        return
    store: dist.Store
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun itself hosts the store
        store, _, _ = next(rendezvous("env://", timeout=timeout))
        store = dist.PrefixStore("default_pg", store)
    else:
        store = _open_store(rank, world_size, timeout)
    refuse_other_devices(store, rank, world_size, backend)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def refuse_other_devices(store: dist.Store, rank: int, world_size: int, backend: str) -> None:
    """Refuse ranks with a GPU (`nccl`) beside ranks without one (`gloo`), which would wait for each other in vain."""
    store.set(f"backend of {rank}", f"{backend} {socket.gethostname()}")
    found = store.multi_get([f"backend of {number}" for number in range(world_size)])  # waits for the last rank
    lines = [line.decode() for line in found]
    if all(line.startswith(backend) for line in lines):
        return
    if store.add("readers", 1) == world_size:
        store.set("all have read", "")
    if rank == 0:  # it hosts the store, so it leaves last
        with contextlib.suppress(RuntimeError):
            store.wait(["all have read"], datetime.timedelta(seconds=30))
    hosts = sorted({line.split()[1] for line in lines if line.startswith("gloo")})
    raise shared_error(
        f"torch sees a GPU on some ranks but none on {', '.join(hosts)}, and all ranks need the same: check nvidia-smi "
        "and torch.cuda.is_available() there, or set CUDA_VISIBLE_DEVICES= on all hosts to train on CPUs"
    )


def _join_alone(backend: str, timeout: datetime.timedelta) -> None:
    """Form a process group of one rank with torch's backend without communication; any other backend opens a port.

    With one rank, each collective call must copy its input to its output. Some versions of torch do not do so for all
    of them; then the real backend is used.
    """
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers it

    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=1)
    if not _copies_to_itself():
        dist.destroy_process_group()
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)


def _copies_to_itself() -> bool:
    """Return whether the collective calls of DeepSpeed and of this package return a single rank's own input."""
    given = torch.arange(1.0, 5.0)
    calls: tuple[Callable[[Tensor], object], ...] = (
        lambda got: dist.all_gather_into_tensor(got, given),
        lambda got: dist.all_gather([got], given),
        lambda got: dist.reduce_scatter_tensor(got, given.clone()),
        lambda got: dist.reduce_scatter(got, [given.clone()]),
        lambda got: dist.all_to_all_single(got, given),
        lambda got: dist.all_reduce(got.copy_(given)),
        lambda got: dist.broadcast(got.copy_(given), 0),
    )
    outputs = [torch.zeros(4) for _ in calls]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the newer names do not exist in torch 2.11
        for call, got in zip(calls, outputs, strict=True):
            call(got)
    return all(torch.equal(got, given) for got in outputs)


def _open_store(rank: int, world_size: int, timeout: datetime.timedelta) -> dist.TCPStore:
    """Connect to the store at MASTER_ADDR:MASTER_PORT; rank 0 hosts it."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    listener = None
    if rank == 0:
        try:
            listener = listen(address, port)
        except OSError as error:
            raise UserError(
                f"rank 0 cannot meet the other ranks: {address}:{port}: {error.strerror}; give a free --master_port"
            ) from error
    descriptor = listener.detach() if listener else None
    return dist.TCPStore(address, port, world_size, rank == 0, timeout, master_listen_fd=descriptor)


def listen(address: str, port: int) -> socket.socket | None:
    """Return a socket that listens at one address, or None if the store must listen on every interface.

    That is so if the address belongs to another machine that forwards to this one, or if a host name means the loopback
    interface on this machine only, as in Debian's /etc/hosts. Raise `OSError` if the port is taken.
    """
    family, kind, protocol, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    if ipaddress.ip_address(place[0]).is_loopback and not _is_loopback(address):
        return None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen()
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            return None
        raise
    return listener


def _is_loopback(address: str) -> bool:
    """Return whether an address means the machine that uses it: `localhost`, 127.0.0.1, ::1."""
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:  # a host name
        return False
