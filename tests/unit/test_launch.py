"""How a rank ends, with its exit code and its words, and which signals ask a run to stop."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ddrp.commands import pretrain
from megatron_ddrp.run.launch import OUT_OF_TIME, SIGNALS, StopRequests, is_launched, launched_world_size
from megatron_ddrp.train import Trained

ROOT = Path(__file__).parents[2]
PROGRAM = """
import atexit, os, sys
atexit.register(os.abort)  # stands for the threads of a process group, which abort in some teardowns
from megatron_ddrp.errors import UserError, shared_error
from megatron_ddrp.run.launch import run_rank

def fail(error):
    raise error

print("said before", end="")
sys.argv[0] = "tool"
run_rank(lambda: {main})
"""


def end(main: str, **variables: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a process that runs `main` as a rank."""
    words = [sys.executable, "-c", PROGRAM.format(main=main)]
    ended = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=variables, timeout=60)
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.parametrize(
    ("main", "code", "error"),
    [
        ("None", 0, ""),
        ("75", 75, ""),
        ("fail(UserError('wrong', 2))", 2, "tool: error: wrong\n"),
        ("fail(KeyboardInterrupt())", 130, "tool: error: interrupted\n"),
    ],
)
def test_a_rank_ends_with_its_code_and_no_teardown(main: str, code: int, error: str) -> None:
    assert end(main) == (code, "said before", error)


def test_a_bug_keeps_its_traceback() -> None:
    code, said, error = end("1 / 0")
    assert (code, said) == (1, "said before")
    assert error.startswith("Traceback") and error.endswith("ZeroDivisionError: division by zero\n")


BATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}


@pytest.mark.parametrize(
    ("variables", "ranks", "launched"),
    [
        ({}, 1, False),
        ({"RANK": "0", "WORLD_SIZE": "1"}, 1, True),
        ({"RANK": "3", "WORLD_SIZE": "8"}, 8, True),
        (BATCH, 1, False),  # the batch script itself, or the shell of salloc
        (BATCH | {"MASTER_ADDR": "node1"}, 4, True),
        (BATCH | {"SLURM_STEP_NUM_TASKS": "1"}, 1, False),  # srun --pty
        (BATCH | {"SLURM_STEP_NUM_TASKS": "4"}, 4, True),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, 1, False),  # refused later: they cannot meet
        (BATCH | {"SLURM_STEP_NUM_TASKS": "2", "OMPI_COMM_WORLD_SIZE": "8", "MASTER_ADDR": "node1"}, 8, True),
    ],
)
def test_ranks_are_those_that_a_run_would_have(variables, ranks, launched, monkeypatch):
    monkeypatch.setattr(os, "environ", variables)
    assert (launched_world_size(), is_launched()) == (ranks, launched)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
def test_a_variable_that_is_no_number_is_one_line(name: str) -> None:
    words = [sys.executable, "-m", "megatron_ddrp", "pretrain", "--dry-run"]
    variables = {**os.environ, name: "abc"}
    ended = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=variables, timeout=120)
    line = f"megatron-ddrp pretrain: error: {name} is 'abc', not a number: let deepspeed or torchrun set it\n"
    assert (ended.returncode, ended.stderr) == (1, line)


def test_an_agreed_error_is_told_by_rank_0_and_another_by_its_own_rank() -> None:
    agreed, own = "fail(shared_error('x'))", "fail(UserError('x'))"
    assert [end(agreed, RANK=rank)[2] for rank in "01"] == ["tool: error: x\n", ""]
    assert [end(own, RANK=rank)[2] for rank in "01"] == ["tool: error: x\n"] * 2
    assert end(agreed, RANK="1")[0] == 1


@pytest.mark.parametrize("variable", ["LOCAL_RANK", "SLURM_LOCALID"])
def test_a_refusal_is_told_once_on_every_host(variable: str) -> None:
    """Its command may be wrong where that of rank 0 is not."""
    told = [end("fail(UserError('wrong', 2))", RANK="2", **{variable: number})[2] for number in "01"]
    assert told == ["tool: error: wrong\n", ""]


@pytest.mark.parametrize(("code", "save", "says"), [(0, "my run", True), (75, "my run", False), (0, None, False)])
def test_a_finished_run_says_what_is_next(code, save, says, monkeypatch, capsys):
    monkeypatch.setattr("megatron_ddrp.train.train", lambda config, requests: Trained(code, 1))
    monkeypatch.setattr(StopRequests, "heed", lambda self: self)
    flags = ["--save", save] if save else []
    monkeypatch.setattr(sys, "argv", ["pretrain", "--data-path", "text", "--vocab-file", "vocab.txt", *flags])
    assert pretrain.main() == code
    printed = capsys.readouterr().out
    assert ("next: megatron-ddrp report --load 'my run' --output-dir 'my run'/report" in printed) is says


@pytest.fixture(autouse=True)
def interrupts_heeded() -> Iterator[None]:
    """As in a foreground process, whatever started the tests."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(
    ("alone", "signals", "said"),
    [
        *((False, (number,), "") for number in SIGNALS),
        (False, (signal.SIGINT, signal.SIGINT), ""),  # a launcher may send several
        (True, (signal.SIGINT,), "SIGINT: stopping after this step; once more ends at once"),
        (True, (signal.SIGTERM, signal.SIGINT), "SIGINT: stopping after this step; once more ends at once"),
    ],
)
def test_a_signal_is_a_request_and_a_second_interrupt_ends_a_lone_process(alone, signals, said, capfd):
    requests = StopRequests(None, alone=alone).heed()
    assert requests.code == 0
    for number in signals:
        os.kill(os.getpid(), number)
    assert requests.code == signals[-1]
    told = capfd.readouterr().err
    assert told.startswith(said) and bool(told) == alone
    if alone:
        with pytest.raises(KeyboardInterrupt):
            interrupt()


def test_the_time_limit_is_in_minutes_after_the_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = StopRequests(2.0, began=100.0)
    codes = []
    for now in (219.0, 220.0):
        monkeypatch.setattr("time.monotonic", lambda now=now: now)
        codes.append(requests.code)
    assert codes == [0, OUT_OF_TIME]


def test_ignored_interrupts_stay_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests = StopRequests(None, alone=True).heed()
    interrupt()
    assert requests.code == 0
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
