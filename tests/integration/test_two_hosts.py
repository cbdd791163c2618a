"""Training on two hosts by the real `deepspeed --hostfile`: one of them vanishes, the other ends with one line, and the
same command goes on from the last checkpoint."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.hosts import Host, missing, two_hosts
from tests.integration.launch import SCRIPT, TIMEOUT, free_port, start_ranks, training_rows

Flags = Callable[..., list[str]]
BIN = Path(sys.executable).parent
PATH = f"{BIN}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
COURSE = {"train_iters": 24, "save_interval": 4, "keep_last": 2, "distributed_timeout_minutes": 0.15}
STEPS_BEFORE_DEATH = 6

pytestmark = pytest.mark.slow


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    reason = missing()
    if reason:
        pytest.skip(reason)
    with two_hosts() as made:
        yield made


def write_hostfile(hosts: tuple[Host, Host], folder: Path) -> Path:
    """One rank a host."""
    path = folder / "hostfile"
    path.write_text("".join(f"{host.address} slots=1\n" for host in hosts), encoding="utf-8")
    return path


def wait_for_step(step: int, folder: Path, running: subprocess.Popen[bytes], output: Path) -> None:
    """Until a run has written that step's row."""
    end = time.monotonic() + TIMEOUT
    while not (folder / "metrics.jsonl").exists() or len(training_rows(folder)) < step:
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
    assert running[0].wait(60) == 1
    running[1].wait(TIMEOUT)
    text = outputs[0].read_text(encoding="utf-8")
    assert "layout: 2 ranks on cpu" in text
    assert text.count("rank 0 lost another rank: ") == 1 and "Traceback" not in text
    hosts[1].come_back()
    assert [process.wait(TIMEOUT) for process in start()] == [0, 0], outputs[0].read_text(encoding="utf-8")
    assert f"resumed from {save} at step " in outputs[0].read_text(encoding="utf-8")
    assert_ends_as_undisturbed(save, flags, tmp_path / "whole")
