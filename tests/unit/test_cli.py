"""Flags, and how commands end: a mistake or a lack of memory is one line with a remedy, a bug keeps its traceback."""

import errno
import os
import pickle
import re
import sys
from argparse import Namespace
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ddrp.__main__ import sleep_while_waiting
from megatron_ddrp.cli import ArgumentParser, Subcommand, parse_sections, parse_subcommand
from megatron_ddrp.commands import COMMANDS, functions
from megatron_ddrp.config import Config
from megatron_ddrp.config.reading import Section, option
from megatron_ddrp.engine.layout import Setup
from megatron_ddrp.errors import (
    FAILURE,
    WRONG_ARGUMENTS,
    UserError,
    allocations_as_user_errors,
    code_of_others,
    need_packages,
    refusals_as_user_errors,
    run_command,
)
from megatron_ddrp.foreign import reading
from megatron_ddrp.lab.analysis import command as commands
from megatron_ddrp.memory import estimated_needs, need_less_memory
from megatron_ddrp.parallel.process_group import lost_rank_in_one_line
from megatron_ddrp.tasks.finetune import workers as sweep
from megatron_ddrp.tasks.minimal_pairs import scoring
from megatron_ddrp.tasks.minimal_pairs.pairs import PairJob
from tests.refusals import refused, wrong_arguments


def parser():
    made = ArgumentParser(prog="tool")
    made.add_argument("--vocab-file", help="vocabulary")
    made.add_argument("--deepspeed_config", help="file")
    made.add_argument("--steps", type=int, default=7, help="how many")
    made.add_argument("--fast", action="store_true", help="hurry")
    made.add_argument("words", nargs="*")
    return made


@pytest.mark.parametrize("flag", ["--vocab-file", "--vocab_file"])
@pytest.mark.parametrize("other", ["--deepspeed_config", "--deepspeed-config"])
def test_both_spellings_with_and_without_equals(flag, other):
    parsed = parser().parse_args([flag, "a_b-c", f"{other}=d_e-f"])
    assert (parsed.vocab_file, parsed.deepspeed_config) == ("a_b-c", "d_e-f")


def test_words_after_a_double_dash_subcommands_and_help():
    """Words stay as they are; subcommands share the rules; help shows the defaults that say something."""
    assert parser().parse_args(["--", "--vocab_file"]).words == ["--vocab_file"]
    made = ArgumentParser(prog="tool")
    made.add_subparsers(dest="command").add_parser("merge").add_argument("--output-prefix")
    assert made.parse_args(["merge", "--output_prefix", "a"]).output_prefix == "a"
    text = parser().format_help()
    assert "how many (default: 7)" in text
    assert "None" not in text and "False" not in text


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--vocab-fil", "x"], "unrecognized arguments: --vocab-fil; did you mean --vocab-file?"),
        (["--steps", "many"], "argument --steps: invalid int value: 'many'"),
        (["--vocab-file"], "argument --vocab-file: expected one argument"),
    ],
)
def test_wrong_arguments_are_one_line_and_exit_2(arguments, complaint, capsys):
    error = wrong_arguments(re.escape(complaint), parser().parse_args, arguments)
    assert str(error) == f"{complaint} (see tool --help)"
    assert capsys.readouterr() == ("", "")


def test_a_misspelt_required_flag_is_answered_with_the_right_one():
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


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize(("word", "nearest"), [("preproces", "preprocess"), ("analyse", "analyze"), ("x", None)])
def test_a_misspelt_choice_is_answered_with_the_nearest_one(word, nearest, several):
    made = ArgumentParser(prog="tool")
    if several:
        commands = made.add_subparsers(metavar="COMMAND")
        for name in ("preprocess", "analyze"):
            commands.add_parser(name)
    else:
        made.add_argument("command", choices=["preprocess", "analyze"])
    said = str(refused(f"invalid choice: '{word}'", made.parse_args, [word]))
    assert ("did you mean" in said) is bool(nearest) and (nearest is None or f"; did you mean {nearest}?" in said)


@dataclass(frozen=True)
class Words(Section):
    """words"""

    name: str = option(MISSING, "text")
    folder: Path | None = option(None, "path")
    files: tuple[Path, ...] = option((), "paths", nargs="+")
    place: str = option("here", "positional", positional=True, nargs="?")
    size: int = option(1, "number", within="[1, 10]")


@pytest.mark.parametrize("words", [["--name", ""], ["--folder", " "], ["--files", "a", ""], ["", "--name", "a"]])
def test_an_empty_word_is_no_text_and_no_path(words):
    given = words if "--name" in words else ["--name", "a", *words]
    wrong_arguments(r"got '.?', expected some text", parse_sections, ArgumentParser(prog="tool"), (Words,), given)


def test_options_become_values_of_their_types_with_defaults():
    parsed = parse_sections(ArgumentParser(prog="tool"), (Words,), ["--name", "a", "--files", "b", "c"])
    assert (parsed.name, parsed.files) == ("a", (Path("b"), Path("c")))
    assert (parsed.folder, parsed.place, parsed.size) == (None, "here", 1)
    line = r"--size is 11: it must lie in \[1, 10\] \(see tool --help\)"
    refused(line, parse_sections, ArgumentParser(prog="tool"), (Words,), ["--name", "a", "--size", "11"])


def test_a_subcommand_has_options_of_its_own():
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
    newer.write_text('{"run": "b", "loss": 4}\n')
    rows = functions.compare([older, newer], output_dir=tmp_path / "page").rows
    assert rows == [{"run": "a", "loss": 2}, {"run": "b", "loss": 4}]


ROOT = Path(__file__).parents[2]


def outcome(main, capsys):
    with pytest.raises(SystemExit) as caught:
        run_command(main, "tool")
    return caught.value.code, capsys.readouterr().err


def fail(error):
    raise error


REFUSALS_OF_THE_SYSTEM = ("EEXIST", "ELOOP", "EMFILE", "ENFILE", "EBADF")
ENDS = [
    (UserError("two\n lines"), 1, "two lines"),
    (UserError("wrong", exit_code=2), 2, "wrong"),
    (KeyboardInterrupt(), 130, "interrupted"),
    (OSError(errno.ENOSPC, "No space left on device", "out.bin"), 1, "out.bin: No space left on device"),
    (RuntimeError("Symlink loop from 'a'"), 1, "Symlink loop from 'a'; remove the link, or give another path"),
    *((OSError(getattr(errno, name), "the reason", "f"), 1, "f: the reason") for name in REFUSALS_OF_THE_SYSTEM),
]


@pytest.mark.parametrize(("error", "code", "line"), ENDS, ids=lambda value: str(value)[:20])
def test_mistakes_are_one_line(error, code, line, capsys):
    assert outcome(lambda: fail(error), capsys) == (code, f"tool: error: {line}\n")


def test_every_refusal_of_a_file_operation_is_a_line():
    """Also one that nobody foresaw: a rank that ended with a traceback would leave the others waiting."""
    for number, words in ((errno.EEXIST, "File exists"), (errno.EREMOTEIO, "Remote I/O error")):
        with pytest.raises(UserError, match=f"run/x: {words}"), refusals_as_user_errors("run/x"):
            raise OSError(number, words)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("mine"),
        RuntimeError("cannot allocate mine"),
        RuntimeError("NCCL of mine"),
        RuntimeError("Symlink loop of mine"),
        BrokenPipeError("mine"),
        OSError(errno.ENOSPC, "mine"),
        ValueError("mine"),
    ],
    ids=str,
)
def test_errors_of_others_stay_as_they_are(error):
    @code_of_others()
    def theirs():
        raise error

    def ours():
        with lost_rank_in_one_line(), allocations_as_user_errors(), refusals_as_user_errors("run"), reading("file"):
            theirs()

    with pytest.raises(type(error)) as raised:
        run_command(ours, "tool")
    assert raised.value is error


def test_a_mistake_of_others_is_one_line_and_of_one_rank(capsys):
    error = UserError("theirs", WRONG_ARGUMENTS)
    assert error.agreed
    assert outcome(code_of_others()(lambda: fail(error)), capsys) == (2, "tool: error: theirs\n")
    assert not error.agreed


def test_success_and_result_become_the_exit_code_which_crosses_processes(capsys):
    assert outcome(lambda: None, capsys) == (0, "")
    assert outcome(lambda: 3, capsys) == (3, "")
    assert pickle.loads(pickle.dumps(UserError("x", exit_code=2))).exit_code == 2


@pytest.mark.parametrize(
    "bug", [ZeroDivisionError(), OSError(errno.EINVAL, "Invalid argument"), RuntimeError("Symlinks")]
)
def test_bugs_keep_their_traceback(bug):
    with pytest.raises(type(bug)):
        run_command(lambda: fail(bug), "tool")


@pytest.mark.parametrize(
    "allocate",
    [
        lambda: torch.empty(2**56),
        lambda: torch.empty(2**62, 2**62, device="meta"),
        lambda: np.empty(2**50),
        lambda: fail(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")),
        lambda: fail(RuntimeError("unable to mmap 8 bytes from file </dev/shm/x>: Cannot allocate memory (12)")),
    ],
)
def test_memory_that_cannot_be_had_is_one_line(allocate):
    with pytest.raises(UserError, match="^out of memory: [^[][^\n]+; use a smaller"), allocations_as_user_errors():
        allocate()


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 31.73 GiB of which 1.20 "
                "GiB is free. Including non-PyTorch memory, this process has 30.51 GiB memory in use. Of the allocated "
                "memory 29.10 GiB is allocated by PyTorch, and 512.00 MiB is reserved by PyTorch but unallocated."
            ),
            "Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 31.73 GiB of which 1.20 GiB is free. Including "
            "non-PyTorch memory, this process has 30.51 GiB memory in use",
        ),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you tried "
                "to allocate 4294967296 bytes. Error code 12 (Cannot allocate memory)"
            ),
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4,294,967,296 bytes",
        ),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), None),
        (
            RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later"),
            "CUDA error: out of memory",
        ),
        (MemoryError(), "the system has no more"),
    ],
)
def test_a_lack_of_memory_says_what_was_asked_for_and_what_to_lower(error, line):
    with pytest.raises(UserError) as raised, allocations_as_user_errors(lambda: "use less"):
        fail(error)
    assert str(raised.value) == f"out of memory: {line or error}; use less"


def test_every_command_answers_a_lack_of_memory_in_one_line(capsys):
    code, line = outcome(lambda: fail(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")), capsys)
    assert code == 1 and line.startswith("tool: error: out of memory: Tried to allocate 2 GiB; use a smaller")


def test_other_runtime_errors_stay_bugs():
    with pytest.raises(RuntimeError, match="shapes"), allocations_as_user_errors():
        fail(RuntimeError("shapes differ"))


def test_missing_packages_are_named_with_the_command_that_installs_them(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "markdown", None)
    need_packages("the page", "json")
    line = "^the page needs matplotlib, not installed here: pip install matplotlib$"
    assert refused(line, need_packages, "the page", "json", "matplotlib").exit_code == FAILURE
    line, packages = "needs markdown and matplotlib.*: pip install markdown matplotlib$", ("markdown", "matplotlib")
    wrong_arguments(line, need_packages, "the page", *packages, exit_code=WRONG_ARGUMENTS)


def test_no_message_asks_for_a_release_of_this_package():
    """A clone is installed, not a release: a message names the package that is missing."""
    texts = {path: path.read_text() for path in (ROOT / "megatron_ddrp").rglob("*.py")}
    assert len(texts) > 100 and not [str(path) for path, text in texts.items() if "megatron-ddrp[" in text]


SMALL = Config().replace(model={"num_layers": 2, "hidden_size": 128, "num_attention_heads": 2, "seq_length": 64})


def no_memory(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1.00 GiB")


@pytest.mark.parametrize(
    ("device", "training", "parallel", "named", "absent"),
    [
        ("cpu", {}, {}, "--micro-batch-size 16 instead of 32, --checkpoint-activations, ", "--offload"),
        ("cuda", {}, {"zero_stage": 1}, "--offload-optimizer cpu", "--zero-stage 1 instead"),
        ("cuda", {"micro_batch_size": 1}, {"checkpoint_activations": True}, "use --zero-stage ", "--micro"),
        ("cuda", {}, {"offload_optimizer": "cpu"}, "or more ranks", "--offload"),
    ],
)
def test_a_run_is_told_its_estimate_and_what_lowers_it(device, training, parallel, named, absent):
    config = SMALL.replace(training={"micro_batch_size": 32, "global_batch_size": 256, **training}, parallel=parallel)
    setup = Setup.planned(config, 8, device)
    text = need_less_memory(setup)
    assert named in text and absent not in text, text
    needed = estimated_needs(setup)[config.parallel.zero_stage]
    assert text.startswith(f"a rank needs about {needed.total / 2**30:,.1f} GiB by estimate, ")


def test_a_fine_tuning_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Namespace(task="RTE", encoder="e", micro_batch_size=16, max_seq_length=128)
    monkeypatch.setattr(sweep, "build_model", no_memory)
    here = Namespace(data={"RTE": Namespace(task=None)}, encoders={"e": None}, device=None)
    line = "2.00 GiB.*; use --micro-batch-size 8 instead of 16, --max-seq-length below 128"
    refused(line, sweep.Sweep.finetune, here, run, None, {})


def test_a_scoring_of_pairs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    job = PairJob("fingerprint", None, "uid", "digest", "l2r")
    monkeypatch.setattr(scoring, "encode_pairs", lambda *_: ([[5]], [[6]]))
    monkeypatch.setattr(scoring, "score_sentences", no_memory)
    monkeypatch.setattr(scoring.Scorer, "model", lambda *_: None)
    subject = Namespace(tokenizer=None, max_length=8)
    plan = Namespace(subjects={("fingerprint", None): subject}, paradigms={"uid": None})
    plan.options = Namespace(tokens_per_batch=512)
    scorer = scoring.Scorer(plan, torch.device("cpu"), print)  # type: ignore[arg-type]
    refused("; use --tokens-per-batch 256 instead of 512, or fewer --workers", scorer.perform, job)


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("triangle --load run --data-path d --output f.png --batch-size 8", "use --batch-size 4 instead of 8"),
        ("throughput --load run --output f.json", "use a smaller --tokens"),
        ("notes --load run", "use a machine with more memory"),
    ],
)
def test_an_analysis_is_told(words: str, advice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_ddrp.lab.analysis import reports

    monkeypatch.setattr("sys.argv", ["analyze.py", *words.split()])
    for name in ("report_triangles", "report_throughput", "report_notes"):
        monkeypatch.setattr(reports, name, no_memory)
    refused(f"^out of memory: Tried to allocate 2.00 GiB.*; {advice}$", commands.main)


@pytest.mark.parametrize(
    ("load", "given", "policy"),
    [
        (3.1, {}, "PASSIVE"),
        (2.9, {}, None),
        (9, {"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE"),
        (9, {"GOMP_SPINCOUNT": "7"}, None),
    ],
)
def test_waiting_threads_sleep_on_a_busy_machine_unless_the_environment_says_how(monkeypatch, load, given, policy):
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    sleep_while_waiting()
    assert os.environ.get("OMP_WAIT_POLICY") == policy
