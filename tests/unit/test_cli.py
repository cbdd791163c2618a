"""Flags, and how commands and ranks end: a mistake or a lack of memory is one line with a remedy, a bug keeps its
traceback, a signal asks a run to stop; also with streams that are closed or cannot hold every character."""

import contextlib
import errno
import functools
import io
import itertools
import os
import pickle
import re
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ddrp import __main__ as entry
from megatron_ddrp import errors
from megatron_ddrp.cli import ArgumentParser, Subcommand, parse_sections, parse_subcommand
from megatron_ddrp.commands import COMMANDS, functions, pretrain
from megatron_ddrp.config import Config
from megatron_ddrp.config.reading import Section, option
from megatron_ddrp.data.progress import progress
from megatron_ddrp.engine.layout import Setup
from megatron_ddrp.errors import FAILURE, WRONG_ARGUMENTS, UserError, allocations_as_user_errors, run_command
from megatron_ddrp.foreign import reading
from megatron_ddrp.lab.analysis import command as commands
from megatron_ddrp.memory import estimated_needs, need_less_memory
from megatron_ddrp.parallel.process_group import lost_rank_in_one_line
from megatron_ddrp.run.launch import OUT_OF_TIME, SIGNALS, StopRequests, is_launched, launched_world_size
from megatron_ddrp.tasks.finetune import workers as sweep
from megatron_ddrp.tasks.minimal_pairs import scoring
from megatron_ddrp.tasks.minimal_pairs.pairs import PairJob
from megatron_ddrp.train import Trained
from tests.datasets import write_dataset
from tests.refusals import refused, wrong_arguments

ROOT = Path(__file__).parents[2]
NEAREST = {"preproces": ["preprocess"], "analyse": ["analyze"], "x": []}
OF_THE_SYSTEM = (errno.EEXIST, errno.ELOOP, errno.EMFILE, errno.ENFILE, errno.EBADF)
SMALL = Config().replace(model={"num_layers": 2, "hidden_size": 128, "num_attention_heads": 2, "seq_length": 64})
ASCII = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def parser():
    made = ArgumentParser(prog="tool")
    made.add_argument("--vocab-file", help="vocabulary")
    made.add_argument("--deepspeed_config", help="file")
    made.add_argument("--steps", type=int, default=7, help="how many")
    made.add_argument("--fast", action="store_true", help="hurry")
    made.add_argument("words", nargs="*")
    return made


def test_both_spellings_words_after_a_double_dash_subcommands_and_help():
    for flag, file in itertools.product(("--vocab-file", "--vocab_file"), ("--deepspeed_config", "--deepspeed-config")):
        parsed = parser().parse_args([flag, "a_b-c", f"{file}=d_e-f"])
        assert (parsed.vocab_file, parsed.deepspeed_config) == ("a_b-c", "d_e-f")
    assert parser().parse_args(["--", "--vocab_file"]).words == ["--vocab_file"]
    made = ArgumentParser(prog="tool")
    made.add_subparsers(dest="command").add_parser("merge").add_argument("--output-prefix")
    assert made.parse_args(["merge", "--output_prefix", "a"]).output_prefix == "a"
    text = parser().format_help()
    assert "how many (default: 7)" in text and "None" not in text and "False" not in text


def test_wrong_arguments_are_one_line_and_exit_2_and_a_misspelt_required_flag_is_answered_with_the_right_one(capsys):
    for words, complaint in (
        ("--vocab-fil x", "unrecognized arguments: --vocab-fil; did you mean --vocab-file?"),
        ("--steps many", "argument --steps: invalid int value: 'many'"),
        ("--vocab-file", "argument --vocab-file: expected one argument"),
    ):
        assert str(wrong_arguments("", parser().parse_args, words.split())) == f"{complaint} (see tool --help)"
    made = ArgumentParser(prog="tool")
    made.hints = {"pieces": "use --vocab-size"}
    made.add_argument("--vocab-size", required=True)
    made.add_argument("--output", required=True)
    for given, said in (
        (["--vocab_sise", "4000"], "; --vocab_sise is unknown: did you mean --vocab-size?"),
        (["--pieces=4000", "--", "--xyz"], "; --pieces is unknown: use --vocab-size"),
        (["--qqq", "--output", "x"], "; --qqq is unknown"),
        ([], ""),
    ):
        missing = "--vocab-size" if "--output" in given else "--vocab-size, --output"
        complaint = f"the following arguments are required: {missing}{said} (see tool --help)"
        assert str(refused("are required", made.parse_args, given)) == complaint
    assert capsys.readouterr() == ("", "")


def test_a_misspelt_choice_is_answered_with_the_nearest_one():
    parent, single = ArgumentParser(prog="tool"), ArgumentParser(prog="tool")
    commands = parent.add_subparsers(metavar="COMMAND")
    for name in ("preprocess", "analyze"):
        commands.add_parser(name)
    single.add_argument("command", choices=["preprocess", "analyze"])
    for made, (word, nearest) in itertools.product((parent, single), NEAREST.items()):
        said = str(refused(f"invalid choice: '{word}'", made.parse_args, [word]))
        assert re.findall("; did you mean (.*)[?]", said) == nearest


@dataclass(frozen=True)
class Words(Section):
    """words"""

    name: str = option(MISSING, "text")
    folder: Path | None = option(None, "path")
    files: tuple[Path, ...] = option((), "paths", nargs="+")
    place: str = option("here", "positional", positional=True, nargs="?")
    size: int = option(1, "number", within="[1, 10]")


def test_options_become_values_of_their_types_with_defaults_and_an_empty_word_is_no_text_and_no_path():
    def parse(*words):
        return parse_sections(ArgumentParser(prog="tool"), (Words,), words)

    parsed = parse("--name", "a", "--files", "b", "c")
    assert (parsed.name, parsed.files) == ("a", (Path("b"), Path("c")))
    assert (parsed.folder, parsed.place, parsed.size) == (None, "here", 1)
    refused(r"--size is 11: it must lie in \[1, 10\] \(see tool --help\)", parse, "--name", "a", "--size", "11")
    for words in (["--name", ""], ["--name", "a", "--files", "a", " "], ["", "--name", "a"]):
        wrong_arguments("got '.?', expected some text", parse, *words)

    subcommands = {"first": Subcommand("one", "One.", (Words,)), "second": Subcommand("two", "Two.", ())}
    parsed = parse_subcommand("All.", subcommands, ["first", "--name", "a", "there"], plugins=False)
    assert (parsed.command, parsed.name, parsed.place) == ("first", "a", "there")
    other = ["second", "--name", "a"]
    refused("unrecognized arguments: --name a", parse_subcommand, "All.", subcommands, other, plugins=False)


@pytest.mark.parametrize("name", ["finetune", "glue", "minimal-pairs", "compare"])
def test_a_function_whose_command_ended_with_a_code_raises_it(name, tmp_path, monkeypatch):
    monkeypatch.setattr(f"{COMMANDS[name].module}.main", lambda words: 3)
    function, words = getattr(functions, name.replace("-", "_")), ["plan.yaml"] if name == "compare" else []
    assert refused(f"{name} ended with exit code 3", function, *words, output_dir=tmp_path).exit_code == 3


def test_a_comparison_of_rows_returns_the_newest_row_of_each_run(tmp_path, monkeypatch):
    monkeypatch.setattr(f"{COMMANDS['compare'].module}.main", lambda words: 0)
    older, newer = tmp_path / "older.jsonl", tmp_path / "newer.jsonl"
    older.write_text('{"run": "a", "loss": 1}\n{"run": "a", "loss": 2}\n{"run": "b", "loss": 3}\n')
    newer.write_text('{"run": "b", "loss": 4}\n{"run": "b", "lo')  # somebody writes a row, or was killed
    rows = functions.compare([older, newer], output_dir=tmp_path / "page").rows
    assert rows == [{"run": "a", "loss": 2}, {"run": "b", "loss": 4}]


def outcome(main, capsys):
    with pytest.raises(SystemExit) as caught:
        run_command(main, "tool")
    return caught.value.code, capsys.readouterr().err


def fail(error):
    raise error


def test_mistakes_and_every_refusal_of_a_file_operation_are_one_line(capsys):
    """Also one that nobody foresaw: a rank that ended with a traceback would leave the others waiting."""
    for error, code, line in (
        (UserError("two\n lines"), 1, "two lines"),
        (UserError("wrong", exit_code=2), 2, "wrong"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError(errno.ENOSPC, "No space left on device", "out.bin"), 1, "out.bin: No space left on device"),
        (RuntimeError("Symlink loop from 'a'"), 1, "Symlink loop from 'a'; remove the link, or give another path"),
        *((OSError(number, "the reason", "f"), 1, "f: the reason") for number in OF_THE_SYSTEM),
    ):
        assert outcome(functools.partial(fail, error), capsys) == (code, f"tool: error: {line}\n")
    for number, words in ((errno.EEXIST, "File exists"), (errno.EREMOTEIO, "Remote I/O error")):
        with pytest.raises(UserError, match=f"run/x: {words}"), errors.refusals_as_user_errors("run/x"):
            raise OSError(number, words)


OF_OTHERS = [MemoryError("mine"), BrokenPipeError("mine"), OSError(errno.ENOSPC, "mine"), ValueError("mine")]
OF_OTHERS += map(RuntimeError, ["cannot allocate mine", "NCCL of mine", "Symlink loop of mine"])


@pytest.mark.parametrize("error", OF_OTHERS, ids=str)
def test_errors_of_others_stay_as_they_are(error):
    @errors.code_of_others()
    def theirs():
        raise error

    def ours():
        with lost_rank_in_one_line(), allocations_as_user_errors(), errors.refusals_as_user_errors("run"), reading("f"):
            theirs()

    with pytest.raises(type(error)) as raised:
        run_command(ours, "tool")
    assert raised.value is error


def test_a_mistake_of_others_is_one_line_and_of_one_rank(capsys):
    error = UserError("theirs", WRONG_ARGUMENTS)
    assert error.agreed
    assert outcome(errors.code_of_others()(lambda: fail(error)), capsys) == (2, "tool: error: theirs\n")
    assert not error.agreed


def test_success_and_result_become_the_exit_code_which_crosses_processes_and_bugs_keep_their_traceback(capsys):
    assert [outcome(lambda code=code: code, capsys) for code in (None, 3)] == [(0, ""), (3, "")]
    assert pickle.loads(pickle.dumps(UserError("x", exit_code=2))).exit_code == 2
    for bug in (ZeroDivisionError(), OSError(errno.EINVAL, "Invalid argument"), RuntimeError("Symlinks")):
        with pytest.raises(type(bug)):
            run_command(functools.partial(fail, bug), "tool")


LACK = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
GPU_SAYS = """Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 31.73 GiB of which 1.20 GiB is free. \
Including non-PyTorch memory, this process has 30.51 GiB memory in use"""
MORE = "Of the allocated memory 29.10 GiB is allocated by PyTorch, and 512.00 MiB is reserved by PyTorch"
CPU_SAYS = "DefaultCPUAllocator: can't allocate memory: you tried to allocate"
GPU_ERROR = "CUDA error: out of memory"
CPU_ENDS = "bytes. Error code 12 (Cannot allocate memory)"


def test_memory_that_cannot_be_had_is_one_line_which_says_what_was_asked_for_and_what_to_lower(capsys):
    for allocate in (
        lambda: torch.empty(2**56),
        lambda: torch.empty(2**62, 2**62, device="meta"),
        lambda: np.empty(2**50),
        lambda: fail(LACK),
        lambda: fail(RuntimeError("unable to mmap 8 bytes from file </dev/shm/x>: Cannot allocate memory (12)")),
    ):
        with pytest.raises(UserError, match="^out of memory: [^[][^\n]+; use a smaller"), allocations_as_user_errors():
            allocate()
    for error, line in (
        (torch.OutOfMemoryError(f"CUDA out of memory. {GPU_SAYS}. {MORE}"), GPU_SAYS),
        (RuntimeError(f"[enforce fail] err == 0. {CPU_SAYS} 4294967296 {CPU_ENDS}"), f"{CPU_SAYS} 4,294,967,296 bytes"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), None),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later"), GPU_ERROR),
        (MemoryError(), "the system has no more"),
    ):
        with pytest.raises(UserError) as raised, allocations_as_user_errors(lambda: "use less"):
            fail(error)
        assert str(raised.value) == f"out of memory: {line or error}; use less"
    code, line = outcome(lambda: fail(LACK), capsys)
    assert code == 1 and line.startswith("tool: error: out of memory: Tried to allocate 2 GiB; use a smaller")
    with pytest.raises(RuntimeError, match="shapes"), allocations_as_user_errors():
        fail(RuntimeError("shapes differ"))


def test_missing_packages_are_named_with_the_command_that_installs_them(monkeypatch):
    for name in ("matplotlib", "markdown"):
        monkeypatch.setitem(sys.modules, name, None)
    errors.need_packages("the page", "json")
    line = "^the page needs matplotlib, not installed here: pip install matplotlib$"
    assert refused(line, errors.need_packages, "the page", "json", "matplotlib").exit_code == FAILURE
    line, packages = "needs markdown and matplotlib.*: pip install markdown matplotlib$", ("markdown", "matplotlib")
    wrong_arguments(line, errors.need_packages, "the page", *packages, exit_code=WRONG_ARGUMENTS)


def no_memory(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1.00 GiB")


def test_a_run_is_told_its_estimate_and_what_lowers_it():
    for device, training, parallel, named, absent in (
        ("cpu", {}, {}, "--micro-batch-size 16 instead of 32, --checkpoint-activations, ", "--offload"),
        ("cuda", {}, {"zero_stage": 1}, "--offload-optimizer cpu", "--zero-stage 1 instead"),
        ("cuda", {"micro_batch_size": 1}, {"checkpoint_activations": True}, "use --zero-stage ", "--micro"),
        ("cuda", {}, {"offload_optimizer": "cpu"}, "or more ranks", "--offload"),
    ):
        batch = {"micro_batch_size": 32, "global_batch_size": 256, **training}
        setup = Setup.planned(SMALL.replace(training=batch, parallel=parallel), 8, device)
        text = need_less_memory(setup)
        assert named in text and absent not in text, text
        needed = estimated_needs(setup)[setup.config.parallel.zero_stage]
        assert text.startswith(f"a rank needs about {needed.total / 2**30:,.1f} GiB by estimate, ")


def test_a_fine_tuning_a_scoring_of_pairs_and_an_analysis_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_ddrp.lab.analysis import reports

    run = Namespace(task="RTE", encoder="e", micro_batch_size=16, max_seq_length=128)
    monkeypatch.setattr(sweep, "build_model", no_memory)
    here = Namespace(data={"RTE": Namespace(task=None)}, encoders={"e": None}, device=None)
    line = "2.00 GiB.*; use --micro-batch-size 8 instead of 16, --max-seq-length below 128"
    refused(line, sweep.Sweep.finetune, here, run, None, {})

    job = PairJob("fingerprint", None, "uid", "digest", "l2r")
    monkeypatch.setattr(scoring, "encode_pairs", lambda *_: ([[5]], [[6]]))
    monkeypatch.setattr(scoring, "score_sentences", no_memory)
    monkeypatch.setattr(scoring.Scorer, "model", lambda *_: None)
    subjects = {("fingerprint", None): Namespace(tokenizer=None, max_length=8)}
    plan = Namespace(subjects=subjects, paradigms={"uid": None}, options=Namespace(tokens_per_batch=512))
    scorer = scoring.Scorer(plan, torch.device("cpu"), print)
    refused("; use --tokens-per-batch 256 instead of 512, or fewer --workers", scorer.perform, job)

    for name, words, advice in (
        ("triangles", "triangle --load run --data-path d --output f.png --batch-size 8", "--batch-size 4 instead of 8"),
        ("throughput", "throughput --load run --output f.json", "a smaller --tokens"),
        ("notes", "notes --load run", "a machine with more memory"),
    ):
        monkeypatch.setattr("sys.argv", ["analyze.py", *words.split()])
        monkeypatch.setattr(reports, f"report_{name}", no_memory)
        refused(f"^out of memory: Tried to allocate 2.00 GiB.*; use {advice}$", commands.main)


def test_waiting_threads_sleep_on_a_busy_machine_unless_the_environment_says_how(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    for load, given, policy in (
        (3.1, {}, "PASSIVE"),
        (2.9, {}, None),
        (9, {"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE"),
        (9, {"GOMP_SPINCOUNT": "7"}, None),
    ):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        monkeypatch.setattr(os, "environ", {**given})
        entry.sleep_while_waiting()
        assert os.environ.get("OMP_WAIT_POLICY") == policy


@pytest.mark.parametrize("words", [[], *([name] for name in entry.COMMANDS)], ids=str)
def test_help_and_refusals_of_every_command(words, run_tool):
    for flag, code, lines in (("--help", 0, 0), ("--no-such-flag", 2, 1)):
        ended = run_tool(entry, *words, flag)
        assert (ended.returncode, ended.stderr.count("\n"), bool(ended.stdout)) == (code, lines, not lines)


@pytest.mark.parametrize("closed", ["stdout", "stderr", "stdout, stderr", "stdin, stdout, stderr"])
def test_words_for_a_closed_stream_go_nowhere(closed, monkeypatch):
    """The streams are as Python opens them in an ASCII locale."""
    streams = {name: io.TextIOWrapper(io.BytesIO(), encoding="ascii") for name in ("stdin", "stdout", "stderr")}
    for name, stream in streams.items():
        monkeypatch.setattr(sys, name, None if name in closed else stream)

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
    for name in lines.keys() - set(closed.split(", ")):
        streams[name].flush()
        assert streams[name].buffer.getvalue().endswith(lines[name])


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
    monkeypatch.setenv("WORLD_SIZE", "abc")
    refused("^WORLD_SIZE is 'abc', not a number: let deepspeed or torchrun set it$", launched_world_size)


def test_an_agreed_error_is_told_by_rank_0_and_another_by_its_own_rank_and_a_refusal_once_on_every_host() -> None:
    """A command may be wrong where that of rank 0 is not."""
    agreed, own, wrong = "fail(shared_error('x'))", "fail(UserError('x'))", "fail(UserError('wrong', 2))"
    first, second, without_number = (end(agreed, RANK=rank) for rank in ("0", "1", "abc"))
    assert (first[2], second[0], second[2], without_number[2]) == ("tool: error: x\n", 1, "", "tool: error: x\n")
    assert end(own, RANK="1")[2] == "tool: error: x\n"
    for variable in ("LOCAL_RANK", "SLURM_LOCALID"):
        told = [end(wrong, RANK="2", **{variable: number})[2] for number in "01"]
        assert told == ["tool: error: wrong\n", ""]


@pytest.mark.parametrize("code, save, saved", [(0, "a b", True), (75, "a b", True), (0, None, False), (0, "x", False)])
def test_a_finished_run_says_what_is_next(code, save, saved, monkeypatch, capsys):
    monkeypatch.setattr("megatron_ddrp.checkpoint.newest", lambda folder: folder if saved else None)
    monkeypatch.setattr("megatron_ddrp.train.train", lambda config, requests: Trained(code, 1))
    monkeypatch.setattr(StopRequests, "heed", lambda self: self)
    words = ["pretrain", "--data-path", "text", "--vocab-file", "vocab.txt"] + (["--save", save] if save else [])
    monkeypatch.setattr(sys, "argv", words)
    assert pretrain.main() == code
    printed, line = capsys.readouterr().out, "next: megatron-ddrp report --load 'a b' --output-dir 'a b'/report"
    assert (line in printed) is (saved and not code) and (saved or "next:" not in printed)


@pytest.fixture(autouse=True)
def interrupts_heeded() -> Iterator[None]:
    """Signals act as in a foreground process, whatever started the tests."""
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
    monkeypatch.setattr("time.monotonic", lambda: 100.0)
    requests = StopRequests(2.0)
    for now, code in ((219.0, 0), (220.0, OUT_OF_TIME)):
        monkeypatch.setattr("time.monotonic", lambda now=now: now)
        assert requests.code == code


def test_ignored_interrupts_stay_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests = StopRequests(None, alone=True).heed()
    os.kill(os.getpid(), signal.SIGINT)
    assert requests.code == 0 and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
