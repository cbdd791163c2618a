"""Judge a command on a damaged file by its exit code, messages and result, compared with those on the healthy file."""

import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.endurance.damage.kinds import Case
from tests.endurance.damage.readers import READERS, Ended, result_of

REFUSED, TOLD, HARMLESS = "refused", "reported", "harmless"
UNDETECTABLE = "undetectable"
SILENT, TRACEBACK, HANG, NOISE = "silent", "traceback", "hang", "not one line"
VERDICTS = {
    REFUSED: "the command ends with exit code 1 or 2 and one line",
    TOLD: "one line names the damage; the result is right: rebuilt, from the intact rest, or from an older checkpoint",
    HARMLESS: "the result equals that of the healthy file, bit for bit",
    UNDETECTABLE: "another result: the file is still valid, and its format has no sum",
    SILENT: "another result without any message",
    TRACEBACK: "a traceback or a crash",
    HANG: "the command does not end",
    NOISE: "a message of more than one line",
}
FAULTS = (SILENT, TRACEBACK, HANG, NOISE)


class Healthy(NamedTuple):
    """What a reader gives for the undamaged sample."""

    lines: frozenset[str]
    """Of both streams, without numbers."""
    result: dict[str, Any]
    before: dict[str, Any] | None = None
    """The result of the checkpoint before the newest, where the reader takes a run."""


class Outcome(NamedTuple):
    """A case, what it came to, and the words to look into it by."""

    name: str
    label: str
    harm: str
    reader: str
    verdict: str
    done: str
    """What the damage was."""
    words: str
    """The last lines that the command wrote, or what differs."""

    @property
    def is_fault(self) -> bool:
        return self.verdict in FAULTS


def judge(case: Case, path: Path, done: str, ended: Ended, folder: Path, healthy: Healthy) -> Outcome:
    """Say what became of the case that ran in `folder` with the damaged file `path`."""
    verdict, words = _verdict(case, path, ended, folder, healthy)
    return Outcome(case.name, case.kind.label, case.harm, case.reader, verdict, f"{path.name}: {done}", words)


def _verdict(case: Case, path: Path, ended: Ended, folder: Path, healthy: Healthy) -> tuple[str, str]:
    said = _new_lines(ended.stdout, healthy.lines), _new_lines(ended.stderr, healthy.lines)
    lines = [line for stream in said for line in stream]
    names = (path.name, *case.kind.names)
    naming = [line for line in lines if any(name in line for name in names)]
    if ended.exit_code is None:
        return HANG, _last(lines)
    if ended.exit_code not in (0, 1, 2) or "Traceback (most recent call last)" in ended.stdout + ended.stderr:
        return TRACEBACK, f"exit code {ended.exit_code}: {_last(lines)}"
    if ended.exit_code:
        return _refusal(case, said, naming)
    result = result_of(READERS[case.reader], folder, ended.stdout)
    wanted = healthy.result
    differing = sorted(name for name in result.keys() | wanted.keys() if result.get(name) != wanted.get(name))
    right = not differing or healthy.before is not None and naming and result == healthy.before
    if READERS[case.reader].checks and not naming and not case.kind.loses:
        return SILENT, "the damage was not found"
    if right:
        return (TOLD, _last(naming)) if naming else (HARMLESS, "")
    if naming and (case.kind.loses or not READERS[case.reader].results):
        return TOLD, _last(naming)
    if not case.kind.has_sum:
        return UNDETECTABLE, f"differs: {', '.join(differing)}"
    return SILENT, f"differs: {', '.join(differing)}; said: {_last(naming)}"


def _refusal(case: Case, said: Sequence[Sequence[str]], naming: Collection[str]) -> tuple[str, str]:
    stdout, stderr = said
    if READERS[case.reader].checks and naming and not stderr:
        return REFUSED, _last(stdout)
    errors = [line for line in stderr if re.match(r"(python -m )?\S+( \S+)?: error: ", line)]
    others = [line for line in stderr if line not in errors and line not in naming]
    if len(errors) == 1 and not others:
        return REFUSED, errors[0]
    if naming and not errors and not others and case.kind.loses:
        return TOLD, _last(stderr)  # with what is left, and an exit code that says that something is missing
    return NOISE, " // ".join(stderr) or "no line on standard error"


def plain_lines(text: str) -> frozenset[str]:
    """Return the lines of an output, without what differs between equal runs."""
    return frozenset(map(_without_times, _lines(text)))


def _new_lines(text: str, known: Collection[str]) -> list[str]:
    return [line for line in _lines(text) if _without_times(line) not in known]


def _lines(text: str) -> Iterable[str]:
    """Return the lines that hold words: no progress bars."""
    return [line for line in re.split(r"[\r\n]", text) if line.strip() and not re.search(r"\d%\|.*\|", line)]


def _without_times(line: str) -> str:
    """Return `line` without the numbers that come from the clock."""
    return re.sub(r"[\d.:hm]+\s*([kM]?\s?(tok|MB|s|h|min)\b\S*)|eta \S+", "·", line)


def _last(lines: Sequence[str]) -> str:
    return lines[-1][-400:] if lines else ""
