"""Plug-in of pytest for `make test-times`: CPU seconds and waits of each test, in build/test-times.csv.

A busy machine stretches the seconds of the clock; CPU seconds stay about the same. A wait is the rest: sleeps,
timeouts, and turns of other processes. A fixture counts for the first test that asks for it. Processes that outlive
their parents are not counted.
"""

import csv
import multiprocessing
import os
import resource
import time
from collections import defaultdict
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import psutil
import pytest

TABLE = Path(os.environ.get("TEST_TIMES", Path(__file__).resolve().parents[1] / "build" / "test-times.csv"))


def cpu_seconds() -> float:
    """Return the CPU seconds of this process, its ended children, and the fork server with its children."""
    alive = [child.pid for child in multiprocessing.active_children()]  # joins those that have ended
    alive.append(forkserver._forkserver._forkserver_pid)  # type: ignore[attr-defined]
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime + sum(_seconds_of(pid) for pid in alive if pid)


def _seconds_of(pid: int) -> float:
    """Return the CPU seconds of a process and its ended children; 0 if it is gone."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return times.user + times.system + times.children_user + times.children_system


class Times:
    """Sums by test, from the reports of its set-up, call and tear-down, also those of xdist's workers."""

    def __init__(self) -> None:
        self.seen = 0.0
        self.rows: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def pytest_runtest_logstart(self) -> None:
        self.seen = cpu_seconds()  # without the collection

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[None]:
        outcome: Any = yield
        seen = cpu_seconds()
        outcome.get_result().cpu = max(0.0, seen - self.seen)
        self.seen = seen

    def pytest_runtest_logreport(self, report: Any) -> None:
        row = self.rows[report.nodeid]
        row[0] += getattr(report, "cpu", 0.0)  # a test that crashes its worker has none
        row[1] += report.duration

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        files: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for test, row in self.rows.items():
            for number, seconds in enumerate(row):
                files[test.partition("::")[0]][number] += seconds
        TABLE.parent.mkdir(exist_ok=True)
        with TABLE.open("w", encoding="utf-8", newline="") as stream:
            writer = csv.writer(stream)
            writer.writerow(("file or test", "cpu", "wait"))
            for rows in (files, self.rows):
                writer.writerows((name, *map("{:.3f}".format, _cpu_and_wait(*rows[name]))) for name in _longest(rows))
        sums = [sum(values) for values in zip(*map(_cpu_and_wait, *zip(*files.values(), strict=True)), strict=True)]
        terminalreporter.write_line(
            f"{sums[0]:9.2f} {sums[1]:9.2f} {len(files)} files, {len(self.rows)} tests: all in {TABLE}"
        )


def _cpu_and_wait(cpu: float, wall: float) -> tuple[float, float]:
    return cpu, max(0.0, wall - cpu)


def _longest(rows: dict[str, list[float]]) -> list[str]:
    """Return the names by the larger of CPU seconds and the clock's, the longest first."""
    return sorted(rows, key=lambda name: max(rows[name]), reverse=True)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Times(), "times")
