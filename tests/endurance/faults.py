"""Faults, one at a time: does a test of their area notice? The list is faults.yaml.

    python -m tests.endurance.faults [--quick] [--only NAME …] [--jobs 2] [--limit 600] [--check]

A fault is a small edit of one file of the package. It is applied to a copy of the working tree, where the tests listed
for it run, and those that import its file: the fast tests of each file until one fails, or all of a listed file without
any. If none fails, those that reach the file through others run too, and then the slow ones of the listed files.
Results go to a file outside git, so a stopped run resumes; `--only` runs faults again. A second table counts, for each
file of tests, the faults that it caught and those that it alone caught. At the end the tests that caught a fault run
without one. Exits 1 if fewer than 95 % are caught. `--quick` begins with the listed tests and goes on to the next fault
after the first that fails, without the second table. `--check` only looks whether the old text of every fault occurs
exactly once.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from tqdm import tqdm

from megatron_ddrp.pages.markdown import Table
from megatron_ddrp.tasks.jobs import digest
from tests.changed import affected_tests, imports_of, module_of, parse
from tests.endurance.lines import ROOT

ENOUGH = 0.95
"""Share of the faults that the tests must catch."""
CAUGHT, SURVIVED, TIMEOUT = "caught", "survived", "out of time"
IN_SUITE = ("tests/unit/", "tests/integration/")
OF_FAULTS = "tests/unit/test_house.py"
"""The tests that look for the old text of every fault: they fail under any."""
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


def tests_that_see(fault: Fault, quick: bool) -> Iterator[set[str]]:
    """Yield the tests listed for a fault with those that import its file, then all others that reach the file.

    The listed ones come by themselves, before all others, if this is to be `quick`.
    """
    sources = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in ROOT.glob("[!.]*/**/*.py")}
    modules = frozenset(map(module_of, sources))
    reached = {file for file in affected_tests([fault.file], sources) if file.startswith(IN_SUITE)} - {OF_FAULTS}
    near = {file for file in reached if module_of(fault.file) in imports_of(parse(sources[file]), modules)}
    listed = {file for file in sources if Path(file).name.startswith("test_") and is_below(file, fault.tests)}
    yield from (listed, near - listed) if quick else (near | listed,)
    yield reached - near - listed


def is_below(file: str, places: Collection[str]) -> bool:
    """Return whether a file is one of these files, or in one of these folders."""
    return any(Path(file).is_relative_to(place) for place in places)


class FirstFailures:
    """Plug-in of pytest that runs each file until a test fails.

    It runs the fast tests, and the slow ones of a listed file without any; with `slow` those of all listed files.
    """

    def __init__(self, listed: Collection[str], slow: bool) -> None:
        self.listed, self.slow = listed, slow
        self.failed: dict[str, str] = {}
        """The first test that failed, by file; a broken file's is its own name."""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out slow tests."""
        fast = [item for item in items if not item.get_closest_marker("slow")]
        files = set() if self.slow else {item.path for item in fast}
        others = [item for item in items if item.get_closest_marker("slow") and item.path not in files]
        items[:] = [*fast, *(item for item in others if is_below(file_of(item.nodeid), self.listed))]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Skip the rest of a file in which a test has failed."""
        if file_of(item.nodeid) in self.failed:
            pytest.skip()

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed.setdefault(file_of(report.nodeid), report.nodeid)

    pytest_collectreport = pytest_runtest_logreport


def file_of(test: str) -> str:
    return test.partition("::")[0]


def in_tree(tree: Path, tests: Collection[str], listed: Collection[str], quick: bool, slow: bool, told: Any) -> None:
    """Run tests in a tree, in a fork of this process; send the exit code and the first failed test of each file."""
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)
    sys.path[:] = [str(tree), *(place for place in sys.path if Path(place).resolve() != ROOT)]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("megatron_ddrp", "tests")]:
        del sys.modules[name]
    first = FirstFailures(listed, slow)
    options = ["-p", "no:cacheprovider", "--continue-on-collection-errors", *["--exitfirst"] * quick]
    code = pytest.main([*options, *tests], [first])
    told.send((int(code), sorted(first.failed.values())))
    os._exit(0)


def run_tests(
    tests: Collection[str],
    listed: Collection[str],
    limit: float | None,
    fault: Fault | None = None,
    quick: bool = False,
    slow: bool = False,
) -> tuple[str, list[str]]:
    """Run tests in a copy of the tree, each file until one fails; return the result and the names of the failed."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(shutil.copytree(ROOT, Path(folder).resolve() / "tree", ignore=shutil.ignore_patterns(*NOT_COPIED)))
        (tree / ".git").symlink_to(ROOT / ".git")  # some tests ask it for the files of the house
        if fault is not None:
            sound = (tree / fault.file).read_text(encoding="utf-8")
            (tree / fault.file).write_text(sound.replace(fault.old, fault.new), encoding="utf-8")
        heard, told = FORK.Pipe(duplex=False)
        process = FORK.Process(target=in_tree, args=(tree, sorted(tests), listed, quick, slow, told))
        process.start()
        code, failed = heard.recv() if heard.poll(limit) else (None, [])
        process.kill()
        process.join()
    if code == pytest.ExitCode.NO_TESTS_COLLECTED:
        code = pytest.ExitCode.OK
    assert code in (None, bool(failed)), f"pytest {' '.join(tests)} ended with {code}"
    return TIMEOUT if code is None else CAUGHT if failed else SURVIVED, [name.removeprefix("tests/") for name in failed]


def result_of(fault: Fault, limit: float, quick: bool) -> dict[str, Any]:
    """Return a fault's row: its result, and the tests that caught it, one per file, or the first if `quick`."""
    for tests in filter(None, tests_that_see(fault, quick)):
        result, failed = run_tests(tests, fault.tests, limit, fault, quick)
        if result != SURVIVED:
            break
    else:
        result, failed = run_tests(fault.tests, fault.tests, limit, fault, quick, slow=True)
    return {"fault": fault.key, "result": result, "tests": failed}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="go on after the first test that fails")
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
        running = [pool.submit(result_of, fault, arguments.limit, arguments.quick) for fault in left]
        for done in tqdm(as_completed(running), total=len(left), unit="fault"):
            rows[done.result()["fault"]] = done.result()
            results.write(json.dumps(done.result()) + "\n")
    found = sorted(((fault, rows[fault.key]) for fault in faults), key=lambda pair: pair[1]["result"] == CAUGHT)
    cells = [[fault.name, row["result"], ", ".join(row["tests"]), fault.breaks] for fault, row in found]
    print(Table(["fault", "result", "caught by", "it breaks"], cells, wordy=(1, 2, 3)))
    caught = Counter(file_of(test) for _, row in found for test in row["tests"])
    alone = Counter(file_of(row["tests"][0]) for _, row in found if len(row["tests"]) == 1)
    counts = [[file, str(times), str(alone[file])] for file, times in caught.most_common()]
    print("" if arguments.quick else Table(["file", "caught", "alone"], counts))
    caught_by = {f"tests/{test}" for _, row in found for test in row["tests"]}
    result, failed = (
        run_tests(caught_by, set(map(file_of, caught_by)), None, slow=True) if caught_by else (SURVIVED, [])
    )
    if result != SURVIVED:
        sys.exit(f"error: {failed[0]} fails without a fault too: mend it, and run its faults again")
    share = sum(row["result"] == CAUGHT for _, row in found) / len(found)
    print(f"{share:.1%} of {len(found)} faults caught, expected {ENOUGH:.0%}", file=sys.stderr)
    return int(share < ENOUGH)


if __name__ == "__main__":
    sys.exit(main())
