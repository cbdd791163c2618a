"""Faults, one at a time: does a test of their area notice? The list is faults.yaml.

    python -m tests.endurance.faults [--only NAME …] [--jobs 2] [--limit 600] [--check]

A fault is a small edit of one file of the package. It is applied to a copy of the working tree, where the fast tests of
its area run until one fails, or all of them where none is fast. Results go to a file outside git, so a stopped run
resumes; `--only` runs faults again. At the end the tests that caught a fault run without one. Exits 1 if fewer than
95 % are caught. `--check` only looks whether the old text of every fault occurs exactly once.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from tqdm import tqdm

from megatron_ddrp.pages.markdown import Table
from megatron_ddrp.tasks.jobs import digest
from tests.endurance.lines import ROOT

ENOUGH = 0.95
"""Share of the faults that the tests must catch."""
CAUGHT, SURVIVED, TIMEOUT = "caught", "survived", "out of time"
NOT_COPIED = (".git", ".venv", "__pycache__", ".*_cache", ".hypothesis", "build", "dist", "quickstart", "runs", "site")
FORK = multiprocessing.get_context("fork")
PRELOADED = ("torch", "deepspeed", "transformers", "scipy.stats", "matplotlib.pyplot", "hypothesis")
"""Modules that take long to import; the tests run in forks of a process that holds them."""


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

    @property
    def misfit(self) -> str:
        """Reason why the fault cannot be applied to the working tree; empty if it can."""
        if missing := [name for name in (self.file, *self.tests) if not (ROOT / name).exists()]:
            return f"no {missing[0]}"
        times = (ROOT / self.file).read_text(encoding="utf-8").count(self.old)
        return "" if times == 1 else f"{self.file} has its old text {times} times"


def all_faults() -> list[Fault]:
    """Return the faults of faults.yaml."""
    return [Fault(**entry) for entry in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))]


class FirstFailure:
    """Plug-in of pytest that runs fast tests and keeps the name of the first failed one, or of a broken file."""

    name = ""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out slow tests, unless all are slow."""
        items[:] = [item for item in items if not item.get_closest_marker("slow")] or items

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.name = self.name or report.nodeid * report.failed

    pytest_collectreport = pytest_runtest_logreport


def in_tree(tree: Path, tests: Iterable[str], told: Any) -> None:
    """Run tests in a tree, in a fork of this process; send the exit code and the name of the first failed test."""
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)
    sys.path[:] = [str(tree), *(place for place in sys.path if Path(place).resolve() != ROOT)]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("megatron_ddrp", "tests")]:
        del sys.modules[name]
    first = FirstFailure()
    code = pytest.main(["-x", "-p", "no:cacheprovider", *tests], [first])
    told.send((int(code), first.name))
    os._exit(0)


def run_tests(tests: Iterable[str], limit: float | None, fault: Fault | None = None) -> tuple[str, str]:
    """Run the fast tests in a copy of the tree until one fails; return the result and the name of the failed test."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(shutil.copytree(ROOT, Path(folder).resolve() / "tree", ignore=shutil.ignore_patterns(*NOT_COPIED)))
        if fault is not None:
            sound = (tree / fault.file).read_text(encoding="utf-8")
            (tree / fault.file).write_text(sound.replace(fault.old, fault.new), encoding="utf-8")
        heard, told = FORK.Pipe(duplex=False)
        process = FORK.Process(target=in_tree, args=(tree, tests, told))
        process.start()
        code, failed = heard.recv() if heard.poll(limit) else (None, "")
        process.kill()
        process.join()
    assert code in (None, bool(failed)), f"pytest {' '.join(tests)} ended with {code}"
    return TIMEOUT if code is None else CAUGHT if failed else SURVIVED, failed.removeprefix("tests/")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="run these faults, also those with a result")
    parser.add_argument("--jobs", type=int, default=1, help="faults at a time (default: 1)")
    parser.add_argument("--limit", type=float, default=600, help="seconds for the tests of a fault (default: 600)")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "faults.jsonl", help="file of results")
    parser.add_argument("--check", action="store_true", help="only check that every fault still applies")
    arguments = parser.parse_args()
    known = {fault.name: fault for fault in all_faults()}
    if unknown := [name for name in arguments.only or () if name not in known]:
        parser.error(f"--only {unknown[0]}: not in the list")
    faults = [known[name] for name in arguments.only or known]
    if misfits := [f"{fault.name}: {fault.misfit}" for fault in faults if fault.misfit]:
        sys.exit("\n".join(["error: faults that do not fit the tree; correct the list:", *misfits]))
    if arguments.check:
        return 0
    os.environ |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    list(map(__import__, PRELOADED))
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    with arguments.results.open("a+", 1, encoding="utf-8") as results, ThreadPoolExecutor(arguments.jobs) as pool:
        results.seek(0)
        rows = {row["fault"]: row for row in map(json.loads, results)}
        left = [fault for fault in faults if arguments.only or fault.key not in rows]
        running = {pool.submit(run_tests, fault.tests, arguments.limit, fault): fault.key for fault in left}
        for done in tqdm(as_completed(running), total=len(left), unit="fault"):
            rows[running[done]] = dict(zip(("fault", "result", "test"), (running[done], *done.result()), strict=True))
            results.write(json.dumps(rows[running[done]]) + "\n")
    found = sorted(((fault, rows[fault.key]) for fault in faults), key=lambda pair: pair[1]["result"] == CAUGHT)
    cells = [[fault.name, row["result"], row["test"], fault.breaks] for fault, row in found]
    print(Table(["fault", "result", "caught by", "it breaks"], cells, wordy=(1, 2, 3)))
    caught_by = sorted({f"tests/{row['test']}" for _, row in found if row["test"]})
    result, test = run_tests(caught_by, None) if caught_by else (SURVIVED, "")
    if result != SURVIVED:
        sys.exit(f"error: {test} fails without a fault too: mend it, and run its faults again")
    share = sum(row["result"] == CAUGHT for _, row in found) / len(found)
    print(f"{share:.1%} of {len(found)} faults caught, expected {ENOUGH:.0%}", file=sys.stderr)
    return int(share < ENOUGH)


if __name__ == "__main__":
    sys.exit(main())
