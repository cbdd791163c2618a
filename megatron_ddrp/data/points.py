"""Named points in the code that writes files, where a test sends a process a signal or holds it.

    MEGATRON_DDRP_POINTS=checkpoint.renamed=SIGKILL@4,job.leased=hold:PIPE

kills the process that has just renamed the checkpoint of step 4, and holds every process that has taken the lease of a
job while a test locks the named pipe PIPE. Ranks and workers inherit the variable. Without it, a point does nothing.
"""

from __future__ import annotations

import functools
import os
import re
import signal

from megatron_ddrp.data.atomic import take_lock
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError

VARIABLE = "MEGATRON_DDRP_POINTS"
POINTS = (
    "step.logged",
    "checkpoint.tensors",
    "checkpoint.moved_away",
    "checkpoint.renamed",
    "checkpoint.latest",
    "job.leased",
    "job.appended",
)
_WORD = re.compile(f"({'|'.join(POINTS)})=(?:({'|'.join(signal.Signals.__members__)})|hold:([^@]+))(?:@([0-9]+))?")


def point(name: str, number: int) -> None:
    """Pass a point; `number` is the step, or the number of finished jobs, that the process has reached."""
    for armed, signal_name, pipe, at in _read(os.environ.get(VARIABLE, "")):
        if armed != name or at not in (None, str(number)):
            continue
        if pipe:
            _hold(pipe)
        else:
            os.kill(os.getpid(), signal.Signals[str(signal_name)])


@functools.cache
def _read(text: str) -> list[tuple[str | None, ...]]:
    """Return (point, signal, pipe, number) for each word of the variable. Raises `UserError` for any other word."""
    found = []
    for word in filter(None, text.split(",")):
        match = _WORD.fullmatch(word)
        if not match:
            raise UserError(
                f"{VARIABLE}: {word!r}, expected POINT=SIGNAL or POINT=hold:PIPE, perhaps with @NUMBER: SIGNAL is a "
                f"name such as SIGKILL, POINT one of {', '.join(POINTS)}",
                WRONG_ARGUMENTS,
            )
        found.append(match.groups())
    return found


def _hold(pipe: str) -> None:
    """Write this process's number into a named pipe and wait until no test has a lock on it."""
    with open(pipe, "r+b", buffering=0) as stream:
        stream.write(b"%d\n" % os.getpid())
        take_lock(stream.fileno(), wait=True)
