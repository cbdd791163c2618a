"""Ranks that do not meet end with one line that says why: a host that stays away, a wrong address, a wrong network."""

from __future__ import annotations

import ctypes
import datetime
import functools
import os
import re
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import distributed

from megatron_ddrp.parallel import rendezvous
from megatron_ddrp.run import run_folder
from tests.integration.hosts import INTERFACE, Host
from tests.integration.launch import Result, free_port, lines, start_ranks

pytestmark = pytest.mark.slow

Flags = Callable[..., list[str]]
SECONDS = 12
"""Time that ranks get to meet, where nothing but waiting can show that one will not come."""
NEW_NETWORK, NEW_MOUNTS, NEW_NAMES = 0x40000000, 0x20000, 0x4000000
BIND, RECURSIVE, PRIVATE = 0x1000, 0x4000, 0x40000
"""Flags of Linux's `unshare` and `mount`."""


def only(rank: int, **variables: str) -> None:
    """Let this rank alone run, with other variables than the launcher's; it soon says for whom it waits."""
    if os.environ["RANK"] != str(rank):
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


def stay_away(rank: int) -> None:
    if os.environ["RANK"] == str(rank):
        os._exit(0)


VAIN: dict[str, tuple[int, Callable[[], None]]] = {
    "without rank 1": (2, functools.partial(only, 0, LOCAL_RANK="0")),
    "without rank 0": (2, functools.partial(only, 1, LOCAL_RANK="0")),
    "without rank 2": (3, functools.partial(stay_away, 2)),
    "killed": (2, die_while_connecting),
    "rank 0 at no address": (2, functools.partial(only, 0, MASTER_ADDR="nowhere.invalid")),
    "rank 1 at no address": (2, functools.partial(only, 1, MASTER_ADDR="nowhere.invalid")),
    "at another host's address": (2, functools.partial(only, 0, MASTER_ADDR="192.0.2.1")),
}
"""Ranks that do not meet: their number, and what each does first."""


def meet_in_vain(flags: Flags, ranks: int, before: Callable[[], None], **meanwhile: Any) -> Result:
    words = flags(distributed_timeout_minutes=SECONDS / 60)
    return start_ranks(words, ranks, before=before, timeout=5 * SECONDS + 60, **meanwhile)


@pytest.fixture(scope="module")
def found(flags: Flags) -> dict[str, Result]:
    """What the ranks of `VAIN` say. They all wait at the same time: each is started while the one before it runs."""
    results = {}

    def meet_all(names: list[str]) -> None:
        if names:
            name, *others = names
            results[name] = meet_in_vain(flags, *VAIN[name], during=lambda _: meet_all(others))

    meet_all(list(VAIN))
    return results


def test_a_rank_that_does_not_come_is_named(found: dict[str, Result]) -> None:
    line = line_of(found["without rank 1"], 0)
    assert "rank 1 did not come within 0.2 minutes (--distributed-timeout-minutes); the others are on " in line
    assert "look above for ssh's" in line and "port" not in line
    assert "waiting for rank 1 …" in found["without rank 1"].stdout[0]


def test_rank_0_that_does_not_come_is_named(found: dict[str, Result]) -> None:
    line = line_of(found["without rank 0"], 1)
    assert re.search(
        r"rank 1 \(host .*\) cannot meet .*: Connection refused; rank 0 did not come, has another --master_addr", line
    )
    assert re.search(r"waiting for rank 0 at 127.0.0.1:\d+ …", found["without rank 0"].stdout[1])


def test_a_rank_that_is_killed_while_they_connect(found: dict[str, Result]) -> None:
    killed = found["killed"]
    assert killed.exit_codes == [1, -signal.SIGKILL], killed.stderr
    [line] = lines(killed.stderr[0])
    assert re.search("rank 0 (cannot meet|could not connect to)", line) and "port" not in line


def test_each_rank_that_waits_names_the_missing_one(found: dict[str, Result]) -> None:
    """Rank 0, which hosts their meeting place, leaves it last."""
    waiting = found["without rank 2"]
    assert waiting.exit_codes == [1, 1, 0], waiting.stderr
    assert "rank 2 did not come within 0.2 minutes" in line_of(waiting, 0)
    assert waiting.stderr[1] == "", "ranks of one host print once"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_name_that_is_not_known(rank: int, found: dict[str, Result]) -> None:
    line = line_of(found[f"rank {rank} at no address"], rank)
    assert re.search(r"nowhere.invalid:\d+: .*[Nn]ame.*; give --master_addr \(MASTER_ADDR\) a name", line)


def test_an_address_of_another_host(found: dict[str, Result]) -> None:
    line = line_of(found["at another host's address"], 0)
    assert re.search(r"192.0.2.1:\d+: .*; --master_addr \(MASTER_ADDR\) must be an address of this host", line)


def enter(hosts: tuple[Host, ...], **variables: str) -> None:
    """Move this rank to the host with its number, whose name is that of its network."""
    host, libc = hosts[int(os.environ["RANK"])], ctypes.CDLL(None)
    with open(f"/var/run/netns/{host.name}", "rb") as network:
        assert libc.setns(network.fileno(), NEW_NETWORK) == 0
    assert libc.unshare(NEW_NAMES) == 0
    socket.sethostname(host.name)
    os.environ.update(variables, LOCAL_RANK="0")


def test_a_network_that_does_not_join_the_hosts(hosts: tuple[Host, Host], flags: Flags) -> None:
    """Each rank tells the other a loopback address: one is refused at once, the other waits for it."""
    where = {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    apart = meet_in_vain(flags, 2, functools.partial(enter, hosts, **where))
    assert apart.exit_codes == [1, 1], apart.stderr
    for text in apart.stderr:
        assert "frame #" not in text and "Traceback" not in text and "pytorch" not in lines(text)[-1]
        assert text.count("name one by GLOO_SOCKET_IFNAME") == 1


def with_own_disk(owner: Host, disk: str, hosts: tuple[Host, ...], **variables: str) -> None:
    """Move this rank to its host. On one of them the folder of runs is another than on the others."""
    enter(hosts, **variables)
    run_folder.PATIENCE = datetime.timedelta(seconds=1)
    if socket.gethostname() == owner.name:
        libc = ctypes.CDLL(None)
        assert libc.unshare(NEW_MOUNTS) == 0
        assert libc.mount(b"none", b"/", None, RECURSIVE | PRIVATE, None) == 0
        assert libc.mount(f"{disk}-of-its-own".encode(), disk.encode(), None, BIND, None) == 0


def test_a_save_folder_that_hosts_do_not_share(hosts: tuple[Host, Host], flags: Flags, tmp_path: Path) -> None:
    disk, own = tmp_path / "disk", tmp_path / "disk-of-its-own"
    disk.mkdir()
    own.mkdir()

    def start(*order: Host, **settings: object) -> Result:
        where = {"MASTER_ADDR": order[0].address, "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": INTERFACE}
        before = functools.partial(with_own_disk, hosts[1], str(disk), order, **where)
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
