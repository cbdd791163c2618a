"""What `make check` runs, and what `make test-times` measures."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from multiprocessing import get_context
from pathlib import Path

import pytest

from tests.changed import CHANGE_ALL, OF_ALL_SOURCES, ROOT, affected_tests
from tests.times import cpu_seconds

SOURCES = {
    "package/a.py": "import package.b",
    "package/b.py": "",
    "package/c.py": "from package import b",
    "package/__init__.py": "",
    "megatron_ddrp/page.py": "render('card.md.jinja')",
    "tests/unit/test_page.py": "import megatron_ddrp.page",
    "tests/conftest.py": "import package.c\ndef corpus(): pass",
    "tests/unit/test_a.py": "def test():\n    from package.a import x",
    "tests/unit/test_b.py": "from package import b",
    "tests/unit/test_fixture.py": "def test(corpus): pass",
    "tests/unit/test_names.py": "run('package.a'), ROOT / 'docs' / 'page.md', 'examples/run.sh'",
    "tests/unit/test_t5.py": "encoding_class('t5')",
    "tests/unit/test_encodings.py": "from package import ENCODINGS",
}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ("package/a.py", {"a", "names", "encodings"}),
        ("package/b.py", {"a", "b", "names", "fixture", "encodings"}),
        ("package/c.py", {"fixture", "encodings"}),
        ("package/__init__.py", {"encodings"}),
        ("docs/page.md", {"names"}),
        ("docs/other.md", {"names"}),
        ("examples/run.sh", {"names"}),
        ("tests/unit/test_t5.py", {"t5"}),
        ("megatron_ddrp/model/positions/biases.py", {"t5", "encodings"}),
        ("megatron_ddrp/templates/card.md.jinja", {"page"}),
        ("LICENSE", set()),
    ],
)
def test_tests_that_import_or_name_a_changed_file_are_found(changed: str, expected: set[str]) -> None:
    assert affected_tests([changed], SOURCES) == sorted(f"tests/unit/test_{name}.py" for name in expected)


def test_all_tests_run_after_a_change_of_what_all_share() -> None:
    assert [affected_tests([file], SOURCES) for file in CHANGE_ALL] == [["tests"]] * len(CHANGE_ALL)


def test_tests_of_all_sources_always_run() -> None:
    files = [f"tests/unit/{name}.py" for name in OF_ALL_SOURCES]
    assert all((ROOT / file).is_file() for file in files)
    assert affected_tests([], SOURCES | dict.fromkeys(files, "")) == sorted(files)


def work(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_seconds_of_children_count_whether_they_run_or_have_ended() -> None:
    before = cpu_seconds()
    children = [get_context("fork").Process(target=work, args=(0.2,)) for _ in range(2)]
    for child in children:
        child.start()
    children[0].join()
    assert cpu_seconds() - before + 0.2 * children[1].is_alive() > 0.35
    children[1].join()
    assert 0.35 < cpu_seconds() - before < 5


def test_the_table_tells_waits_from_work(tmp_path: Path) -> None:
    own = "import time\nwhile time.process_time() < 2: pass  # collection does not count\n"
    (tmp_path / "test_one.py").write_text(f"{own}def test_waits():\n    time.sleep(0.4)\n", encoding="utf-8")
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.times",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        ".",
        "test_one.py",
    ]
    variables = os.environ | {"PYTHONPATH": str(ROOT), "TEST_TIMES": str(tmp_path / "times.csv")}
    done = subprocess.run(words, cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert done.returncode == 0 and "1 files, 1 tests" in done.stdout, done.stdout + done.stderr
    header, file, test = (tmp_path / "times.csv").read_text(encoding="utf-8").splitlines()
    assert header == "file or test,cpu,wait"
    for line, name in ((file, "test_one.py"), (test, "test_one.py::test_waits")):
        found, cpu, wait = line.split(",")
        assert found == name and float(wait) > 0.2 > float(cpu)
