"""docs/foreign-files.md: the tests that its tables name exist, and have as many cases as they say."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "foreign-files.md"


def rows() -> list[tuple[list[str], int]]:
    """Return (tests as `FILE::FUNCTION`, number of cases) of each row of the tables."""
    tables = re.search(r"\n## Files\n.*?\n## ", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert tables, "no section Files"
    cells = [line.strip("|").split("|") for line in tables[0].splitlines() if line[:1] == "|"]
    counted = [(tests, number.strip()) for _, _, tests, number in cells]
    named = re.compile(r"`(\w+(?:/\w+)*\.py::\w+)`")
    return [(named.findall(tests), int(number)) for tests, number in counted if number.isdecimal()]


def test_the_table_counts_the_cases_of_its_tests(request: pytest.FixtureRequest) -> None:
    names = [item.nodeid.removeprefix("tests/") for item in request.session.items]
    cases = Counter(name.split("[")[0] for name in names)
    named = {test for tests, _ in rows() for test in tests}
    for test in named:
        file, function = test.split("::")
        assert f"def {function}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), test
    if not named <= cases.keys():
        pytest.skip("counts cases where all tests are collected: in the whole suite")
    assert rows() == [(tests, sum(cases[test] for test in tests)) for tests, _ in rows()]
