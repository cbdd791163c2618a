"""The quickstart's stages, with commands that only say what they were asked, and the tools that make its text and task.

The real parsers read its flags. Prose is collected out of docstrings. Its own task is balanced, without giveaways, from
different documents, the same every time."""

import json
import os
import random
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tools import collect_documentation, swap_words
from tools.swap_words import make_task, sentences, swap

SCRIPT = Path(__file__).parents[3] / "examples" / "quickstart.sh"
STAGES = [
    "collect_documentation.py",
    "train_tokenizer.py",
    "preprocess_data.py",
    "pretrain_bert.py",
    "convert_checkpoint.py",
    "swap_words.py",
    "tasks.finetune",
    "tasks.finetune",
    "analyze.py",
    "training_report.py",
]
STUB = """#!/usr/bin/env bash
echo "$(basename "$0") $*" >> "$CALLS"
[[ -z ${FAIL:-} || "$*" != *"$FAIL"* ]]
"""


@pytest.fixture
def quickstart(tmp_path):
    """A function that runs the script and returns (exit code, output, calls of this start)."""
    for name in ("python", "deepspeed"):
        stub = tmp_path / "bin" / name
        stub.parent.mkdir(exist_ok=True)
        stub.write_text(STUB)
        stub.chmod(0o755)

    def run(**variables):
        calls = tmp_path / "calls"
        calls.write_text("")
        path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
        environment = {"PATH": path, "CALLS": str(calls), "OUT": str(tmp_path / "out"), **variables}
        done = subprocess.run(["bash", str(SCRIPT)], env=environment, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr, calls.read_text().splitlines()

    return run


def stages(calls):
    """The stage that each call belongs to."""
    return [next(stage for stage in STAGES if stage in call) for call in calls]


def test_runs_every_stage_once_and_names_the_report(quickstart, tmp_path):
    code, output, calls = quickstart()
    assert code == 0
    assert stages(calls) == STAGES
    assert output.rstrip().endswith(f"The report: {tmp_path}/out/report/report.md")
    commands = (tmp_path / "out" / "commands.txt").read_text().splitlines()
    assert [" ".join(shlex.split(line)) for line in commands] == calls


def test_a_finished_start_is_not_repeated(quickstart):
    quickstart()
    code, _, calls = quickstart()
    assert (code, calls) == (0, [])


def test_goes_on_where_it_failed_and_keeps_what_is_there(quickstart, tmp_path):
    code, output, calls = quickstart(FAIL="pretrain_bert.py")
    assert code != 0
    assert "The report" not in output
    assert stages(calls) == STAGES[:4]
    checkpoint = tmp_path / "out" / "checkpoint"
    checkpoint.mkdir()
    code, _, calls = quickstart()
    assert code == 0
    assert stages(calls) == STAGES[3:]
    assert checkpoint.exists()


def test_another_command_repeats_its_stage_and_all_that_follow(quickstart, tmp_path):
    quickstart()
    stale = tmp_path / "out" / "checkpoint"
    stale.mkdir()
    _, _, calls = quickstart(STEPS="7")
    assert stages(calls) == STAGES[3:]
    assert not stale.exists()


def test_a_kill_after_a_change_leaves_nothing_stale_as_done(quickstart):
    quickstart()
    quickstart(STEPS="7", FAIL="convert_checkpoint.py")
    _, _, calls = quickstart(STEPS="7")
    assert stages(calls) == STAGES[4:]


def test_takes_a_corpus_and_notices_that_it_changed(quickstart, tmp_path):
    corpus = tmp_path / "my corpus.jsonl"
    corpus.write_text("one")
    assert stages(quickstart(CORPUS=str(corpus))[2]) == STAGES[1:]
    assert quickstart(CORPUS=str(corpus))[2] == []
    corpus.write_text("two")
    assert stages(quickstart(CORPUS=str(corpus))[2]) == STAGES[1:]


def test_a_missing_corpus_is_one_line(quickstart):
    code, output, calls = quickstart(CORPUS="no-such-file.jsonl")
    assert code == 1
    assert output == "quickstart: error: CORPUS=no-such-file.jsonl is not a readable file\n"
    assert calls == []


def test_the_real_parsers_take_its_flags(quickstart):
    pytest.importorskip("torch")
    from megatron_ddrp.arguments import parse_arguments
    from megatron_ddrp.cli import parse_subcommand
    from megatron_ddrp.lab.analysis.command import SUBCOMMANDS
    from megatron_ddrp.tasks.finetune.command import parse_arguments as parse_finetune

    _, _, calls = quickstart()
    words = {stage: call.split(stage, 1)[1].split() for stage, call in zip(stages(calls), calls, strict=True)}
    config = parse_arguments(words["pretrain_bert.py"]).config
    assert config.model.position_encoding == "ddrp"
    assert config.objective.objective == "mth"
    assert config.checkpoint.save == config.checkpoint.load
    places = parse_subcommand("", SUBCOMMANDS, words["analyze.py"])
    assert (places.command, places.load) == ("masked-places", (Path(config.checkpoint.save),))
    options = parse_finetune(words["tasks.finetune"])
    assert options.random_init
    (tasks,) = options.suite.read.args
    assert [task.task_name for task in tasks] == ["word-order"]


TOOL = Path(collect_documentation.__file__)


def test_paragraphs_lose_markup_code_and_headings():
    text = """Short title.

    Return the :class:`~x.Reader` that ``open`` made for this
    file, or *None* where there is no such file at all.

    Args:
        path: the name of the file that is to be opened and then read to its end

    >>> open("x").read()  # this example has many words in it but is code
    'text'

    ======  ===============================