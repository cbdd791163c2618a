"""Hosts of the cluster tier: each has its own network, processes, mounts, name, /root, /tmp, /run and sshd.

They share one kernel, so the file system that they share (`WORLD`) is local, and locks and caches are those of one
machine. A power cut kills a host's first process, and with it all of its processes at once.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.integration.hosts import ip
from tests.integration.launch import ROOT, environment

WORLD = Path("/mnt")
"""The folder that all hosts share. Nothing of it exists outside of the tier."""
SHIM = WORLD / "shim"
BIN = ROOT / ".venv" / "bin" if (ROOT / ".venv").exists() else Path(sys.executable).parent
SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
REAL_PATH = f"{BIN}:{SYSTEM_PATH}"
"""`PATH` of a login whose Python is the environment's own."""
FIRST_PROCESS = Path(__file__).with_name("first_process.sh")
SECONDS = 120.0
"""Seconds until a test gives up on its hosts."""

SSHD_CONFIG = f"""
HostKey {WORLD}/etc/key
AuthorizedKeysFile {WORLD}/etc/key.pub
PermitRootLogin yes
StrictModes no
UsePAM no
MaxStartups 100
PidFile /run/sshd.pid
"""
SSH_CONFIG = f"""
Host *
  IdentityFile {WORLD}/etc/key
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
"""


def missing(*programs: str) -> str:
    """Return why the tier, or a part of it that needs these programs, cannot run here; "" if it can."""
    if os.geteuid():
        return "needs root, to make namespaces"
    lacking = [name for name in programs if not shutil.which(name, path=f"{os.environ['PATH']}:{SYSTEM_PATH}")]
    if lacking:
        return f"needs {' and '.join(lacking)}, not installed here"
    if WORLD in (ROOT, *ROOT.parents):
        return f"the project lies in {WORLD}, which the hosts use: move it"
    return ""


def login_environment() -> dict[str, str]:
    """Return the variables of a user who logs in. Their `python` makes forks (`forks.py`)."""
    own = {"HOME": "/root", "USER": "root", "LOGNAME": "root", "SHELL": "/bin/bash", "LANG": "C.UTF-8"}
    own |= {"PATH": f"{SHIM}:{REAL_PATH}", "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    given = environment()
    return own | {name: given[name] for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR")}


class Host:
    """One host: a network that stays, and processes that a power cut ends."""

    def __init__(self, number: int, name: str) -> None:
        self.name, self.address, self.port = name, f"10.77.0.{number}", f"port{number}"
        self.folder = WORLD / "hosts" / name
        """The host's own disk."""
        self.first: subprocess.Popen[bytes] | None = None
        self.folder.mkdir(parents=True)
        ip("netns", "add", name)
        ip("link", "add", self.port, "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("link", "set", self.port, "master", "bridge", "up")
        ip("-n", name, "addr", "add", f"{self.address}/24", "dev", "eth0")
        for interface in ("lo", "eth0"):
            ip("-n", name, "link", "set", interface, "up")

    def start(self) -> Host:
        """Switch the power on; `wait_until_up` waits for its services."""
        needed = {str(ROOT), os.path.realpath(sys.prefix), sys.base_prefix}
        kept = sorted(folder for folder in needed if folder.startswith(("/root/", "/tmp/")))
        words = ["nsenter", f"--net=/run/netns/{self.name}", "unshare", "--uts", "--ipc", "--mount", "--pid"]
        words += ["--propagation", "private", "--fork", "--kill-child", "bash", str(FIRST_PROCESS)]
        with (self.folder / "console").open("ab") as console:
            self.first = subprocess.Popen(
                [*words, self.name, str(self.folder), *kept], stdin=subprocess.DEVNULL, stdout=console, stderr=console
            )
        return self

    def wait_until_up(self) -> Host:
        """Wait until the host's services run."""
        wait_for(lambda: self.pid and Path(f"/proc/{self.pid}/root/run/ready").exists(), self.console)
        (self.folder / "pid").write_text(str(self.pid), encoding="utf-8")
        return self

    def console(self) -> str:
        """Return what the host's first process printed."""
        return (self.folder / "console").read_text(encoding="utf-8", errors="replace")

    @property
    def pid(self) -> int:
        """Number of the host's first process, in the world outside of the host; 0 while it has no power."""
        if self.first is None or self.first.poll() is not None:
            return 0
        children = Path(f"/proc/{self.first.pid}/task/{self.first.pid}/children").read_text().split()
        return int(children[0]) if children else 0

    def link(self, state: str) -> None:
        """Set the host's network `up` or `down`."""
        ip("-n", self.name, "link", "set", "eth0", state)

    def power_off(self) -> None:
        """End the host without a word to the others: first the network, then every process at once."""
        self.link("down")
        os.kill(self.pid, signal.SIGKILL)
        assert self.first
        self.first.wait(SECONDS)

    def power_on(self) -> None:
        """Start the host again, with the same disk."""
        self.link("up")
        self.start().wait_until_up()

    def start_command(self, command: Sequence[object], output: Path, **variables: str) -> subprocess.Popen[bytes]:
        """Start a command as a user logged in there, in a process group of its own; its output goes into a file."""
        with output.open("ab") as stream:
            return subprocess.Popen(
                [*self._enter(), *map(str, command)],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                env=login_environment() | variables,
                start_new_session=True,
            )

    def run(self, script: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a shell script as a user logged in there, and return its end and its output."""
        words = [*self._enter(), "bash", "-c", script]
        surroundings = login_environment() | variables
        return subprocess.run(words, capture_output=True, text=True, env=surroundings, timeout=3 * SECONDS)

    def _enter(self) -> list[str]:
        return ["nsenter", f"--target={self.pid}", "--net", "--uts", "--ipc", "--mount", "--pid", f"--wd={ROOT}"]

    def processes(self, *words: str) -> list[int]:
        """Return the host's processes with all `words` in name and command line, as numbers of the world outside."""
        own, found = self.pid and os.readlink(f"/proc/{self.pid}/ns/pid"), []
        for process in filter(str.isdecimal, os.listdir("/proc")):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                if os.readlink(f"/proc/{process}/ns/pid") == own:
                    files = (Path(f"/proc/{process}/{name}").read_bytes() for name in ("comm", "cmdline"))
                    text = b"".join(files).replace(b"\0", b" ").decode(errors="replace")
                    if all(word in text for word in words):
                        found.append(int(process))
        return found

    def ranks(self, save: Path) -> list[int]:
        """Return the forked ranks of a run on this host."""
        return self.processes(f"{name_of_rank(save)}\n")

    def signal_rank(self, number: int, save: Path) -> None:
        """Send a signal to the forked rank of a run; there must be one."""
        self.signal(number, f"{name_of_rank(save)}\n")

    def signal(self, number: int, *words: str) -> None:
        """Send a signal to the host's processes with all these words; there must be one."""
        pids = self.processes(*words)
        assert pids, f"no process {words} on {self.name}"
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    @contextlib.contextmanager
    def mounted(self, source: Path, target: Path, *options: str) -> Iterator[None]:
        """Show another folder or file at `target`, on this host only."""
        mount = ["nsenter", f"--target={self.pid}", "--mount", "--pid"]
        subprocess.run([*mount, "mount", "--bind", source, target], check=True)
        if options:
            subprocess.run([*mount, "mount", "-o", ",".join(["remount", "bind", *options]), target], check=True)
        try:
            yield
        finally:
            subprocess.run([*mount, "umount", "--lazy", target], check=True)


def name_of_rank(save: str | Path) -> str:
    """Return the name under which Linux shows the forked ranks of a run: at most 15 characters."""
    return f"@{Path(save).name}"[:15]


def wait_for(condition: Callable[[], object], explain: Callable[[], str], seconds: float = SECONDS) -> None:
    """Wait until a condition holds; fail with an explanation after some seconds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, explain()
        time.sleep(0.05)


def make_hosts(names: Sequence[str]) -> dict[str, Host]:
    """Make and start hosts on one bridge, by name. Each user may log in on each host without a password."""
    etc = WORLD / "etc"
    etc.mkdir()
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", etc / "key"], check=True)
    variables = " ".join(f"{name}={value}" for name, value in login_environment().items() if value)
    (etc / "sshd_config").write_text(f"{SSHD_CONFIG}SetEnv {variables} CUDA_VISIBLE_DEVICES=\n", encoding="utf-8")
    (etc / "ssh_config").write_text(SSH_CONFIG, encoding="utf-8")
    lines = [f"10.77.0.{number} {name}" for number, name in enumerate(names, 1)]
    (etc / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]), encoding="utf-8")
    ip("link", "add", "bridge", "type", "bridge")
    ip("link", "set", "bridge", "up")
    return {name: Host(number, name) for number, name in enumerate(names, 1)}
