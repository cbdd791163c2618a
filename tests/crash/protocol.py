"""Protocol of an update: a prepared folder, the update, and what must hold after a crash in the midst of it."""

import contextlib
import io
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from megatron_ddrp.errors import UserError, run_command
from tests.crash import recording
from tests.crash.sample import Sample


class Ended(NamedTuple):
    """Result of an action: a value, or the line of a refusal."""

    value: Any
    refusal: str
    told: str
    """Everything printed."""


def quietly(action: Callable[[], Any]) -> Ended:
    """Run an action without its output; return a `UserError` as a line. Any other error is a fault and raised."""
    output = io.StringIO()
    with contextlib.redirect_stderr(output), contextlib.redirect_stdout(output):
        try:
            return Ended(action(), "", output.getvalue())
        except UserError as error:
            return Ended(None, str(error), output.getvalue())


def as_command(action: Callable[[], Any]) -> tuple[Any, str]:
    """Run an action as a command's `main`; return its exit code, "traceback" for any other error, and its stderr."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        try:
            run_command(action, "command")
        except SystemExit as end:
            return end.code or 0, errors.getvalue()
        except Exception:
            return "traceback", f"{errors.getvalue()}{traceback.format_exc()}"


class Protocol:
    """One kind of update. A subclass says how a folder is prepared, updated and looked at."""

    name = ""
    place = ""
    """Path of the output below the root."""
    is_quick = True
    """False for protocols that only the whole check tries."""
    again_every = 1
    """The same command runs again after one of so many kills, and after one of ten times as many power cuts."""

    def __init__(self, root: Path, sample: Sample) -> None:
        """Use the folder `root`, which is made and removed by the caller."""
        self.root, self.sample, self.output = root, sample, root / self.place
        self.reported: list[str] = []
        self.before: dict[str, bytes] = {}
        self.after: dict[str, bytes] = {}

    def prepare(self) -> None:
        """Write into the root what is there before the update."""

    def update(self) -> None:
        """Do the update, and report each part that is done: here the command and its end."""
        self.command()
        self.report("the end")

    def command(self) -> None:
        """Run the command whose end is the only report; a subclass has one, or an `update` of its own."""
        raise NotImplementedError

    def files(self) -> dict[str, bytes]:
        """Return the files that the update is about, for `before` and `after`."""
        return {}

    def faults(self, reported: tuple[str, ...], deep: bool) -> Iterable[str]:
        """Yield broken promises about the root after a crash; with `deep` also of the command that is run again.

        Each subclass has its own.
        """
        raise NotImplementedError

    def report(self, what: str) -> None:
        """Report a part of the update as done: from now on it must survive."""
        self.reported.append(what)
        recording.mark(what)
