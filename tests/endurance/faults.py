"""Hand-made faults, one at a time: does a test of their area notice? The list is faults.yaml.

    python -m tests.endurance.faults [--only NAME …] [--jobs 2] [--limit 300] [--check]

A fault is a small edit of one file of the package. Each is applied to a copy of the working tree, and the fast tests of
its area run there until one fails. Results go to a file outside git (`--results`), so that a run which was stopped
resumes; `--only` runs faults again. The tests that have caught a fault then run once more without any fault. Exits 1 if
fewer than 95 % are caught, and with an error if the old text of a fault does not occur exactly once. `--check` looks
for the texts only.
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
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any, NamedTuple

import yaml
from tqdm import tqdm

from megatron_ddrp.pages.markdown import Table
from megatron_ddrp.tasks.jobs.store import digest

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_suffix(".yaml")
ENOUGH = 0.95
"""Share of the faults that the tests must catch."""
CAUGHT, SURVIVED, TIMEOUT = "caught", "survived", "out of time"
FAILED, PASSED = 1, 0
"""Exit codes of pytest; another one means that the tests did not run."""
_FAILURE = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)


class Fault(NamedTuple):
    """One edit and the tests of its area."""

    name: str
    file: str
    """Path of the edited file in the repository."""
    old: str
    """Text that occurs exactly once in the file."""
    new: str
    breaks: str
    """One sentence about the effect for users."""
    tests: list[str]
    """Files and folders below tests/."""

    @property
    def key(self) -> str:
        """Name and fingerprint, so that a changed fault runs again."""
        return f"{self.name} {digest(self)}"


def read_faults(path: Path = LIST) -> list[Fault]:
    """Return the faults of the list."""
    return [Fault(**entry) for entry in yaml.safe_load(path.read_text(encoding="utf-8"))]


def misfits(faults: Iterable[Fault]) -> list[str]:
    """Return one line for each fault that does not apply to the tree, or whose tests are missing."""
    found = []
    for fault in faults:
        file = ROOT / fault.file
        times = file.read_text(encoding="utf-8").count(fault.old) if file.is_file() else 0
        if times != 1:
            found.append(f"{fault.name}: {fault.file} has {fault.old!r} {times} times, expected once")
        found += [f"{fault.name}: no tests/{name}" for name in fault.tests if not (ROOT / "tests" / name).exists()]
    return found


def copy_tree(folder: Path) -> Path:
    """Copy the files of the working tree that git does not ignore; return the folder."""
    listed = subprocess.check_output(
        ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"], text=True
    )
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def run_tests(tree: Path, tests: Iterable[str], limit: float | None) -> tuple[str, str]:
    """Run the fast tests in a tree until one fails; return the result and the name of the failed test."""
    command = [sys.executable, "-m", "pytest", "-x", "--tb=no", "-rfE", "-m", "not slow", "-p", "no:cacheprovider"]
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            [*command, *tests], cwd=tree, env=environment, capture_output=True, text=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        return TIMEOUT, ""
    assert done.returncode in (PASSED, FAILED), f"pytest {' '.join(tests)}:\n{done.stdout}{done.stderr}"
    failed = _FAILURE.search(done.stdout)
    return (CAUGHT, failed[1].removeprefix("tests/")) if failed else (SURVIVED, "")


def try_fault(fault: Fault, trees: Queue[Path], limit: float) -> dict[str, Any]:
    """Apply a fault to a free tree, run the tests of its area, and take it back; return the row of the results."""
    tree = trees.get()
    file = tree / fault.file
    sound = file.read_text(encoding="utf-8")
    try:
        file.write_text(sound.replace(fault.old, fault.new), encoding="utf-8")
        result, test = run_tests(tree, [f"tests/{name}" for name in fault.tests], limit)
    finally:
        file.write_text(sound, encoding="utf-8")
        trees.put(tree)
    return {"fault": fault.key, "result": result, "test": test}


def table(faults: Iterable[Fault], rows: Mapping[str, dict[str, Any]]) -> Table:
    """Return the table of the results, those that were not caught first."""
    found = [(fault, rows[fault.key]) for fault in faults if fault.key in rows]
    found.sort(key=lambda pair: pair[1]["result"] == CAUGHT)
    cells = [[fault.name, row["result"], row["test"], fault.breaks] for fault, row in found]
    return Table(["fault", "result", "caught by", "it breaks"], cells, wordy=(1, 2, 3))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="run these faults, also those with a result")
    parser.add_argument("--jobs", type=int, default=1, help="faults at a time, each in a copy of its own (default: 1)")
    parser.add_argument("--limit", type=float, default=600, help="seconds for the tests of a fault (default: 600)")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "faults.jsonl", help="file of results")
    parser.add_argument("--check", action="store_true", help="only check that every fault still applies")
    arguments = parser.parse_args()
    faults = [fault for fault in read_faults() if not arguments.only or fault.name in arguments.only]
    if faulty := misfits(faults):
        sys.exit("\n".join(["error: the list does not fit the tree:", *faulty]))
    if arguments.check:
        return 0
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, arguments.results.open("a+", encoding="utf-8") as results:
        results.seek(0)
        rows = {row["fault"]: row for row in map(json.loads, results)}
        left = [fault for fault in faults if arguments.only or fault.key not in rows]
        trees: Queue[Path] = Queue()
        for number in range(arguments.jobs):
            trees.put(copy_tree(Path(folder) / str(number)))
        with ThreadPoolExecutor(arguments.jobs) as pool:
            for row in tqdm(pool.map(lambda f: try_fault(f, trees, arguments.limit), left), total=len(left)):
                rows[row["fault"]] = row
                results.write(json.dumps(row) + "\n")
                results.flush()
        found = [rows[fault.key] for fault in faults]
        print(table(faults, rows))
        by = sorted({f"tests/{row['test']}" for row in found if row["test"]})
        if by and run_tests(trees.get(), by, None) != (SURVIVED, ""):
            sys.exit("error: these tests fail without a fault too: mend them first")
    share = sum(row["result"] == CAUGHT for row in found) / len(found)
    print(f"{share:.1%} of {len(found)} faults caught, expected {ENOUGH:.0%}", file=sys.stderr)
    return int(share < ENOUGH)


if __name__ == "__main__":
    sys.exit(main())
