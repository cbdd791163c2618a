"""Stopping a run before its last step, by signals or a time limit, and the file with the exit code.

After SIGTERM, SIGUSR1 (`scancel`, a batch system's warning, `kill`) or SIGINT (Ctrl-C) the current step finishes; on
GPUs the next one too, which is already launched. Then all ranks save and exit with `ASKED_TO_STOP`, whichever of them
got the signal. The signals are handled until the process ends: a late one, such as a launcher's SIGTERM after the first
rank has ended, must not kill a rank that still writes its last files or change its exit code.

A second SIGINT ends a process at once, unless a launcher started it: launchers forward the terminal's SIGINT, so one
Ctrl-C can reach a rank twice, and they kill ranks that do not end. A process that was started with SIGINT ignored, as
shells start background jobs of scripts, keeps ignoring it; SIGTERM stops it.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import FrameType

from megatron_ddrp.data.atomic import write_text

EXIT_CODE = "exit_code"
OUT_OF_TIME = 1000
"""Code of the time limit, larger than every signal's number."""
BY_CALLBACK = 1001
"""Code of a callback that raises `StopTraining`."""
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopRequests:
    """Requests to stop this rank early, by a signal or the clock."""

    def __init__(self, minutes: float | None, began: float | None = None, alone: bool = False) -> None:
        """Set the time limit to `minutes` after `began` (seconds of `time.monotonic`, default now); None = no limit.

        `alone` is True if no launcher started this process; a second SIGINT then ends it.
        """
        self.alone = alone
        self.deadline = (time.monotonic() if began is None else began) + 60 * minutes if minutes else None
        self.received = 0

    def heed(self) -> StopRequests:
        """Handle the signals from now on, until the process ends; return this object."""
        for number in SIGNALS:
            if not (number == signal.SIGINT and signal.getsignal(number) is signal.SIG_IGN):
                signal.signal(number, self._receive)
        return self

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.alone and number == signal.SIGINT:
            if self.received == number:
                raise KeyboardInterrupt
            # Not print: the signal may have come in the middle of one.
            os.write(2, b"SIGINT: stopping after this step; once more ends at once, without saving\n")
        self.received = number

    @property
    def code(self) -> int:
        """Code of the request: 0 without one, a signal's number, `BY_CALLBACK` or `OUT_OF_TIME`.

        All ranks follow the largest.
        """
        out_of_time = self.deadline is not None and time.monotonic() >= self.deadline
        return self.received or OUT_OF_TIME * out_of_time


def name_of(code: int) -> str:
    """Return the name of the signal, flag or callback that stopped this run."""
    named = {OUT_OF_TIME: "--exit-duration-in-mins", BY_CALLBACK: "a callback"}
    return named.get(code) or signal.Signals(code).name


def note_exit_code(folder: Path, code: int) -> None:
    """Write DIR/exit_code, for launchers that turn every exit code but 0 into 1."""
    write_text(folder / EXIT_CODE, f"{code}\n")


def forget_exit_code(folder: Path) -> None:
    """Remove DIR/exit_code when a run begins, so that a failed run leaves none."""
    (folder / EXIT_CODE).unlink(missing_ok=True)
