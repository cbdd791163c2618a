"""Ctrl-C under plain `python`: the first saves and exits 75, the second ends at once."""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_ddrp.checkpoint import newest
from megatron_ddrp.parallel import process_group
from megatron_ddrp.run import loop
from tests.integration.launch import Result, armed, start_ranks, training_rows

Flags = Callable[..., list[str]]


def interrupted(arguments: list[str], times: int) -> Result:
    """A run without a launcher that gets SIGINT so many times in its third step."""
    return start_ranks(arguments, None, before=armed(",".join(["step.logged=SIGINT@3"] * times)))


def test_one_interrupt_saves_and_the_same_command_resumes(flags: Flags, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    start_ranks(flags(save=whole)).check()
    command = flags(save=parts, load=parts)
    ended = interrupted(command, 1)
    assert ended.exit_codes == [75], ended.stderr
    assert ended.stderr == ["SIGINT: stopping after this step; once more ends at once, without saving\n"]
    assert "stopped at step 3 by SIGINT\n" in ended.stdout[0]
    path = newest(parts)
    assert path and path.name == "iter_0000003"
    start_ranks(command).check()
    assert training_rows(parts) == training_rows(whole)


def signal_late(number: signal.Signals) -> None:
    """Send a signal while the last files are written, and while the other ranks are awaited after that."""
    for module, name in ((loop, "note_exit_code"), (process_group, "stop")):
        setattr(module, name, functools.partial(after_a_signal, number, getattr(module, name)))


def after_a_signal(number: signal.Signals, call: Callable[..., Any], *arguments: object) -> Any:
    signal.raise_signal(number)
    return call(*arguments)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_after_the_last_step_changes_nothing(number: signal.Signals, flags: Flags, tmp_path: Path) -> None:
    ended = start_ranks(flags(save=tmp_path), 1, before=functools.partial(signal_late, number)).check()
    assert ended.exit_codes == [0]
    assert (tmp_path / "exit_code").read_text() == "0\n" and not (tmp_path / "lock").exists()


def signal_early(number: signal.Signals) -> None:
    """Send a signal to the last rank before it meets the others."""
    if os.environ["RANK"] == "1":
        process_group.start = functools.partial(after_a_signal, number, process_group.start)  # type: ignore[assignment]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_before_the_first_step_ends_all_ranks_there(
    number: signal.Signals, flags: Flags, tmp_path: Path
) -> None:
    command = flags(save=tmp_path, load=tmp_path)
    ended = start_ranks(command, 2, before=functools.partial(signal_early, number))
    assert ended.exit_codes == [75, 75], ended.stderr
    assert f"stopped at step 0 by {number.name}\n" in ended.stdout[0]
    assert (tmp_path / "exit_code").read_text() == "75\n" and newest(tmp_path) is None
    start_ranks(command, 2).check()
    assert (tmp_path / "exit_code").read_text() == "0\n"


def lose_the_readers(number: signal.Signals) -> None:
    """Let the system refuse all output, as after the end of a terminal or a login node, and signal at step three."""
    reader, writer = os.pipe()
    os.close(reader)
    for stream in (1, 2):
        os.dup2(writer, stream)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    armed(f"step.logged={number.name}@3")()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_ranks_whose_output_nobody_reads_save(number: signal.Signals, flags: Flags, tmp_path: Path) -> None:
    command = flags(save=tmp_path, load=tmp_path, objective="mlm")  # which a line says has settings without effect
    ended = start_ranks(command, 2, functools.partial(lose_the_readers, number))
    assert ended.exit_codes == [75, 75]
    assert (tmp_path / "exit_code").read_text() == "75\n"
    assert newest(tmp_path) == tmp_path / "iter_0000003"
    assert f"resumed from {tmp_path} at step 3" in start_ranks(command, 2).check().stdout[0]
    assert [row["iteration"] for row in training_rows(tmp_path)] == [1, 2, 3, 4, 5]


def test_two_interrupts_end_at_once(flags: Flags, tmp_path: Path) -> None:
    ended = interrupted(flags(save=tmp_path, save_interval=2), 2)
    assert ended.exit_codes == [130]
    assert ended.stderr[0].splitlines()[1:] == ["pretrain_bert.py: error: interrupted"]
    assert (newest(tmp_path) or tmp_path).name == "iter_0000002"


def test_without_a_folder_it_says_that_nothing_is_saved(flags: Flags) -> None:
    ended = interrupted(flags(), 1)
    assert ended.exit_codes == [75]
    assert "stopped at step 3 by SIGINT; nothing is saved without --save" in ended.stdout[0]
