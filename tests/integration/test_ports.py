"""Who can reach a run from the network: one process listens nowhere, ranks of one machine on its loopback interface."""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from packaging.version import Version

from megatron_ddrp.parallel.rendezvous import listen
from tests.integration.launch import free_port, start_ranks
from tests.integration.test_faults import at_step

Flags = Callable[..., list[str]]
LISTENS = "0A"
"""Of /proc/net/tcp: the state of a listening socket."""


def listening() -> list[str]:
    """Addresses at which this process listens, from what the kernel says."""
    links = [_link(descriptor) for descriptor in os.listdir("/proc/self/fd")]
    own = {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    rows = [line.split() for table in ("tcp", "tcp6") for line in _table(table)]
    return [str(_address(row[1].split(":")[0])) for row in rows if row[3] == LISTENS and row[9] in own]


def _link(descriptor: str) -> str:
    """Return what a descriptor refers to, or nothing if another thread has closed it meanwhile."""
    with contextlib.suppress(FileNotFoundError):
        return os.readlink(f"/proc/self/fd/{descriptor}")
    return ""


def _table(name: str) -> list[str]:
    path = Path(f"/proc/self/net/{name}")
    return path.read_text().splitlines()[1:] if path.exists() else []


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """An address as /proc has it, words of four bytes in the machine's order."""
    words = [bytes.fromhex(text[i : i + 8])[::-1] for i in range(0, len(text), 8)]
    return ipaddress.ip_address(b"".join(words))


def note_listening(folder: Path) -> None:
    (folder / os.environ["RANK"]).write_text(json.dumps(listening()))


def note_on_every_rank(folder: Path, ranks: int) -> None:
    for rank in range(ranks):
        at_step(2, rank, functools.partial(note_listening, folder))


def addresses(flags: Flags, folder: Path, ranks: int, **settings: object) -> list[list[str]]:
    """Where each rank of a run listens in its second step."""
    before = functools.partial(note_on_every_rank, folder, ranks)
    start_ranks(flags(train_iters=2, **settings), ranks, before=before).check()
    return [json.loads((folder / str(rank)).read_text()) for rank in range(ranks)]


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
