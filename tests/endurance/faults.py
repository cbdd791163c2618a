"""Faults, one at a time: does a test of their area notice? The list is faults.yaml.

    python -m tests.endurance.faults [--only NAME …] [--jobs 2] [--limit 600] [--check]

A fault is a small edit of one file of the package. It is applied to a copy of the working tree, where the fast tests of
its area run until one fails. Results go to a file outside git (`--results`), so that a stopped run resumes; `--only`
runs faults again. At the end the tests that caught a fault run once more without any. Exits 1 if fewer than 95 % are
caught. `--check` only looks whether the old text of every fault occurs exactly once.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import Queue
from typing import NamedTuple

import yaml
from tqdm import tqdm

from megatron_ddrp.pages.markdown import Table
from megatron_ddrp.tasks.jobs.store import digest

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_suffix(".yaml")
ENOUGH = 0.95
"""Share of the faults that the tests must catch."""
CAUGHT, SURVIVED, TIMEOUT = "caught", "survived", "out of time"
PYTEST = (sys.executable, "-m", "pytest", "-x", "--tb=no", "-rfE", "-m", "not slow", "-p", "no:cacheprovider")
_FAILURE = re.compile(r"^(?:FAILED|ERROR) (?:tests/)?(.+?)(?: - .*)?$", re.MULTILINE)


class Fault(NamedTuple):
    """One edit and the tests of its area."""

    name: str
    file: str
    old: str
    new: str
    breaks: str
    tests: list[str]

    @property
    def key(self) -> str:
        """Name and fingerprint: a fault that was changed runs again."""
        return f"{self.name} {digest(self)}"

    def fault_of_fault(self) -> str:
        """Return why this fault cannot be applied to the working tree; empty if it can."""
        missing = [name for name in (self.file, *self.tests) if not (ROOT / name).exists()]
        times = 0 if missing else (ROOT / self.file).read_text(encoding="utf-8").count(self.old)
        return f"no {missing[0]}" if missing else f"{self.file} has its old text {times} times" if times != 1 else ""


def copy_tree(folder: Path) -> Path:
    """Copy the files of the working tree that git does not ignore; return the folder."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.check_output(command, text=True).rstrip("\0").split("\0"):
        if (ROOT / name).is_file():  # not deleted
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def run_tests(tree: Path, tests: Iterable[str], limit: float | None) -> tuple[str, str]:
    """Run the fast tests in a tree until one fails; return the result and the name of the failed test."""
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            [*PYTEST, *tests], cwd=tree, env=environment, capture_output=True, text=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        return TIMEOUT, ""
    failed = _FAILURE.search(done.stdout)
    assert done.returncode == bool(failed), f"pytest {' '.join(tests)}:\n{done.stdout}{done.stderr}"
    return (CAUGHT, failed[1]) if failed else (SURVIVED, "")


def try_fault(fault: Fault, trees: Queue[Path], limit: float) -> dict[str, str]:
    """Apply a fault to a free tree, run the tests of its area and take it back; return the row of the results."""
    tree = trees.get()
    file = tree / fault.file
    sound = file.read_text(encoding="utf-8")
    try:
        file.write_text(sound.replace(fault.old, fault.new), encoding="utf-8")
        result, test = run_tests(tree, fault.tests, limit)
    finally:
        file.write_text(sound, encoding="utf-8")
        trees.put(tree)
    return {"fault": fault.key, "result": result, "test": test}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="run these faults, also those with a result")
    parser.add_argument("--jobs", type=int, default=1, help="faults at a time, each in its own copy (default: 1)")
    parser.add_argument("--limit", type=float, default=600, help="seconds for the tests of a fault (default: 600)")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "faults.jsonl", help="file of results")
    parser.add_argument("--check", action="store_true", help="only check that every fault still applies")
    arguments = parser.parse_args()
    listed = [Fault(**entry) for entry in yaml.safe_load(LIST.read_text(encoding="utf-8"))]
    faults = [fault for fault in listed if fault.name in (arguments.only or [fault.name])]
    if unfit := [f"{fault.name}: {reason}" for fault in faults if (reason := fault.fault_of_fault())]:
        sys.exit("\n".join(["error: faults that do not fit the tree; correct the list:", *unfit]))
    if arguments.check:
        return 0
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    trees: Queue[Path] = Queue()
    with tempfile.TemporaryDirectory() as folder, arguments.results.open("a+", encoding="utf-8") as results:
        results.seek(0)
        rows = {row["fault"]: row for row in map(json.loads, results)}
        left = [fault for fault in faults if arguments.only or fault.key not in rows]
        for number in range(arguments.jobs):
            trees.put(copy_tree(Path(folder) / str(number)))
        with ThreadPoolExecutor(arguments.jobs) as pool:
            running = [pool.submit(try_fault, fault, trees, arguments.limit) for fault in left]
            for row in (done.result() for done in tqdm(as_completed(running), total=len(left), unit="fault")):
                rows[row["fault"]] = row
                results.write(json.dumps(row) + "\n")
                results.flush()
        found = sorted(((fault, rows[fault.key]) for fault in faults), key=lambda pair: pair[1]["result"] == CAUGHT)
        cells = [[fault.name, row["result"], row["test"], fault.breaks] for fault, row in found]
        print(Table(["fault", "result", "caught by", "it breaks"], cells, wordy=(1, 2, 3)))
        caught_by = sorted({f"tests/{row['test']}" for _, row in found if row["test"]})
        result, test = run_tests(trees.get(), caught_by, None) if caught_by else (SURVIVED, "")
    if result != SURVIVED:
        sys.exit(f"error: {test} fails without a fault too: mend it, and run its faults again")
    share = sum(row["result"] == CAUGHT for _, row in found) / len(found)
    print(f"{share:.1%} of {len(found)} faults caught, expected {ENOUGH:.0%}", file=sys.stderr)
    return int(share < ENOUGH)


if __name__ == "__main__":
    sys.exit(main())
