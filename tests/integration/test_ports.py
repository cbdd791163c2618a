"""Who can reach a run from the network: one process listens nowhere, ranks of one machine on its loopback interface."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

from megatron_ddrp.parallel.rendezvous import listen
from tests.integration.launch import Hold, armed, free_port, start_ranks

Flags = Callable[..., list[str]]
LISTENS = "0A"
"""Of /proc/net/tcp: the state of a listening socket."""


def listening(pid: int) -> list[str]:
    """Addresses at which a process listens, from what the kernel says."""
    links = [_link(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
    own = {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    rows = [line.split() for table in ("tcp", "tcp6") for line in _table(table)]
    return [str(_address(row[1].split(":")[0])) for row in rows if row[3] == LISTENS and row[9] in own]


def _link(descriptor: Path) -> str:
    """Return what a descriptor refers to, or nothing if another thread has closed it meanwhile."""
    with contextlib.suppress(FileNotFoundError):
        return os.readlink(descriptor)
    return ""


def _table(name: str) -> list[str]:
    path = Path(f"/proc/self/net/{name}")
    return path.read_text().splitlines()[1:] if path.exists() else []


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """An address as /proc has it, words of four bytes in the machine's order."""
    words = [bytes.fromhex(text[i : i + 8])[::-1] for i in range(0, len(text), 8)]
    return ipaddress.ip_address(b"".join(words))


def addresses(flags: Flags, folder: Path, ranks: int, **settings: object) -> list[list[str]]:
    """Where each rank of a run listens in its second step."""
    hold, found = Hold(folder / "pipe"), []

    def look(processes: list[Any]) -> None:
        found.extend([listening(hold.next_process(process.sentinel)) for process in processes])
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
