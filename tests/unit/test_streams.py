"""How commands and ranks end: exit codes, words, signals that ask a run to stop, and streams that are closed or cannot
hold every character."""

import contextlib
import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ddrp import __main__ as entry
from megatron_ddrp.commands import pretrain
from megatron_ddrp.data.progress import progress
from megatron_ddrp.errors import UserError, run_command
from megatron_ddrp.run.launch import OUT_OF_TIME, SIGNALS, StopRequests, is_launched, launched_world_size
from megatron_ddrp.train import Trained
from tests.datasets import write_dataset

ROOT = Path(__file__).parents[2]
ASCII = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def open_streams(monkeypatch, closed):
    """Return streams as Python opens them in an ASCII locale, and close some for the program."""
    made = {name: io.TextIOWrapper(io.BytesIO(), encoding="ascii") for name in ("stdin", "stdout", "stderr")}
    for name, stream in made.items():
        monkeypatch.setattr(sys, name, None if name in closed else stream)
    return made


def said_to(stream: io.TextIOWrapper) -> bytes:
    stream.flush()
    return stream.buffer.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("words", [[], *([name] for name in entry.COMMANDS)], ids=str)
@pytest.mark.parametrize("closed", ["none", "stdout", "stderr", "stdout, stderr"])
def test_help_and_refusals_of_every_command(words, closed, monkeypatch):
    monkeypatch.setattr(os, "_exit", sys.exit)  # by which ranks end
    for flag, code, teller in (("--help", 0, "stdout"), ("--no-such-flag", 2, "stderr")):
        streams = open_streams(monkeypatch, closed)
        monkeypatch.setattr(sys, "argv", ["megatron-ddrp", *words, flag])
        with pytest.raises(SystemExit) as end:
            entry.main()
        assert end.value.code == code
        for name in ("stdout", "stderr"):
            text = said_to(streams[name])
            assert bool(text) == (name == teller and name not in closed), (name, text)
            assert b"Traceback" not in text


@pytest.mark.parametrize("closed", ["stdout", "stderr", "stdout, stderr", "stdin, stdout, stderr"])
def test_words_for_a_closed_stream_go_nowhere(closed, monkeypatch):
    streams = open_streams(monkeypatch, closed)

    def main() -> None:
        assert sys.stdin.read() == ""
        print("α → β \udce9")
        print("warning: α", file=sys.stderr)
        with progress(" rows", 3, "α") as bar:
            bar.update(3)
        raise UserError("α is wrong", 2)

    with pytest.raises(SystemExit) as end:
        run_command(main, "tool")
    assert end.value.code == 2
    lines = {"stdout": b"\\u03b1 \\u2192 \\u03b2 \\udce9\n", "stderr": b"tool: error: \\u03b1 is wrong\n"}
    assert [name for name in lines if name not in closed and not said_to(streams[name]).endswith(lines[name])] == []


WRITER = """
import os, sys
from megatron_ddrp.errors import run_command
from megatron_ddrp.data.atomic import atomic_file
def main():
    with atomic_file(sys.argv[1]) as file:
        os.system("echo spoken; echo spoken >&2")
        file.write(b"written")
    print("→", open(sys.argv[0]).read())  # as libraries read their files, in the locale's encoding
run_command(main)
"""


@pytest.mark.parametrize("redirection", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-", ""])
def test_a_command_succeeds_and_writes_its_files_alone(redirection: str, tmp_path: Path) -> None:
    """A library's words for a closed stream must not go into the file that has got its number."""
    prefix = write_dataset(tmp_path / "text_document", [[[5, 6, 7]]] * 3).prefix
    (tmp_path / "program.py").write_text(WRITER, encoding="utf-8")
    inspect, variables = ["-m", "megatron_ddrp", "dataset", "inspect", prefix], ASCII | {"PYTHONPATH": str(ROOT)}
    for words in ([str(tmp_path / "program.py"), str(tmp_path / "output")], inspect):
        command = ["bash", "-c", f'"$@" {redirection}', "bash", sys.executable, *words]
        done = subprocess.run(command, env=os.environ | variables, capture_output=True, cwd=ROOT, timeout=60)
        assert done.returncode == 0 and b"Error" not in done.stderr, done.stderr
        assert bool(done.stdout) == (">&-" not in redirection.replace("2>&-", ""))
    assert (tmp_path / "output").read_bytes() == b"written"


def test_a_stream_that_takes_no_more_is_one_line_and_exit_code_1() -> None:
    code = "from megatron_ddrp.errors import run_command; run_command(lambda: print('said'), 'tool')"
    command = ["bash", "-c", '"$@" > /dev/full', "bash", sys.executable, "-c", code]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (done.returncode, done.stderr) == (1, "tool: error: standard output: No space left on device\n")


def test_every_script_ends_in_the_one_entry() -> None:
    paths = (*ROOT.glob("*.py"), *ROOT.glob("tools/*.py"), *ROOT.glob("tasks/**/*.py"))
    scripts = {path: text for path in paths if "__main__" in (text := path.read_text(encoding="utf-8"))}
    assert len(scripts) > 5
    assert [path for path, text in scripts.items() if "run(" not in text and "run_command(" not in text] == []


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
    """Return the exit code, standard output and standard error of a process that runs `main` as a rank."""
    words = [sys.executable, "-c", PROGRAM.format(main=main)]
    ended = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=variables, timeout=60)
    return ended.returncode, ended.stdout, ended.stderr


def test_a_rank_ends_with_its_code_and_no_teardown_and_a_bug_keeps_its_traceback() -> None:
    assert [end(main) for main in ("None", "75")] == [(0, "said before", ""), (75, "said before", "")]
    assert end("fail(UserError('wrong', 2))") == (2, "said before", "tool: error: wrong\n")
    assert end("fail(KeyboardInterrupt())") == (130, "said before", "tool: error: interrupted\n")
    code, said, error = end("1 / 0")
    assert (code, said) == (1, "said before")
    assert error.startswith("Traceback") and error.endswith("ZeroDivisionError: division by zero\n")


BATCH = "SLURM_PROCID=0 SLURM_NTASKS=4"
LAUNCHES = {
    "": (1, False),
    "RANK=0 WORLD_SIZE=1": (1, True),
    "RANK=3 WORLD_SIZE=8": (8, True),
    BATCH: (1, False),  # the batch script itself, or the shell of salloc
    f"{BATCH} MASTER_ADDR=node1": (4, True),
    f"{BATCH} SLURM_STEP_NUM_TASKS=1": (1, False),  # srun --pty
    f"{BATCH} SLURM_STEP_NUM_TASKS=4": (4, True),
    "OMPI_COMM_WORLD_SIZE=2": (1, False),  # refused later: they cannot meet
    f"{BATCH} SLURM_STEP_NUM_TASKS=2 OMPI_COMM_WORLD_SIZE=8 MASTER_ADDR=node1": (8, True),
}


@pytest.mark.parametrize("variables", LAUNCHES)
def test_ranks_are_those_that_a_run_would_have(variables, monkeypatch):
    monkeypatch.setattr(os, "environ", dict(word.split("=") for word in variables.split()))
    assert (launched_world_size(), is_launched()) == LAUNCHES[variables]


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
def test_a_variable_that_is_no_number_is_one_line(name: str) -> None:
    words = [sys.executable, "-m", "megatron_ddrp", "pretrain", "--dry-run"]
    ended = subprocess.run(
        words, capture_output=True, text=True, cwd=ROOT, env={**os.environ, name: "abc"}, timeout=120
    )
    line = f"megatron-ddrp pretrain: error: {name} is 'abc', not a number: let deepspeed or torchrun set it\n"
    assert (ended.returncode, ended.stderr) == (1, line)


def test_an_agreed_error_is_told_by_rank_0_and_another_by_its_own_rank_and_a_refusal_once_on_every_host() -> None:
    """A command may be wrong where that of rank 0 is not."""
    agreed, own, wrong = "fail(shared_error('x'))", "fail(UserError('x'))", "fail(UserError('wrong', 2))"
    first, second = (end(agreed, RANK=rank) for rank in "01")
    assert (first[2], second[0], second[2]) == ("tool: error: x\n", 1, "")
    assert [end(own, RANK=rank)[2] for rank in "01"] == ["tool: error: x\n"] * 2
    for variable in ("LOCAL_RANK", "SLURM_LOCALID"):
        told = [end(wrong, RANK="2", **{variable: number})[2] for number in "01"]
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


RECEIVED = [(False, (number,)) for number in SIGNALS]
RECEIVED += [(False, (signal.SIGINT, signal.SIGINT))]  # a launcher may send several
RECEIVED += [(True, (signal.SIGINT,)), (True, (signal.SIGTERM, signal.SIGINT))]


@pytest.mark.parametrize(("alone", "signals"), RECEIVED)
def test_a_signal_is_a_request_and_a_second_interrupt_ends_a_lone_process(alone, signals, capfd):
    requests = StopRequests(None, alone=alone).heed()
    assert requests.code == 0
    for number in signals:
        os.kill(os.getpid(), number)
    assert requests.code == signals[-1]
    told = capfd.readouterr().err
    assert told.startswith("SIGINT: stopping after this step; once more ends at once") if alone else told == ""
    with pytest.raises(KeyboardInterrupt) if alone else contextlib.nullcontext():
        os.kill(os.getpid(), signal.SIGINT)


def test_the_time_limit_is_in_minutes_after_the_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = StopRequests(2.0, began=100.0)
    for now, code in ((219.0, 0), (220.0, OUT_OF_TIME)):
        monkeypatch.setattr("time.monotonic", lambda now=now: now)
        assert requests.code == code


def test_ignored_interrupts_stay_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests = StopRequests(None, alone=True).heed()
    os.kill(os.getpid(), signal.SIGINT)
    assert requests.code == 0 and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
