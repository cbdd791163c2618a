"""Each launcher starts `pretrain_bert.py`, `mpirun` too. Everything else is tested without them, faster."""

from __future__ import annotations

import fcntl
import os
import pty
import shutil
import signal
import subprocess
import sys
import termios
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path

import pytest

from megatron_ddrp.checkpoint import newest
from megatron_ddrp.data.points import VARIABLE
from tests.conftest import TinyCorpus
from tests.integration.launch import SCRIPT, TIMEOUT, Hold, environment, free_port, run_command, start_ranks
from tests.integration.test_run_folder import COMPLETE, assert_complete

Flags = Callable[..., list[str]]
BIN = Path(sys.executable).parent
PATH = f"{BIN}:/usr/local/bin:/usr/bin:/bin"
"""A user's, with the environment active: the launchers start `python` by name."""


def launchers() -> dict[str, list[str]]:
    """A command line each, up to the script."""
    torchrun = [str(BIN / "torchrun"), "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
    return {
        "python": [sys.executable],
        "deepspeed": [str(BIN / "deepspeed"), "--master_port", str(free_port())],
        "deepspeed-2": [str(BIN / "deepspeed"), "--num_accelerators", "2", "--master_port", str(free_port())],
        "torchrun-2": [*torchrun, "--master-port", str(free_port())],
        "mpirun-2": [*mpirun(), "-x", "MASTER_ADDR=127.0.0.1", "-x", f"MASTER_PORT={free_port()}", sys.executable],
    }


def mpirun() -> list[str]:
    """Open MPI's, for two processes."""
    return ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2"]


def skip_without_mpirun() -> None:
    if not shutil.which("mpirun", path=PATH):
        pytest.skip("needs Open MPI's mpirun")


@pytest.mark.slow
@pytest.mark.parametrize("launcher", launchers())
def test_every_launcher_trains(launcher: str, tiny_corpus: TinyCorpus, flags: Flags, tmp_path: Path) -> None:
    if launcher.startswith("mpirun"):
        skip_without_mpirun()
    ended = run_command([*launchers()[launcher], SCRIPT, *flags(save=tmp_path, **COMPLETE)], PATH=PATH)
    assert ended.returncode == 0, ended.stderr
    assert_complete(tmp_path, tiny_corpus)
    assert ended.stdout.count("step 5/5 | loss") == 1
    ranks = 2 if launcher.endswith("-2") else 1
    assert f"layout: {ranks} rank{'s' * (ranks > 1)} on cpu" in ended.stdout
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_a_mistake_is_one_line_of_ours(flags: Flags) -> None:
    """The launcher adds lines of its own."""
    arguments = flags(vocab_file="nowhere.txt")
    alone = run_command([sys.executable, SCRIPT, *arguments])
    assert alone.returncode == 1
    (line,) = alone.stderr.splitlines()
    launched = run_command([*launchers()["deepspeed-2"], SCRIPT, *arguments], PATH=PATH)
    assert launched.returncode == 1
    assert launched.stderr.count(line) == 1
    assert "Traceback" not in launched.stderr


@pytest.mark.slow
def test_ranks_save_when_the_terminal_of_deepspeed_closes(flags: Flags, tmp_path: Path) -> None:
    """The terminal's end kills `deepspeed` and its launcher of ranks, and takes the ranks' output away."""
    hold, save = Hold(tmp_path / "pipe"), tmp_path / "run"
    ours, theirs = pty.openpty()
    deepspeed = subprocess.Popen(
        [*launchers()["deepspeed-2"], SCRIPT, *flags(save=save)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment() | {"PATH": PATH, VARIABLE: f"step.logged={hold.action}@3"},
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(theirs)
    ended = os.pidfd_open(deepspeed.pid)
    ranks = [os.pidfd_open(hold.next_process(ended)) for _ in range(2)]
    os.close(ours)
    assert deepspeed.wait(TIMEOUT) == -signal.SIGHUP
    hold.release()
    assert all(wait([rank], TIMEOUT) for rank in ranks)
    assert (save / "exit_code").read_text() == "75\n"
    assert newest(save) == save / "iter_0000003"


@pytest.mark.slow
def test_mpirun_without_a_place_to_meet_is_refused(flags: Flags) -> None:
    skip_without_mpirun()
    ended = run_command([*mpirun(), sys.executable, SCRIPT, *flags()], PATH=PATH)
    assert ended.returncode == 1
    assert "error: mpirun started 2 processes" in ended.stderr
    assert "export MASTER_ADDR and MASTER_PORT before it (mpirun passes them on by -x)" in ended.stderr


def test_underscores_and_the_launchers_own_flags(flags: Flags, tmp_path: Path) -> None:
    words = flags(save=tmp_path, train_iters=1)
    words = ["--" + word[2:].replace("-", "_") if word.startswith("--") else word for word in words]
    start_ranks([*words, "--local_rank=0", "--deepspeed"]).check()
    assert (tmp_path / "metrics.jsonl").is_file()


def test_help_teaches_by_concern() -> None:
    ended = run_command([sys.executable, SCRIPT, "--help"])
    assert ended.returncode == 0
    assert ended.stderr == ""
    concerns = ("Run", "Model", "Objective", "Data", "Training", "Optimizer", "Scale", "Checkpoints", "Logging")
    places = [ended.stdout.index(f"\n{concern}:\n") for concern in concerns]
    assert places == sorted(places)
    for name in ("--position-encoding", "--tcd-weight", "--zero-stage", "--keep-last", "--dry-run", "example:"):
        assert name in ended.stdout
    assert max(map(len, ended.stdout.splitlines())) <= 120
