"""Runs of the cluster tier: commands and ranks on hosts, steps to wait for, and what must be equal at the end."""

import contextlib
import hashlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from megatron_ddrp.checkpoint import newest
from megatron_ddrp.run.launch import EXIT_CODE
from megatron_ddrp.run.metrics import read_rows
from tests.cluster.hosts import SECONDS, Host, wait_for
from tests.integration.conftest import TINY, Flags
from tests.integration.launch import SCRIPT, steps_of

PORTS = itertools.count(21_000)
HELD = Path(__file__).with_name("held.py")
COURSE = TINY | {"hidden_dropout": 0.1, "attention_dropout": 0.1, "save_interval": 3, "keep_last": 3, "plugin": HELD}
STEPS = 80

Pair = tuple[Host, Host]
Seen = Callable[[str, str, str], None]


class Launched:
    """A command on a host, its output and how it ended."""

    def __init__(self, host: Host, command: Sequence[object], folder: Path, **variables: str) -> None:
        self.output = folder / f"output-{next(PORTS)}"
        self.process = host.start_command(command, self.output, **variables)

    def text(self) -> str:
        """Return what the command, or the ranks that it started, printed."""
        return self.output.read_text(encoding="utf-8", errors="replace")

    def end(self, seconds: float = SECONDS) -> int:
        """Return the exit code of the command; one that outlasts `seconds` fails the test."""
        wait_for(lambda: self.process.poll() is not None, self.text, seconds)
        return self.process.returncode


def start(
    hosts: Sequence[Host], words: Sequence[str], folder: Path, last: Sequence[object] = (), **variables: str
) -> list[Launched]:
    """Start one rank per host, as docs/launching.md allows by variables; rank 0 and the store are on the first one.

    `last` is the command of the last host, if it has one of its own.
    """
    common = {"MASTER_ADDR": hosts[0].name, "MASTER_PORT": str(next(PORTS)), "WORLD_SIZE": str(len(hosts))}
    commands: list[Sequence[object]] = [(SCRIPT, *words)] * (len(hosts) - 1)
    ranks = []
    for rank, (host, command) in enumerate(zip(hosts, [*commands, last or (SCRIPT, *words)], strict=True)):
        own = common | {"RANK": str(rank), "LOCAL_RANK": "0"} | variables
        ranks.append(Launched(host, ["python", *command], folder, **own))
    return ranks


def start_held(save: Path, step: int, hosts: Sequence[Host], words: Sequence[str], folder: Path) -> list[Launched]:
    """Start ranks and wait until they are held after a step."""
    hold(save, step)
    ranks = start(hosts, words, folder)
    wait_for_step(save, step, lambda: texts(ranks))
    return ranks


def end(ranks: Iterable[Launched]) -> list[int]:
    """Wait until the ranks have ended, and return their exit codes."""
    ranks = list(ranks)
    wait_for(lambda: None not in [rank.process.poll() for rank in ranks], lambda: texts(ranks))
    return [rank.process.returncode for rank in ranks]


def texts(ranks: Iterable[Launched]) -> str:
    """Return what ranks printed, for a failing test."""
    return "\n".join(f"--- code {rank.process.poll()}\n{rank.text()[-3000:]}" for rank in ranks)


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
        return steps_of(read_rows(save))
    return []


def wait_for_step(save: Path, step: int, explain: Callable[[], str]) -> None:
    """Wait until a run has written the row of a step."""
    wait_for(lambda: any(row["iteration"] == step for row in rows_of(save)[-1:]), explain)


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
