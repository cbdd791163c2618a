"""`kill -9` of a training run at random moments, again and again: it ends as if nothing had happened, to the last bit.

    python -m tests.endurance.kills --kills 50 [--data-path P --vocab-file F]

Checkpoints are written every second step, so that many kills fall into the writing of one. Dropout is on.
"""

import argparse
import random
import signal
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from megatron_ddrp.checkpoint import newest
from tests.endurance.layouts import make_corpus
from tests.integration.conftest import DROPOUT, TINY, command_line
from tests.integration.launch import TIMEOUT, start_ranks, training_rows
from tests.integration.training_runs import assert_same_bits

STEPS_BETWEEN = 5
"""Most steps from a start until the kill is meant; a busy machine may be as many later."""


def kill_late(metrics: Path, generator: random.Random, ranks: list[Any]) -> None:
    """Kill a run's ranks some steps after its start, at a random moment within a step or a save."""

    def rows() -> int:
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    end, enough = time.monotonic() + TIMEOUT / 2, rows() + generator.randint(0, STEPS_BETWEEN)
    while rows() < enough and all(rank.is_alive() for rank in ranks) and time.monotonic() < end:
        time.sleep(0.002)
    time.sleep(generator.uniform(0, 0.08))
    for rank in ranks:
        rank.kill()


def kill_and_compare(kills: int, arguments: list[str], folder: Path, seed: int) -> Counter[str]:
    """Kill a run so often, compare it with the undisturbed one; returns how many kills left what behind."""
    steps = 2 * (STEPS_BETWEEN + 1) * kills + 6
    settings = [*arguments, "--train-iters", str(steps), "--save-interval", "2", "--keep-last", "2"]
    whole, killed = folder / "whole", folder / "killed"
    start_ranks([*settings, "--save", str(whole), "--load", str(whole)]).check()
    command = [*settings, "--save", str(killed), "--load", str(killed)]
    killer, seen = partial(kill_late, killed / "metrics.jsonl", random.Random(seed)), Counter[str]()
    for number in range(kills):
        codes = start_ranks(command, during=killer).exit_codes
        assert -signal.SIGKILL in codes, f"kill {number} came too late: exit codes {codes}"
        seen["kills"] += 1
        seen["of a save"] += any(killed.glob("iter_*.tmp"))
        seen["before the first checkpoint"] += not any(killed.glob("iter_*"))
    start_ranks(command).check()
    assert training_rows(killed) == training_rows(whole), "losses differ"
    assert newest(killed).name == newest(whole).name  # type: ignore[union-attr]
    assert_same_bits(killed, whole, "tensors differ")
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data-path", help="without it and --vocab-file: the tests' tiny corpus")
    parser.add_argument("--vocab-file")
    given = parser.parse_args()
    if bool(given.data_path) != bool(given.vocab_file):
        parser.error("--data-path and --vocab-file go together")
    with tempfile.TemporaryDirectory() as folder:
        own = {"data_path": given.data_path, "vocab_file": given.vocab_file, "train_iters": None}
        flags = command_line(TINY | DROPOUT | own | ({} if given.data_path else make_corpus(Path(folder))))
        seen = kill_and_compare(given.kills, flags, Path(folder), given.seed)
    counts = ", ".join(f"{count} {what}" for what, count in seen.items())
    print(f"{counts}: losses, weights and moments equal bit for bit")


if __name__ == "__main__":
    main()
