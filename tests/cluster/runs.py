"""Runs of the cluster tier: ranks on hosts without a launcher, steps to wait for, and what must be equal at the end."""

import contextlib
import hashlib
import itertools
import os
import select
import socket
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from megatron_ddrp.checkpoint import newest
from megatron_ddrp.run.launch import EXIT_CODE
from megatron_ddrp.run.metrics import read_rows
from tests.cluster.forks import ask
from tests.cluster.hosts import SECONDS, Host, login_environment, wait_for
from tests.integration.conftest import TINY
from tests.integration.launch import OF_THE_MACHINE, ROOT, SCRIPT

PORTS = itertools.count(21_000)
HELD = Path(__file__).with_name("held.py")
COURSE = TINY | {"hidden_dropout": 0.1, "attention_dropout": 0.1, "save_interval": 3, "keep_last": 3, "plugin": HELD}
STEPS = 80

Flags = Callable[..., list[str]]


class Rank:
    """One rank, forked onto a host."""

    def __init__(self, host: Host, words: Sequence[str], variables: dict[str, str], output: Path) -> None:
        self.output, self._code = output, b""
        with open(os.devnull, "rb") as nothing, output.open("ab") as stream:
            files = (nothing.fileno(), stream.fileno(), stream.fileno())
            self._server: socket.socket = ask(host.pid, words, login_environment() | variables, ROOT, files)

    def signal(self, number: int) -> None:
        """Send a signal to the rank."""
        self._server.sendall(b"%d " % number)

    def code(self) -> int | None:
        """Return the exit code, or None while the rank runs."""
        if not self._code.endswith(b"\n") and select.select([self._server], [], [], 0)[0]:
            self._code += self._server.recv(100) or b"-9\n"
        return int(self._code) if self._code.endswith(b"\n") else None

    def text(self) -> str:
        """Return what the rank printed."""
        return self.output.read_text(encoding="utf-8", errors="replace")


def start(
    hosts: Sequence[Host], words: Sequence[str], folder: Path, last: Sequence[object] = (), **variables: str
) -> list[Rank]:
    """Start one rank per host, as docs/launching.md allows by variables; rank 0 and the store are on the first one.

    `last` is the command of the last host, if it has one of its own.
    """
    number = next(PORTS)
    common = {"MASTER_ADDR": hosts[0].name, "MASTER_PORT": str(number), "WORLD_SIZE": str(len(hosts))}
    commands: list[Sequence[object]] = [(SCRIPT, *words)] * (len(hosts) - 1)
    ranks = []
    for rank, (host, command) in enumerate(zip(hosts, [*commands, last or (SCRIPT, *words)], strict=True)):
        own = common | {"RANK": str(rank), "LOCAL_RANK": "0"} | variables
        ranks.append(Rank(host, [str(word) for word in command], own, folder / f"{number}-rank{rank}"))
    return ranks


def end(ranks: Iterable[Rank], seconds: float = SECONDS) -> list[int | None]:
    """Wait until the ranks have ended, and return their exit codes; a rank that outlasts `seconds` fails the test."""
    ranks = list(ranks)
    wait_for(lambda: None not in [rank.code() for rank in ranks], lambda: texts(ranks), seconds)
    return [rank.code() for rank in ranks]


def texts(ranks: Iterable[Rank]) -> str:
    """Return what ranks printed, for a failing test."""
    return "\n".join(f"--- code {rank.code()}\n{rank.text()[-3000:]}" for rank in ranks)


def words_of(flags: Flags, save: Path, steps: int = STEPS, **changes: object) -> list[str]:
    """Return the command line of a run that saves in `save` and resumes from there."""
    return flags(**{**COURSE, "train_iters": steps, "save": save, "load": save, **changes})


def hold(save: Path, step: int) -> None:
    """Let a run wait after this step, and go on if it waits after an earlier one."""
    Path(f"{save}.hold").write_text(str(step), encoding="utf-8")


def let_go(save: Path) -> None:
    """Let a run go on to its end."""
    Path(f"{save}.hold").unlink(missing_ok=True)


def rows_of(save: Path) -> list[dict[str, object]]:
    """Return the rows of training steps so far, without what depends on the clock."""
    with contextlib.suppress(FileNotFoundError):
        rows = [row for row in read_rows(save) if "loss" in row]
        return [{key: value for key, value in row.items() if key not in OF_THE_MACHINE} for row in rows]
    return []


def wait_for_step(save: Path, step: int, explain: Callable[[], str], seconds: float = SECONDS) -> None:
    """Wait until a run has written the row of a step."""
    wait_for(lambda: any(row["iteration"] == step for row in rows_of(save)[-1:]), explain, seconds)


def exit_code(save: Path) -> str:
    """Return the contents of DIR/exit_code, or "" if there is none."""
    file = save / EXIT_CODE
    return file.read_text(encoding="utf-8").strip() if file.exists() else ""


def sums(save: Path) -> dict[str, str]:
    """Return SHA-256 of the weights and moments in the newest checkpoint."""
    checkpoint = newest(save)
    assert checkpoint, f"{save} has no checkpoint"
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in checkpoint.glob("*.safetensors")}


def assert_equal(save: Path, whole: Path, steps: int = STEPS) -> None:
    """Check that a run has each step once, and rows, weights and moments of an undisturbed run, bit for bit."""
    rows = rows_of(save)
    assert [row["iteration"] for row in rows] == list(range(1, steps + 1))
    assert rows == rows_of(whole)
    assert sums(save) == sums(whole)
