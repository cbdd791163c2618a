"""A run without `--save` says so at its start, and warns once, as soon as its steps say that an hour is ahead."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_ddrp.config import Config
from megatron_ddrp.run.log import UnsavedWork
from megatron_ddrp.train import where_we_start


def said(monkeypatch: pytest.MonkeyPatch, seconds: list[float], train_iters: int, **checkpoint: Any) -> list[str]:
    """What a run says whose steps take so many seconds, each line after the number of its step."""
    now, lines = 0.0, []
    config = Config().replace(training={"train_iters": train_iters}, checkpoint=checkpoint)
    unsaved = UnsavedWork(config)
    for step, duration in enumerate(seconds, start=1):
        now += duration
        monkeypatch.setattr("time.perf_counter", lambda now=now: now)
        heard: list[str] = []
        unsaved.warn_once(step, heard.append)
        lines += [f"{step}: {line}" for line in heard]
    return lines


def test_it_warns_once_at_the_second_step(monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = said(monkeypatch, [1, 1, 1, 1], 5000)
    assert line == "2: warning: no --save: nothing is kept of the 1h23m ahead; start again with --save DIR"


def test_a_slow_first_step_is_no_reason_and_slower_steps_later_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert said(monkeypatch, [500, 1, 1, 1], 3000) == []
    (line,) = said(monkeypatch, [1, 1, 1, 100], 3000)
    assert line.startswith("4: ")


@pytest.mark.parametrize(
    "checkpoint", [{"save": "run"}, {"exit_interval": 100}, {"exit_duration_in_mins": 60}], ids=lambda c: next(iter(c))
)
def test_nothing_to_warn_of(checkpoint: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert said(monkeypatch, [1, 1, 1, 1], 5000, **checkpoint) == []


def test_a_limit_above_an_hour_leaves_more_than_an_hour_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = said(monkeypatch, [1, 1, 1, 1], 5000, exit_duration_in_mins=61)
    assert line.startswith("2: warning: no --save")


def test_the_start_says_that_nothing_is_saved() -> None:
    config = Config()
    assert where_we_start(config, None) == "starting afresh; nothing is saved without --save"
    assert where_we_start(config.replace(checkpoint={"save": "run"}), None) == "starting afresh"
