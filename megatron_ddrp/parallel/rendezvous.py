"""Meeting of a run's ranks: variables of launchers, and the connection.

The variables tell a process its rank and where the ranks meet. docs/launching.md, "Ports", says where each process
listens.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import ipaddress
import os
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from megatron_ddrp.errors import FAILURE, UserError, print_error, shared_error

_PLACES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)
"""Variables with rank, number of ranks and rank on the host: those of mpirun, which srun may have started, and srun."""
_STEP_SIZES = {"mpirun": "OMPI_COMM_WORLD_SIZE", "srun": "SLURM_STEP_NUM_TASKS", "mpiexec": "PMI_SIZE"}
"""Launcher → its variable with the number of processes that it started."""

_REMEDY = "export MASTER_ADDR and MASTER_PORT before it (mpirun passes them on by -x)"


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
    meeting = {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
    found = [names for names in _PLACES if meeting and {*names} <= os.environ.keys()]
    if not found:
        _refuse_lone_processes()
        _refuse_missing_srun()
    place = [os.environ[name] for name in found[0]] if found else ["0", "1", "0"]
    os.environ.update(zip(("RANK", "WORLD_SIZE", "LOCAL_RANK"), place, strict=True))


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
            remedy = "use deepspeed or torchrun" if launcher == "mpiexec" else _REMEDY
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


SIGN_OF_LIFE = 30.0
"""Seconds of waiting after which a host's first rank says for whom it waits."""

SHORTLY = datetime.timedelta(seconds=10)
"""Time for what should be there at once: the other ranks' reading, a name server's answer, rank 0's own port."""

NOT_CONNECTED = (
    "look above for another rank's own message; with several networks, name one by GLOO_SOCKET_IFNAME; let no firewall "
    "be between the hosts (docs/launching.md)"
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
    wait_for_all(store, rank, world_size, timeout)
    refuse_other_devices(store, rank, world_size, backend)
    with connecting(timeout):
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def wait_until(done: Callable[[], bool], timeout: datetime.timedelta, whom: Callable[[], str]) -> bool:
    """Ask `done` until it says yes, and return True; after the timeout return False or raise its last `OSError`.

    After `SIGN_OF_LIFE` a line says that this process waits for `whom`.
    """
    began, silent = time.monotonic(), os.environ.get("LOCAL_RANK", "0") != "0"
    while True:
        waited = time.monotonic() - began
        try:
            if (is_done := done()) or waited > timeout.total_seconds():
                return is_done
        except OSError:
            if waited > timeout.total_seconds():
                raise
        if waited > SIGN_OF_LIFE and not silent:
            print(f"waiting for {whom()} …", flush=True)
            silent = True
        time.sleep(0.1)


def wait_for_all(store: dist.Store, rank: int, world_size: int, timeout: datetime.timedelta) -> None:
    """Wait at the store until all ranks have come; raise a `UserError` that names those that have not in time.

    gloo and NCCL connect the ranks after that. On their own they would name nobody.
    """

    def came() -> list[int]:
        return [number for number in range(world_size) if store.check([f"host of {number}"])]

    def absent() -> str:
        numbers = [str(number) for number in sorted({*range(world_size)} - {*came()})]
        more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
        return f"rank{'s' * (len(numbers) > 1)} {', '.join(numbers[:8])}{more}"

    def is_decided() -> bool:
        return store.check(["verdict"]) or store.add("number of ranks", 0) >= world_size

    store.set(f"host of {rank}", socket.gethostname())
    store.add("number of ranks", 1)
    if not wait_until(is_decided, timeout, absent):
        hosts = sorted({store.get(f"host of {number}").decode() for number in came()})
        store.set(
            "verdict",
            f"{absent()} did not come within {_minutes(timeout)}; the others are on {', '.join(hosts)}: look above for "
            "ssh's or that rank's own message; each host needs the environment and the project at the same path",
        )
    if store.check(["verdict"]):
        verdict = store.get("verdict").decode()
        let_all_read(store, rank, store.add("number of ranks", 0))
        raise shared_error(verdict)


def let_all_read(store: dist.Store, rank: int, readers: int) -> None:
    """Let rank 0, which hosts the store, leave it last: the others would print C++ frames and not know why."""
    store.add("readers", 1)
    if rank == 0:
        wait_until(lambda: store.add("readers", 0) >= readers, SHORTLY, lambda: "the other ranks")


def _minutes(timeout: datetime.timedelta) -> str:
    return f"{timeout.total_seconds() / 60:g} minutes (--distributed-timeout-minutes)"


@contextlib.contextmanager
def connecting(timeout: datetime.timedelta) -> Iterator[None]:
    """End this process in one line if the block, in which the ranks connect, takes longer than the timeout.

    gloo waits five times as long for a first connection, and nothing can interrupt it.
    """

    def end() -> None:
        print_error(
            f"rank {os.environ['RANK']} could not connect to all other ranks within {_minutes(timeout)}, though all "
            f"came; {NOT_CONNECTED}",
            None,
        )
        os._exit(FAILURE)

    watchdog = threading.Timer(timeout.total_seconds(), end)
    watchdog.daemon = True
    watchdog.start()
    try:
        yield
    finally:
        watchdog.cancel()


def refuse_other_devices(store: dist.Store, rank: int, world_size: int, backend: str) -> None:
    """Refuse ranks with a GPU (`nccl`) beside ranks without one (`gloo`), which would wait for each other in vain."""
    store.set(f"backend of {rank}", f"{backend} {socket.gethostname()}")
    found = store.multi_get([f"backend of {number}" for number in range(world_size)])  # waits for the last rank
    lines = [line.decode() for line in found]
    if all(line.startswith(backend) for line in lines):
        return
    let_all_read(store, rank, world_size)
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
    """Connect to the store at MASTER_ADDR:MASTER_PORT; rank 0 hosts it.

    Python's own sockets wait for it first, because torch's take twice the timeout and print C++ frames.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    short, descriptor, whom = min(timeout, SHORTLY), None, lambda: f"rank 0 at {address}:{port}"

    def answers() -> bool:
        with socket.create_connection((address, port), 5):
            return True

    try:
        wait_until(lambda: bool(socket.getaddrinfo(address, port)), short, whom)
        if rank == 0:
            descriptor = (listen(address, port) or _listen_everywhere(port)).detach()
        wait_until(answers, timeout if rank else short, whom)
    except OSError as error:
        remedy = "rank 0 did not come, has another --master_addr or --master_port, or a firewall hides it: look above"
        if isinstance(error, socket.gaierror):
            remedy = "give --master_addr (MASTER_ADDR) a name or address of rank 0's host that this host knows"
        elif error.errno in (errno.EADDRINUSE, errno.EACCES):
            remedy = "give a free --master_port"
        elif rank == 0:
            remedy = "--master_addr (MASTER_ADDR) must be an address of this host, which has rank 0"
        raise UserError(
            f"rank {rank} (host {socket.gethostname()}) cannot meet the other ranks: {address}:{port}: "
            f"{error.strerror or error}; {remedy}"
        ) from error
    return dist.TCPStore(address, port, world_size, rank == 0, timeout, False, master_listen_fd=descriptor)


def _listen_everywhere(port: int) -> socket.socket:
    """Return a socket that listens on every interface, by IPv6 too where this machine has it."""
    both = socket.has_dualstack_ipv6()
    return socket.create_server(("", port), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both)


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
