"""Ctrl-C under plain `python`: the first saves and exits 75, the second ends at once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from megatron_ddrp.checkpoint import newest
from tests.integration.launch import ROOT, run_command, start_ranks, training_rows

Flags = Callable[..., list[str]]
PROGRAM = """
import functools, runpy, signal, sys
from tests.integration.test_faults import at_step, send

def interrupt():
    for _ in range({times}):
        send(signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # tests may run in the background
at_step(3, 0, interrupt)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def interrupted(arguments: list[str], times: int) -> subprocess.CompletedProcess[str]:
    """A run that gets SIGINT so many times in its third step."""
    program = PROGRAM.format(times=times)
    words = [sys.executable, "-c", program, ROOT / "pretrain_bert.py", *arguments]
    return run_command(words, PYTHONPATH=str(ROOT))


def test_one_interrupt_saves_and_the_same_command_resumes(flags: Flags, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    start_ranks(flags(save=whole)).check()
    command = flags(save=parts, load=parts)
    ended = interrupted(command, 1)
    assert ended.returncode == 75, ended.stderr
    assert ended.stderr == "SIGINT: stopping after this step; once more ends at once, without saving\n"
    assert "stopped at step 3 by SIGINT\n" in ended.stdout
    path = newest(parts)
    assert path and path.name == "iter_0000003"
    start_ranks(command).check()
    assert training_rows(parts) == training_rows(whole)


def test_two_interrupts_end_at_once(flags: Flags, tmp_path: Path) -> None:
    ended = interrupted(flags(save=tmp_path, save_interval=2), 2)
    assert ended.returncode == 130
    assert ended.stderr.splitlines()[1:] == ["pretrain_bert.py: error: interrupted"]
    assert (newest(tmp_path) or tmp_path).name == "iter_0000002"


def test_without_a_folder_it_says_that_nothing_is_saved(flags: Flags) -> None:
    ended = interrupted(flags(), 1)
    assert ended.returncode == 75
    assert "stopped at step 3 by SIGINT; nothing is saved without --save" in ended.stdout
