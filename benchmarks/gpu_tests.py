"""A plug-in of pytest for the GPU report, which writes a row for each test."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from gpu_groups import Row


class Recorder:
    """A plug-in of pytest that writes a row with the number of tests, then a row for each test."""

    def __init__(self, write: Callable[[Row], None]) -> None:
        self.write = write
        self.has_counted = False

    def count(self, tests: Sequence[object]) -> None:
        """Write once how many tests will run, so that a reader sees how many the deadline cut off."""
        if not self.has_counted:
            self.write({"selected": len(tests)})
        self.has_counted = True

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Count the tests of this process."""
        self.count(session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: object, ids: Sequence[str]) -> None:
        """Count the tests of pytest-xdist's processes, each of which collects all of them."""
        self.count(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write a test's outcome: after its call, or after what came before or behind it and did not pass."""
        if report.when == "call" or report.outcome != "passed":
            row: Row = {"test": report.nodeid, "outcome": report.outcome, "seconds": report.duration}
            self.write(row | ({} if report.outcome == "passed" else {"note": reason(report)}))


def reason(report: pytest.TestReport) -> str:
    """Return in one line why a test failed or was skipped."""
    if isinstance(report.longrepr, tuple):  # of a skipped test: file, line, reason
        return str(report.longrepr[2]).removeprefix("Skipped: ")[:200]
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash else str(report.longrepr)
    return " ".join(text.split())[:200]
