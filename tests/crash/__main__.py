"""Crash an update at every moment, let each of its operations fail, cut the power of real file systems.

    python -m tests.crash [states failures disks] [--only NAME …] [--write]

Afterwards a user's files must be as promised: what was reported as done is there, anything else is old or new, and the
same command ends as an undisturbed one. Exits 1 where they are not, and says after which operation. `--write` puts the
table of the states between the markers of docs/checkpoints.md.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.pages import write_table
from megatron_ddrp.pages import plotting
from megatron_ddrp.pages.markdown import Table
from tests.conftest import coarse_figure
from tests.crash import disks, recording
from tests.crash.checking import PROTOCOLS, Bench, Effort, Report
from tests.crash.states import MODELS

DOCUMENT = "checkpoints.md"
KINDS = ("states", "failures", "disks")
FAILURES = (("ENOSPC", True), ("ENOSPC", False), ("EIO", False), ("EINTR", False), ("short write", False))
"""Faults of one operation, or of it and all later ones."""
QUICK = Effort(("kill", "journal"), most=40)


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


def check_states(bench: Bench, names: Sequence[str], effort: Effort, reports_file: Path | None, writes: bool) -> int:
    """Try the states of crashes; return the number of bad ones."""
    reports = []
    for name in names:
        reports.append(report := bench.check(name, effort))
        _tell(f"{name}: {report.operations} operations, {sum(report.tried.values())} states", report.faults)
    if reports_file:
        reports_file.write_text(json.dumps([report._asdict() for report in reports]), encoding="utf-8")
    else:
        print(table(reports))
    if writes:
        write_table(DOCUMENT, "crashes", table(reports))
    return sum(sum(report.bad.values()) for report in reports)


def check_failures(bench: Bench, names: Sequence[str]) -> int:
    """Let each operation fail; return the number of faults found."""
    number = 0
    for name in names:
        for fault, sticky in FAILURES:
            tries, faults = bench.fail(name, fault, sticky)
            _tell(f"{name}: {fault}{' for good' * sticky} at each of {tries} operations", faults)
            number += len(faults)
    return number


def check_disks(bench: Bench, names: Sequence[str]) -> int:
    """Cut the power of real file systems; return the number of faults found."""
    number = 0
    for kind in disks.KINDS:
        if lack := disks.lacking(kind):
            _tell(f"{kind}: not checked: this machine lacks {lack}", [])
            continue
        for report, faults in disks.check(bench, kind, names).items():
            _tell(f"{kind}: power cut after {report}", faults)
            number += len(faults)
    return number


def _tell(line: str, faults: Sequence[str]) -> None:
    print(line, "-" if not faults else "BAD", flush=True)
    for fault in faults:
        print(f"    {fault}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help="states, failures, disks (default: all)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help=f"some of: {', '.join(PROTOCOLS)}")
    parser.add_argument("--quick", action="store_true", help="fewer updates and states, as in the test suite")
    parser.add_argument("--reports", type=Path, metavar="FILE", help="write the results of the states as JSON")
    parser.add_argument("--write", action="store_true", help=f"replace the table in {DOCUMENT}")
    given = parser.parse_args()
    kinds = given.kinds or list(KINDS)
    if strange := {*kinds} - {*KINDS} or {*(given.only or ())} - {*PROTOCOLS}:
        parser.error(f"unknown: {', '.join(strange)}; known: {', '.join((*KINDS, *PROTOCOLS))}")
    if reason := recording.missing():
        print(f"nothing checked: {reason}")
        return 0
    names = given.only or [name for name, protocol in PROTOCOLS.items() if protocol.is_quick or not given.quick]
    with tempfile.TemporaryDirectory(prefix="crash-") as folder:
        place = Path(folder).resolve()
        if recording.is_loaded():
            return int(check(Bench(place), names, kinds, given) > 0)
        recorded, bad = [kind for kind in kinds if kind != "disks"], 0
        if recorded:
            bad = subprocess.call(_recorded_command(recorded), env={**os.environ, **recording.environment(place)})
        return int(bad or "disks" in kinds and check_disks(Bench(place), names) > 0)


def check(bench: Bench, names: Sequence[str], kinds: Sequence[str], given: argparse.Namespace) -> int:
    """Do the checks that the recorder is needed for; return the number of bad states and faults."""
    bad = 0
    if given.quick:
        plotting.render = coarse_figure
    if "states" in kinds:
        bad += check_states(bench, names, QUICK if given.quick else Effort(), given.reports, given.write)
    if "failures" in kinds:
        bad += check_failures(bench, names)
    return bad


def _recorded_command(kinds: Sequence[str]) -> list[str]:
    """Return this command with other kinds, for a process in which the recorder stands in front of libc."""
    options = [word for word in sys.argv[1:] if word not in KINDS]
    return [sys.executable, "-W", "ignore", "-m", "tests.crash", *kinds, *options]


if __name__ == "__main__":
    sys.exit(main())
