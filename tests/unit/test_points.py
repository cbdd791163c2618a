"""Named points: what the variable may say, and what a process does at a point that it arms."""

import os
import re
import signal
from pathlib import Path

import pytest

from megatron_ddrp.data import points
from megatron_ddrp.data.points import POINTS, VARIABLE, point
from megatron_ddrp.errors import UserError
from tests.endurance.lines import ROOT
from tests.integration.launch import Hold


def ended(monkeypatch, armed, *passages):
    """Return how a fork ends that passes points while some are armed."""
    monkeypatch.setenv(VARIABLE, armed)
    child = os.fork()
    if not child:
        for name, number in passages:
            point(name, number)
        os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_point_acts_at_its_own_name_and_number(monkeypatch):
    kill = "job.leased=SIGUSR1,step.logged=SIGKILL@12"
    assert ended(monkeypatch, kill, ("step.logged", 1), ("job.appended", 12)) == 7
    assert ended(monkeypatch, kill, ("step.logged", 12)) == -signal.SIGKILL
    assert ended(monkeypatch, kill, ("job.leased", 5)) == -signal.SIGUSR1
    assert ended(monkeypatch, "", ("step.logged", 12)) == 7


def test_a_process_is_held_until_the_pipe_is_released(monkeypatch, tmp_path):
    hold = Hold(tmp_path / "pipe")
    monkeypatch.setenv(VARIABLE, f"step.logged={hold.action}")
    child = os.fork()
    if not child:
        point("step.logged", 1)
        os._exit(7)
    assert hold.next_process() == child and os.waitpid(child, os.WNOHANG) == (0, 0)
    hold.release()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


@pytest.mark.parametrize(
    "word", ["step=SIGKILL", "step.logged", "step.logged=kill", "step.logged=hold:", "step.logged=SIGKILL@"]
)
def test_a_word_without_a_point_or_an_action_is_refused(monkeypatch, word):
    monkeypatch.setenv(VARIABLE, f"job.leased=SIGTERM@3,{word}")
    with pytest.raises(UserError, match=f"{VARIABLE}: '{word}', expected POINT=SIGNAL or POINT=hold:PIPE") as refusal:
        point("checkpoint.latest", 1)
    assert refusal.value.exit_code == 2 and all(name in str(refusal.value) for name in POINTS)


def test_every_point_is_in_the_code_once_and_some_test_arms_it():
    code = [path.read_text() for path in (ROOT / "megatron_ddrp").rglob("*.py") if path != ROOT / points.__file__]
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__))
    assert sorted(re.findall(r'\bpoint\("(.*?)", ', "".join(code))) == sorted(POINTS)
    assert [name for name in POINTS if f'"{name}' not in tests] == []
