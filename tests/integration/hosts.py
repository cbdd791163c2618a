"""Two hosts on one machine: network namespaces with an address each, joined by a cable that can be pulled.

They share files and processes' ids, as hosts with a shared file system do not; but no packet passes between them, or to
anywhere else, except through the cable.
"""

import contextlib
import itertools
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import NamedTuple

INTERFACE = "eth0"
PAIRS = itertools.count()


class Host(NamedTuple):
    """One of the two."""

    name: str
    address: str

    def die(self) -> None:
        """Vanish without a word to the other host: first the cable, then every process."""
        ip("-n", self.name, "link", "set", INTERFACE, "down")
        self.kill_all()

    def come_back(self) -> None:
        ip("-n", self.name, "link", "set", INTERFACE, "up")

    def kill_all(self) -> None:
        """Every process there, until none is left."""
        for _ in range(100):
            pids = ip("netns", "pids", self.name).split()
            if not pids:
                return
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.05)


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Both, until the end; `OSError` where the machine does not let us make them."""
    pair = f"ddrp{os.getpid()}-{next(PAIRS)}"
    hosts = (Host(f"{pair}a", "10.213.77.1"), Host(f"{pair}b", "10.213.77.2"))
    made = []
    try:
        for host in hosts:
            ip("netns", "add", host.name)
            made.append(host)
        first, second = hosts
        cable = ("link", "add", INTERFACE, "netns", first.name, "type", "veth", "peer", "name", INTERFACE)
        ip(*cable, "netns", second.name)
        for host in hosts:
            ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", INTERFACE)
            for interface in ("lo", INTERFACE):
                ip("-n", host.name, "link", "set", interface, "up")
        yield hosts
    finally:
        for host in made:
            host.kill_all()
            ip("netns", "del", host.name)


def ip(*words: str) -> str:
    """The `ip` command; `OSError` with its own words where it fails."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise OSError(done.stderr.strip() or f"ip {' '.join(words)} failed")
    return done.stdout
