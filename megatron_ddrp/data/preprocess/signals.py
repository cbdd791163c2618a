"""Signals that stop a command: SIGTERM acts like Ctrl-C."""

from __future__ import annotations

import signal
import sys

TERMINATED = 143


def exit_on_sigterm() -> None:
    """Turn SIGTERM into `SystemExit`, so that `with` blocks end and keep or remove their work."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
