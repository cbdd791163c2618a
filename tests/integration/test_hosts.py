"""Ranks that do not meet end with one line that says why; a host that vanishes ends the run on the other, and the same
command resumes; nobody else can reach a run from the network.
"""

import ctypes
import datetime
import functools
import ipaddress
import os
import re
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from packaging.version import Version
from torch import distributed

from megatron_ddrp.parallel import rendezvous
from megatron_ddrp.parallel.rendezvous import listen
from megatron_ddrp.run import run_folder
from tests.integration.conftest import Flags
from tests.integration.hosts import INTERFACE, Host
from tests.integration.launch import Hold, Result, armed, free_port, lines, start_ranks, training_rows

SECONDS = 12
"""Time that ranks get to meet, where nothing but waiting can show that one will not come."""
NEW_NETWORK, NEW_MOUNTS, NEW_NAMES = 0x40000000, 0x20000, 0x4000000
BIND, RECURSIVE, PRIVATE = 0x1000, 0x4000, 0x40000
"""Flags of Linux's `unshare` and `mount`."""


def without(rank: int, **variables: str) -> None:
    """Let all ranks but this one run, with other variables than the launcher's; they soon say for whom they wait."""
    if os.environ["RANK"] == str(rank):
        os._exit(0)
    os.environ.update(variables)
    rendezvous.SIGN_OF_LIFE = 1.0


def line_of(result: Result, rank: int) -> str:
    """Return the only line of a rank's standard error; without frames of C++ or Python."""
    assert result.exit_codes[rank] == 1, result.stderr
    [line] = result.stderr[rank].splitlines()
    return line


def die_while_connecting() -> None:
    """Kill rank 1 once all ranks have met at the store."""
    if os.environ["RANK"] == "1":
        distributed.init_process_group = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]


VAIN: dict[str, tuple[int, Callable[[], None]]] = {
    "without rank 0": (2, functools.partial(without, 0, LOCAL_RANK="0")),
    "without rank 2": (3, functools.partial(without, 2)),
    "killed": (2, die_while_connecting),
    "rank 0 at no address": (2, functools.partial(without, 1, MASTER_ADDR="nowhere.invalid")),
    "rank 1 at no address": (2, functools.partial(without, 0, MASTER_ADDR="nowhere.invalid")),
    "at another host's address": (2, functools.partial(without, 1, MASTER_ADDR="192.0.2.1")),
}
"""Ranks that do not meet: their number, and what each does first."""


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named_by_those_that_wait(flags: Flags) -> None:
    """All groups wait at the same time: each is started while the one before it runs."""
    found, words = {}, flags(distributed_timeout_minutes=SECONDS / 60)

    def meet_all(names: list[str]) -> None:
        if names:
            name, *others = names
            found[name] = start_ranks(words, *VAIN[name], lambda _: meet_all(others), timeout=5 * SECONDS + 60)

    meet_all(list(VAIN))
    waiting = found["without rank 2"]  # rank 0, which hosts their meeting place, leaves it last
    assert waiting.exit_codes == [1, 1, 0], waiting.stderr
    line = line_of(waiting, 0)
    assert "rank 2 did not come within 0.2 minutes (--distributed-timeout-minutes); the others are on " in line
    assert "look above for ssh's" in line and "port" not in line
    assert "waiting for rank 2 …" in waiting.stdout[0]
    assert waiting.stderr[1] == "", "ranks of one host print once"

    line = line_of(found["without rank 0"], 1)
    away = "Connection refused; rank 0 did not come, has another --master_addr"
    assert re.search(rf"rank 1 \(host .*\) cannot meet .*: {away}", line)
    assert re.search(r"waiting for rank 0 at 127.0.0.1:\d+ …", found["without rank 0"].stdout[1])

    killed = found["killed"]  # while they connect
    assert killed.exit_codes == [1, -signal.SIGKILL], killed.stderr
    [line] = lines(killed.stderr[0])
    assert re.search("rank 0 (cannot meet|could not connect to)", line) and "port" not in line

    for rank in (0, 1):
        line = line_of(found[f"rank {rank} at no address"], rank)
        assert re.search(r"nowhere.invalid:\d+: .*[Nn]ame.*; give --master_addr \(MASTER_ADDR\) a name", line)
    line = line_of(found["at another host's address"], 0)
    assert re.search(r"192.0.2.1:\d+: .*; --master_addr \(MASTER_ADDR\) must be an address of this host", line)


def enter(hosts: tuple[Host, ...], port: int) -> None:
    """Move this rank to the host with its number, whose name is that of its network; ranks meet on the first."""
    host, libc = hosts[int(os.environ["RANK"])], ctypes.CDLL(None)
    with open(f"/var/run/netns/{host.name}", "rb") as network:
        assert libc.setns(network.fileno(), NEW_NETWORK) == 0
    assert libc.unshare(NEW_NAMES) == 0
    socket.sethostname(host.name)
    address = {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": str(port)}
    os.environ.update(address, GLOO_SOCKET_IFNAME=INTERFACE, LOCAL_RANK="0")


def with_own_disk(owner: Host, disk: str, hosts: tuple[Host, ...], port: int) -> None:
    """Move this rank to its host. On one of them the folder of runs is another than on the others."""
    enter(hosts, port)
    run_folder.PATIENCE = datetime.timedelta(seconds=1)
    if socket.gethostname() == owner.name:
        libc = ctypes.CDLL(None)
        assert libc.unshare(NEW_MOUNTS) == 0
        assert libc.mount(b"none", b"/", None, RECURSIVE | PRIVATE, None) == 0
        assert libc.mount(f"{disk}-of-its-own".encode(), disk.encode(), None, BIND, None) == 0


@pytest.mark.slow
def test_a_save_folder_that_hosts_do_not_share(hosts: tuple[Host, Host], flags: Flags, tmp_path: Path) -> None:
    disk, own = tmp_path / "disk", tmp_path / "disk-of-its-own"
    disk.mkdir()
    own.mkdir()

    def start(*order: Host, **settings: object) -> Result:
        before = functools.partial(with_own_disk, hosts[1], str(disk), order, free_port())
        return start_ranks(flags(train_iters=2, save=disk / "run", **settings), 2, before=before)

    first = start(*hosts).check()
    unseen = f"--save {disk}/run is not shared: host {{}} does not see what rank 0 writes there"
    assert first.stdout[0].count(unseen.format(hosts[1].name)) == 1
    again = start(*hosts, load=disk / "run")
    assert again.exit_codes == [1, 1]
    assert f"(iter_0000002: missing or incomplete on host {hosts[1].name})" in again.stderr[0]
    swapped = start(*reversed(hosts), load=disk / "run")
    assert swapped.exit_codes == [1, 1]
    assert f"{unseen.format(hosts[0].name)}, so --load would start afresh" in swapped.stderr[0]
    assert not (own / "run/metrics.jsonl").exists() and not (own / "run/lock").exists()


LONG_RUN = {"train_iters": 20, "save_interval": 4, "keep_last": 2, "distributed_timeout_minutes": 0.3}


@pytest.mark.slow
def test_a_host_vanishes_and_the_run_resumes(hosts: tuple[Host, Host], flags: Flags, tmp_path: Path) -> None:
    """tests/cluster has the launchers."""
    save, hold = tmp_path / "run", Hold(tmp_path / "pipe")
    arguments, go_there = flags(save=save, load=save, **LONG_RUN), functools.partial(enter, hosts, free_port())

    def vanish(ranks: list[Any]) -> None:
        hold.next_process(ranks[1].sentinel)
        hosts[1].die()
        hold.release()

    lost = start_ranks(arguments, 2, armed(f"step.logged={hold.action}@6", then=go_there), vanish)
    assert lost.exit_codes == [1, -signal.SIGKILL]
    [line] = lines(lost.stderr[0])
    assert "rank 0 lost another rank: " in line and "layout: 2 ranks on cpu" in lost.stdout[0]
    hosts[1].come_back()
    assert f"resumed from {save} at step 4" in start_ranks(arguments, 2, before=go_there).check().stdout[0]
    start_ranks(flags(save=tmp_path / "whole", **LONG_RUN), 2).check()
    rows = training_rows(save)
    assert [row["iteration"] for row in rows] == list(range(1, LONG_RUN["train_iters"] + 1))
    assert rows == training_rows(tmp_path / "whole")


def addresses(flags: Flags, folder: Path, ranks: int, **settings: object) -> list[list[str]]:
    """Where each rank of a run listens in its second step."""
    hold, found = Hold(folder / "pipe"), []

    def look(processes: list[Any]) -> None:
        for process in processes:
            connections = psutil.Process(hold.next_process(process.sentinel)).net_connections("tcp")
            found.append([each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN])
        hold.release()

    start_ranks(flags(train_iters=2, **settings), ranks, armed(f"step.logged={hold.action}@2"), look).check()
    return found


@pytest.mark.skipif(Version(torch.__version__) < Version("2.13"), reason="older torch needs gloo for one rank")
@pytest.mark.parametrize("zero_stage", [0, 3])
def test_one_process_opens_no_port(zero_stage: int, flags: Flags, tmp_path: Path) -> None:
    assert addresses(flags, tmp_path, 1, zero_stage=zero_stage) == [[]]


@pytest.mark.slow
def test_ranks_of_one_machine_listen_to_it_alone(flags: Flags, tmp_path: Path) -> None:
    found = [address for of_rank in addresses(flags, tmp_path, 2) for address in of_rank]
    assert len(found) >= 3, "the store's port and gloo's"
    assert all(ipaddress.ip_address(address).is_loopback for address in found)


def test_the_store_listens_at_its_address_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    with listen("127.0.0.1", port) as listener:
        assert listener.getsockname() == ("127.0.0.1", port)
        with pytest.raises(OSError, match="in use"):
            listen("127.0.0.1", port)
    assert listen("192.0.2.1", port) is None, "an address of another machine, which may forward to this one"
    place = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", port))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: place)
    assert listen("node1", port) is None, "other machines know node1 by another address"
