"""Errors: a user's mistake is one line, a bug keeps its traceback. Only this module distinguishes the two.

Library code raises `UserError`; command-line entry points end in `run_command(main)`, which turns it into
`program: error: <line>` on stderr and an exit code.
"""

from __future__ import annotations

import codecs
import contextlib
import difflib
import errno
import importlib.util
import io
import locale
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

FAILURE, WRONG_ARGUMENTS, INTERRUPTED = 1, 2, 130
ASKED_TO_STOP = 75
"""Exit code of a run that was stopped before its last step and can resume (EX_TEMPFAIL of sysexits.h: "try again")."""

# Refusals of the operating system (disk full, no permission) are for the user to fix; they are not bugs of ours.
_REFUSALS = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.ESTALE),
    *(errno.ENOENT, errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP),
    *(errno.EMFILE, errno.ENFILE, errno.EBADF),
}


class UserError(Exception):
    """A user's mistake in one line: the value given, the values allowed, the remedy.

    `exit_code` is 1 for a failure and 2 for wrong arguments. `agreed` is True if every rank of a run raises this same
    error, so that one rank prints it for all; this always holds for wrong arguments.
    """

    def __init__(self, message: str, exit_code: int = FAILURE):
        super().__init__(" ".join(str(message).split()))
        self.exit_code = exit_code
        self.agreed = exit_code == WRONG_ARGUMENTS


def shared_error(message: str, exit_code: int = FAILURE) -> UserError:
    """Return an error that every rank raises."""
    error = UserError(message, exit_code)
    error.agreed = True
    return error


@contextlib.contextmanager
def code_of_others() -> Iterator[None]:
    """Mark what the block raises as the error of somebody else's code, which nothing here puts into other words.

    The block calls a callback, the source of some texts, or a plug-in's function. As a decorator it marks a function.
    """
    try:
        yield
    except BaseException as error:
        error.__dict__.update(is_of_others=True, agreed=False)  # no other rank need raise it
        raise


def is_of_others(error: BaseException) -> bool:
    """Return whether `code_of_others` has marked an error."""
    return "is_of_others" in error.__dict__


@contextlib.contextmanager
def refusals_as_user_errors(path: object = None, advice: str = "") -> Iterator[None]:
    """Raise every `OSError` of the block (a full disk, a missing right) as a `UserError` about `path` with `advice`."""
    try:
        yield
    except OSError as error:
        if is_of_others(error):
            raise
        raise UserError("; ".join(filter(None, (_refusal(error, path), advice)))) from error


def _refusal(error: OSError, path: object = None) -> str:
    where = path if error.filename is None else error.filename
    reason = error.strerror or error
    return str(reason) if where is None else f"{where}: {reason}"


_NO_MEMORY = re.compile(
    "can(?:'t|not) allocate|not enough memory|out of memory|ALLOC_FAILED|size calculation overflowed", re.I
)
"""Words of the RuntimeError that torch raises without enough memory, on CPUs and on GPUs."""

NEED_LESS = "use a smaller batch or model, or a machine with more memory"


@contextlib.contextmanager
def allocations_as_user_errors(advice: str | Callable[[], str] = NEED_LESS) -> Iterator[None]:
    """Raise a lack of memory, of the host or of a GPU, as a `UserError` that ends in `advice`: what to lower."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not lacks_memory(error):
            raise
        remedy = advice if isinstance(advice, str) else advice()
        raise UserError(f"out of memory: {_short_reason(error)}; {remedy}") from error


def lacks_memory(error: BaseException) -> bool:
    """Return whether an error of ours says that the host or a GPU has no memory left."""
    says_so = isinstance(error, RuntimeError) and bool(_NO_MEMORY.search(str(error)))
    return (says_so or isinstance(error, MemoryError)) and not is_of_others(error)


def _short_reason(error: BaseException) -> str:
    """Return the requested and the available memory, without torch's internals and general advice."""
    line = (str(error).splitlines() or ["the system has no more"])[0]
    line = re.sub(
        r"^\[.*?\] err == 0\. |^CUDA out of memory\. |\.? Of the allocated memory .*|\. Error code .*", "", line
    )
    return re.sub(r"\b\d{7,}(?= bytes)", lambda number: f"{int(number[0]):,}", line)


def need_packages(purpose: str, *packages: str, exit_code: int = FAILURE) -> None:
    """Raise `UserError` if a package is not installed, with the command that installs those that `purpose` lacks."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise UserError(
            f"{purpose} needs {' and '.join(missing)}, not installed here: pip install {' '.join(missing)}", exit_code
        )


def shown_names(names: Sequence[str]) -> str:
    """Return names for a message, those with blanks around them or signs that do not show in quotation marks."""
    shown = (name if name.isprintable() and name == name.strip() else repr(name) for name in names)
    return ", ".join(shown) or "none"


def nearest(word: str, known: Sequence[str]) -> str:
    """Return the known word that is nearest to `word`; "" if none is near."""
    return next(iter(difflib.get_close_matches(word, known, n=1)), "")


def run_command(main: Callable[[], object], program: str | None = None) -> NoReturn:
    """Run a command's `main` and exit: with its integer result (None counts as 0), or with one line for a mistake.

    `program` is the name at the begin of the line, by default that of the running script.
    """
    repair_streams()
    code = _code_of(main, program)
    sys.exit(_flush_stdout(program, silently=bool(code)) or code)


def _code_of(main: Callable[[], object], program: str | None) -> int | str:
    """Return the exit code of a command after printing its error, if any; or the words that it exits with."""
    try:
        with allocations_as_user_errors():
            result = main()
    except SystemExit as end:
        return 0 if end.code is None else end.code
    except UserError as error:
        print_error(str(error), program)
        return error.exit_code
    except KeyboardInterrupt:
        print_error("interrupted", program)
        return INTERRUPTED
    except (OSError, RuntimeError) as error:
        if is_of_others(error):
            raise
        if isinstance(error, BrokenPipeError):  # the reader of our output is gone (`… | head`)
            return FAILURE
        if isinstance(error, OSError) and error.errno in _REFUSALS:
            print_error(_refusal(error), program)
            return FAILURE
        if not str(error).startswith("Symlink loop"):  # of pathlib, up to Python 3.12
            raise
        print_error(f"{error}; remove the link, or give another path", program)
        return FAILURE
    return result if isinstance(result, int) else 0


def repair_streams() -> None:
    """Make standard streams that a command can use: the null device for closed ones, escapes for foreign characters.

    A closed stream also leaves its number to the next file that is opened, into which libraries would then print. In an
    ASCII locale, libraries such as torch could not read their own files.
    """
    if codecs.lookup(locale.getpreferredencoding(False)).name == "ascii":
        with contextlib.suppress(locale.Error):
            locale.setlocale(locale.LC_CTYPE, "C.UTF-8")
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            null = os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is the stream's own
            os.set_inheritable(null, null == number)
            kept = os.fdopen(null, "r" if number == 0 else "w", encoding="utf-8", errors="backslashreplace")
            setattr(sys, name, kept)
        elif number and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _flush_stdout(program: str | None, silently: bool) -> int:
    """Flush stdout and return 0; if it takes no more, send the rest to the null device, say so, and return FAILURE."""
    try:
        sys.stdout.flush()
        return 0
    except OSError as error:
        if not silently and not isinstance(error, BrokenPipeError):
            print_error(f"standard output: {error.strerror}", program)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # silences Python's own last flush
    return FAILURE


def print_error(line: str, program: str | None) -> None:
    """Write `program: error: line` to stderr, after flushing stdout; None stands for the running script."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    name = program or os.path.basename(sys.argv[0]) or "python"
    with contextlib.suppress(OSError):
        print(f"{name}: error: {line}", file=sys.stderr, flush=True)
