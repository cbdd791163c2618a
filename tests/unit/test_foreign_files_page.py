"""docs/foreign-files.md: the tests that its table names exist, and have as many cases as it says."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "foreign-files.md"


def rows() -> list[tuple[list[str], int]]:
    """Return (tests as `FILE::FUNCTION`, number of cases) of each row of the table."""
    found = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        *_, tests, number = ["", *(cell.strip() for cell in line.strip("|").split("|"))]
        if line.startswith("|") and number.isdecimal():
            found.append((re.findall(r"`(\w+(?:/\w+)*\.py::\w+)`", tests), int(number)))
    return found


def test_the_table_counts_the_cases_of_its_tests(request: pytest.FixtureRequest) -> None:
    items = [item.nodeid.removeprefix("tests/") for item in request.session.items]
    cases = Counter(name.split("[")[0].replace("::Test", "::") for name in items)
    named = {test for tests, _ in rows() for test in tests}
    for test in named:
        file, function = test.split("::")
        assert f"def {function}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), test
    if not named <= cases.keys():
        pytest.skip("counts cases where all tests are collected: in the whole suite")
    assert rows() == [(tests, sum(cases[test] for test in tests)) for tests, _ in rows()]
