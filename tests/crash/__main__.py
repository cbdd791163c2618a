"""Crash an update at every moment, let each of its operations fail, cut the power of real file systems.

    python -m tests.crash [states failures disks] [--only NAME …] [--write]

Afterwards a user's files must be as promised: what was reported as done is there, anything else is old or new, and the
same command ends as an undisturbed one. Exits 1 where they are not, and says after which operation. `--write` puts the
table of the states between the markers of docs/checkpoints.md.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.pages import write_table
from megatron_ddrp.pages import plotting
from megatron_ddrp.pages.markdown import Table
from tests.conftest import coarse_figure
from tests.crash import disks, recording
from tests.crash.checking import PROTOCOLS, Bench, Report
from tests.crash.states import MODELS

DOCUMENT = "checkpoints.md"
FAILURES = (("ENOSPC", True), ("ENOSPC", False), ("EIO", False), ("EINTR", False), ("short write", False))
"""Faults of one operation, or of it and all later ones."""

Findings = Iterator[tuple[str, list[str]]]
"""Something that was checked, in a line, and its faults."""


def table(reports: Sequence[Report]) -> str:
    """Return the counts of states in Markdown."""
    models = [model for model in MODELS if all(model in report.tried for report in reports)]
    header = ["update", "operations", *(f"{model}: states, bad" for model in models)]
    rows = [
        [report.name, str(report.operations), *(f"{report.tried[m]:,}, {report.bad[m]}" for m in models)]
        for report in reports
    ]
    sums = [f"{sum(r.tried[m] for r in reports):,}, {sum(r.bad[m] for r in reports)}" for m in models]
    return str(Table(header, [*rows, ["all", str(sum(report.operations for report in reports)), *sums]]))


def try_states(bench: Bench, names: Sequence[str], given: argparse.Namespace) -> Findings:
    """Try the states of crashes, and print their table."""
    reports = []
    for name in names:
        reports.append(report := bench.check(name, given.quick))
        yield f"{name}: {report.operations} operations, {sum(report.tried.values())} states", report.faults
    print(table(reports))
    if given.write:
        write_table(DOCUMENT, "crashes", table(reports))


def let_operations_fail(bench: Bench, names: Sequence[str], given: argparse.Namespace) -> Findings:
    """Let each operation fail."""
    for name in names:
        for fault, sticky in FAILURES:
            tries, faults = bench.fail(name, fault, sticky)
            yield f"{name}: {fault}{' for good' * sticky} at each of {tries} operations", faults


def cut_power_of_disks(bench: Bench, names: Sequence[str], given: argparse.Namespace) -> Findings:
    """Cut the power of real file systems."""
    for kind in disks.KINDS:
        if lack := disks.lacking(kind):
            yield f"{kind}: not checked: this machine lacks {lack}", []
        else:
            yield from disks.check(bench, kind, names)


KINDS: dict[str, Callable[..., Findings]] = {
    "states": try_states,
    "failures": let_operations_fail,
    "disks": cut_power_of_disks,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help="states, failures, disks (default: all)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help=f"some of: {', '.join(PROTOCOLS)}")
    parser.add_argument("--quick", action="store_true", help="fewer updates and states, as in the test suite")
    parser.add_argument("--write", action="store_true", help=f"replace the table in {DOCUMENT}")
    given = parser.parse_args()
    if strange := {*given.kinds} - {*KINDS} or {*(given.only or ())} - {*PROTOCOLS}:
        parser.error(f"unknown: {', '.join(strange)}; known: {', '.join((*KINDS, *PROTOCOLS))}")
    if reason := recording.missing():
        print(f"nothing checked: {reason}")
        return 0
    with tempfile.TemporaryDirectory(prefix="crash-") as folder:
        place = Path(folder).resolve()
        if not recording.is_loaded():  # once more, with the recorder
            command = [sys.executable, "-W", "ignore", "-m", "tests.crash", *sys.argv[1:]]
            return subprocess.call(command, env={**os.environ, **recording.environment(place)})
        return check(Bench(place), given)


def check(bench: Bench, given: argparse.Namespace) -> int:
    """Print the findings of each kind; return 1 if there is a fault."""
    if given.quick:
        plotting.render = coarse_figure
    names = given.only or [name for name, protocol in PROTOCOLS.items() if protocol.is_quick or not given.quick]
    bad = 0
    for kind in given.kinds or KINDS:
        for line, faults in KINDS[kind](bench, names, given):
            print(line, "BAD" if faults else "-", flush=True)
            for fault in faults:
                print(f"    {fault}", flush=True)
            bad += len(faults)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
