"""Which signals ask a run to stop, and what a second Ctrl-C does."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from megatron_ddrp.run.launch import OUT_OF_TIME, SIGNALS, StopRequests


@pytest.fixture(autouse=True)
def interrupts_heeded() -> Iterator[None]:
    """As in a foreground process, whatever started the tests."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_is_a_request_and_its_handler_returns(number: signal.Signals) -> None:
    requests = StopRequests(None).heed()
    assert requests.code == 0
    os.kill(os.getpid(), number)
    assert requests.code == number


def test_the_time_limit_is_in_minutes_after_the_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = StopRequests(2.0, began=100.0)
    codes = []
    for now in (219.0, 220.0):
        monkeypatch.setattr("time.monotonic", lambda now=now: now)
        codes.append(requests.code)
    assert codes == [0, OUT_OF_TIME]


def test_a_second_interrupt_ends_a_lone_process(capfd: pytest.CaptureFixture[str]) -> None:
    requests = StopRequests(None, alone=True).heed()
    interrupt()
    assert requests.code == signal.SIGINT
    assert "SIGINT: stopping after this step; once more ends at once" in capfd.readouterr().err
    with pytest.raises(KeyboardInterrupt):
        interrupt()


def test_an_interrupt_after_another_signal_is_the_first(capfd: pytest.CaptureFixture[str]) -> None:
    requests = StopRequests(None, alone=True).heed()
    os.kill(os.getpid(), signal.SIGTERM)
    interrupt()
    assert requests.code == signal.SIGINT and "once more" in capfd.readouterr().err


def test_a_launcher_may_send_several(capfd: pytest.CaptureFixture[str]) -> None:
    requests = StopRequests(None).heed()
    interrupt()
    interrupt()
    assert requests.code == signal.SIGINT
    assert capfd.readouterr().err == ""


def test_ignored_interrupts_stay_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests = StopRequests(None, alone=True).heed()
    interrupt()
    assert requests.code == 0
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
