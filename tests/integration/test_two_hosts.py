"""Training on two hosts by the real `deepspeed --hostfile`: one of them vanishes, the other ends with one line, and the
same command goes on from the last checkpoint."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_ddrp.run.metrics import read_rows
from tests.integration.hosts import Host, ip, missing
from tests.integration.launch import SCRIPT, TIMEOUT, command_of_process, free_port, start_ranks, training_rows

Flags = Callable[..., list[str]]
BIN = Path(sys.executable).parent
PATH = f"{BIN}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
COURSE = {"train_iters": 60, "save_interval": 4, "keep_last": 2, "distributed_timeout_minutes": 0.5}
STEPS_BEFORE_DEATH = 6

pytestmark = pytest.mark.slow


def write_hostfile(hosts: tuple[Host, Host], folder: Path) -> Path:
    """One rank a host."""
    path = folder / "hostfile"
    path.write_text("".join(f"{host.address} slots=1\n" for host in hosts), encoding="utf-8")
    return path


def wait_for_step(step: int, folder: Path, running: subprocess.Popen[bytes], output: Path) -> None:
    """Until a run has written that step's row."""
    end = time.monotonic() + TIMEOUT
    while sum("loss" in row for row in read_rows(folder)) < step:  # without the row that is being written
        assert running.poll() is None and time.monotonic() < end, output.read_text(encoding="utf-8")
        time.sleep(0.05)


def assert_ends_as_undisturbed(folder: Path, flags: Flags, whole: Path) -> None:
    """Each step once, with the numbers of a run that nobody disturbed."""
    start_ranks(flags(save=whole, **COURSE), 2).check()
    rows = training_rows(folder)
    assert [row["iteration"] for row in rows] == list(range(1, COURSE["train_iters"] + 1))
    assert rows == training_rows(whole)


def test_a_host_vanishes_and_the_same_commands_go_on(hosts: tuple[Host, Host], flags: Flags, tmp_path: Path) -> None:
    """Each host is given its own command, as schedulers do where hosts cannot reach each other by ssh."""
    hostfile, save = write_hostfile(hosts, tmp_path), tmp_path / "run"
    outputs = [tmp_path / host.name for host in hosts]

    def start() -> list[subprocess.Popen[bytes]]:
        launcher = [BIN / "deepspeed", "--hostfile", hostfile, "--no_ssh", "--master_addr", hosts[0].address]
        launcher += ["--master_port", free_port()]
        arguments = [SCRIPT, *flags(save=save, load=save, **COURSE)]
        return [
            host.start([*launcher, "--node_rank", number, *arguments], output, PATH=PATH)
            for number, (host, output) in enumerate(zip(hosts, outputs, strict=True))
        ]

    running = start()
    wait_for_step(STEPS_BEFORE_DEATH, save, running[0], outputs[0])
    hosts[1].die()
    assert running[0].wait(TIMEOUT) == 1
    running[1].wait(TIMEOUT)
    text = outputs[0].read_text(encoding="utf-8")
    assert "layout: 2 ranks on cpu" in text
    assert text.count("rank 0 lost another rank: ") == 1 and "Traceback" not in text
    hosts[1].come_back()
    assert [process.wait(TIMEOUT) for process in start()] == [0, 0], outputs[0].read_text(encoding="utf-8")
    assert f"resumed from {save} at step " in outputs[0].read_text(encoding="utf-8")
    assert_ends_as_undisturbed(save, flags, tmp_path / "whole")


@pytest.fixture
def ssh(hosts: tuple[Host, Host], tmp_path: Path) -> Iterator[dict[str, str]]:
    """An sshd on each host that lets us in by a key of its own, and the variables with which pdsh finds it."""
    reason = missing("sshd", "ssh-keygen", "pdsh")
    if reason:
        pytest.skip(reason)
    tmp_path.chmod(0o700)
    for name in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name], check=True)
    Path("/run/sshd").mkdir(exist_ok=True)  # which sshd insists on
    settings = {
        "HostKey": tmp_path / "host_key",
        "AuthorizedKeysFile": tmp_path / "user_key.pub",
        "PermitRootLogin": "yes",
        "StrictModes": "no",  # of the folders above, which are everybody's
        "PidFile": "none",
    }
    (tmp_path / "sshd_config").write_text("".join(f"{key} {value}\n" for key, value in settings.items()))
    sshd = shutil.which("sshd", path=PATH)
    servers = [host.start([sshd, "-D", "-e", "-f", tmp_path / "sshd_config"], tmp_path / "sshd") for host in hosts]
    options = ("StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR", "ConnectionAttempts=10")
    words = ["-i", str(tmp_path / "user_key"), *(word for option in options for word in ("-o", option))]
    yield {"PATH": PATH, "PDSH_SSH_ARGS_APPEND": " ".join(words)}
    for server in servers:
        server.kill()
        server.wait()


def test_a_host_dies_and_deepspeed_over_ssh_goes_on(
    hosts: tuple[Host, Host], ssh: dict[str, str], flags: Flags, tmp_path: Path
) -> None:
    """One command on the first host starts the ranks of both."""
    hostfile, save, output = write_hostfile(hosts, tmp_path), tmp_path / "run", tmp_path / "output"
    kept = ("GLOO_SOCKET_IFNAME=eth0", "OMP_NUM_THREADS=1", "DS_ACCELERATOR=cpu", "CUDA_VISIBLE_DEVICES=")
    (tmp_path / ".deepspeed_env").write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")

    def start() -> subprocess.Popen[bytes]:
        launcher = [BIN / "deepspeed", "--hostfile", hostfile, "--no_ssh_check", "--master_addr", hosts[0].address]
        arguments = [SCRIPT, *flags(save=save, load=save, **COURSE)]
        return hosts[0].start([*launcher, "--master_port", free_port(), *arguments], output, **ssh)

    running = start()
    wait_for_step(STEPS_BEFORE_DEATH, save, running, output)
    for pid in pids_of_ranks(hosts[1], save):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert running.wait(TIMEOUT) != 0
    text = output.read_text(encoding="utf-8")
    assert "layout: 2 ranks on cpu" in text
    assert text.count("rank 0 lost another rank: ") == 1 and "Traceback" not in text
    assert start().wait(TIMEOUT) == 0, output.read_text(encoding="utf-8")
    assert f"resumed from {save} at step " in output.read_text(encoding="utf-8")
    assert_ends_as_undisturbed(save, flags, tmp_path / "whole")


def pids_of_ranks(host: Host, save: Path) -> list[int]:
    """The training processes there and what started them, but not the sshd, which comes back before they do."""
    pids = [int(pid) for pid in ip("netns", "pids", host.name).split()]
    return [pid for pid in pids if str(save).encode() in command_of_process(pid)]
