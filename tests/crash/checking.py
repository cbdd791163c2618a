"""Check of the protocols: every state that a crash may leave, and every operation that may fail."""

import os
import pickle
import random
import re
import shutil
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tests.crash import recording
from tests.crash.outputs import OUTPUTS
from tests.crash.protocol import Protocol, as_command, quietly
from tests.crash.recording import Recording, tree_of
from tests.crash.runs import RUNS
from tests.crash.sample import Sample
from tests.crash.states import MODELS, State, states_of

PROTOCOLS = {protocol.name: protocol for protocol in (*RUNS, *OUTPUTS)}
TOKEN = re.compile(r"\.[0-9a-f]{16}\.")
QUICK_MODELS = ("kill", "journal")
QUICK_STATES = 40
"""States of a power cut that a quick check tries; of more, so many are drawn by chance."""


class Report(NamedTuple):
    """Result of a protocol."""

    name: str
    operations: int
    tried: dict[str, int]
    """Model → number of its states."""
    bad: dict[str, int]
    """Model → its states with a fault."""
    faults: list[str]


class Bench:
    """Runs protocols in forks of one process, in which everything is imported and the sample is written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sample = quietly(lambda: Sample(folder / "sample")).value

    def check(self, name: str, is_quick: bool) -> Report:
        """Record a protocol's update, and try the states that crashes leave."""
        return in_a_fork(lambda: self._check(self._prepared(name), is_quick))

    def fail(self, name: str, fault: str, sticky: bool) -> tuple[int, list[str]]:
        """Let each operation of an update fail, one per try; return the number of tries and the faults found."""
        return in_a_fork(lambda: self._fail(self._prepared(name), fault, sticky))

    def _prepared(self, name: str) -> Protocol:
        protocol = PROTOCOLS[name](self.folder / f"root{list(PROTOCOLS).index(name)}", self.sample)
        prepare(protocol)
        return protocol

    def _check(self, protocol: Protocol, is_quick: bool) -> Report:
        log, before = self.folder / f"{protocol.root.name}.log", tree_of(protocol.root)
        recording.start(protocol.root, log)
        update(protocol)
        recording.stop()
        protocol.after = protocol.files()
        recorded = Recording(protocol.root, before, log, tree_of(protocol.root))
        tried, bad, faults = Counter[str](), Counter[str](), dict[str, list[str]]()
        verdicts: dict[tuple[Any, tuple[str, ...]], list[str]] = {}
        for model in QUICK_MODELS if is_quick else MODELS:
            states = states_of(recorded, model)
            if is_quick and len(states) > QUICK_STATES and model != "kill":
                states = random.Random(0).sample(states, QUICK_STATES)
            every = protocol.again_every * (1 if model == "kill" else 10)
            for number, state in enumerate(states):
                key = (state.key, state.reported)
                if key not in verdicts:
                    verdicts[key] = self._try(protocol, state, number % every == 0)
                tried[model] += 1
                bad[model] += bool(verdicts[key])
                for fault in verdicts[key]:
                    line = f"{model}: {TOKEN.sub('.TOKEN.', fault).replace(str(protocol.root), 'ROOT')}"
                    faults.setdefault(line, []).append(_place(state, recorded))
        lines = [f"{fault} ×{len(places)}, first {min(places, key=len)}" for fault, places in faults.items()]
        return Report(protocol.name, len(recorded.operations), dict(tried), dict(bad), lines)

    def _try(self, protocol: Protocol, state: State, deep: bool) -> list[str]:
        shutil.rmtree(protocol.root, ignore_errors=True)
        state.write(protocol.root)
        return faults_of(protocol, state.reported, deep)

    def _fail(self, protocol: Protocol, fault: str, sticky: bool) -> tuple[int, list[str]]:
        template = self.folder / f"{protocol.root.name}.template"
        shutil.copytree(protocol.root, template, symlinks=True)
        quietly(protocol.update)
        protocol.after = protocol.files()
        number, found = 0, Counter[str]()
        while True:
            number += 1
            shutil.rmtree(protocol.root)
            shutil.copytree(template, protocol.root, symlinks=True)
            place, lines = in_a_fork(partial(_failed, protocol, number, fault, sticky))
            if not place:
                shutil.rmtree(template)
                return number - 1, [f"{line} ×{count}" for line, count in found.items()]
            found.update(lines)


def prepare(protocol: Protocol) -> None:
    """Make a protocol's root anew, as it is before the update."""
    shutil.rmtree(protocol.root, ignore_errors=True)
    protocol.root.mkdir()
    quietly(protocol.prepare)
    protocol.before = protocol.files()


def update(protocol: Protocol) -> None:
    """Do an update, which must end well."""
    if refusal := quietly(protocol.update).refusal:
        raise RuntimeError(f"{protocol.name} fails on a healthy disk: {refusal}")


def in_a_fork(action: Callable[[], Any]) -> Any:
    """Return the result of an action that ran in a child process, without its output."""
    read, write = os.pipe()
    child = os.fork()
    if child:
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            answer = pipe.read()
        os.waitpid(child, 0)
        if not answer:
            raise RuntimeError("the child ended without an answer")
        result, error = pickle.loads(answer)
        if error:
            raise RuntimeError(error)
        return result
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number)
    try:
        answer = pickle.dumps((action(), ""))
    except BaseException:
        answer = pickle.dumps((None, traceback.format_exc()))
    with os.fdopen(write, "wb") as pipe:
        pipe.write(answer)
    os._exit(0)


def _failed(protocol: Protocol, number: int, fault: str, sticky: bool) -> tuple[str, list[str]]:
    """Run an update whose operation `number` fails; return that operation, "" without one, and the faults found."""
    protocol.reported.clear()
    recording.start(protocol.root)
    recording.arm(number, fault, sticky)
    code, errors = as_command(protocol.update)
    place = recording.hit()
    recording.stop()
    lines, own = [line for line in errors.splitlines() if ": error: " in line], str(protocol.root)
    found = []
    if code == "traceback":
        found.append(f"traceback: {errors.strip().splitlines()[-1]}")
    elif code and (len(lines) != 1 or own not in lines[0]):
        found.append(f"no one line that names a file: {errors.strip()}")
    if place:
        found += faults_of(protocol, protocol.reported, deep=bool(code))
    where = TOKEN.sub(".TOKEN.", place)
    return place, [f"{line}  [{where}]".replace(own, "ROOT") for line in found]


def faults_of(protocol: Protocol, reported: Sequence[str], deep: bool) -> list[str]:
    """Return the broken promises about a protocol's root; an error that is no refusal is one."""
    try:
        found = quietly(lambda: list(protocol.faults(tuple(reported), deep)))
        return [f"refused: {found.refusal}"] if found.refusal else found.value
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return [f"traceback {type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})"]


def _place(state: State, recorded: Recording) -> str:
    operations = recorded.operations[: state.at]
    last = operations[-1].text if operations else "the begin"
    words = f"after {last}; reported {list(state.reported)}; lost {list(state.lost[:5])}"
    return TOKEN.sub(".TOKEN.", words)
