"""Signals that stop a command: SIGTERM acts like Ctrl-C, and neither interrupts a write."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator

TERMINATED = 143


def exit_on_sigterm() -> None:
    """Turn SIGTERM into `SystemExit`, so that `with` blocks end and keep or remove their work."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))


@contextlib.contextmanager
def delay_signals() -> Iterator[None]:
    """Delay SIGINT and SIGTERM until the end of the block, so that its writes are complete."""
    if threading.current_thread() is not threading.main_thread():  # only this thread has signal handlers
        yield
        return
    waiting: list[int] = []
    handlers = {
        number: signal.signal(number, lambda received, _: waiting.append(received))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for received in waiting:
            signal.raise_signal(received)
