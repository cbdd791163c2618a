"""Tools of development: tests of a change, seconds of tests, equal losses of two commits, and points that tests arm."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from megatron_ddrp.data import points
from megatron_ddrp.data.points import POINTS, VARIABLE, point
from tests.changed import CHANGE_ALL, OF_ALL_SOURCES, affected_tests
from tests.endurance.exact_losses import RUNS, first_difference
from tests.endurance.lines import ROOT
from tests.integration.launch import Hold
from tests.refusals import wrong_arguments
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


def test_tests_that_import_or_name_a_changed_file_are_found_and_some_or_all_always_run() -> None:
    for changed, names in {
        "package/a.py": "a encodings names",
        "package/b.py": "a b encodings fixture names",
        "package/c.py": "encodings fixture",
        "package/__init__.py": "encodings",
        "docs/page.md": "names",
        "docs/other.md": "names",
        "examples/run.sh": "names",
        "tests/unit/test_t5.py": "t5",
        "megatron_ddrp/model/positions/biases.py": "encodings t5",
        "megatron_ddrp/templates/card.md.jinja": "page",
        "LICENSE": "",
    }.items():
        assert affected_tests([changed], SOURCES) == [f"tests/unit/test_{name}.py" for name in names.split()], changed
    files = [f"tests/unit/{name}.py" for name in OF_ALL_SOURCES]
    assert all((ROOT / file).is_file() for file in files)
    assert affected_tests([], SOURCES | dict.fromkeys(files, "")) == sorted(files)
    assert [affected_tests([file], SOURCES) for file in CHANGE_ALL] == [["tests"]] * len(CHANGE_ALL)


def work(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_seconds_of_children_count_whether_they_run_or_have_ended() -> None:
    before = cpu_seconds()
    first, second = (get_context("fork").Process(target=work, args=(0.2,)) for _ in range(2))
    first.start()
    second.start()
    first.join()
    assert cpu_seconds() - before + 0.2 * second.is_alive() > 0.35
    second.join()
    assert 0.35 < cpu_seconds() - before < 5


def test_the_table_tells_waits_from_work(tmp_path: Path) -> None:
    own = "import time\nend = time.process_time() + 0.4\nwhile time.process_time() < end: pass  # of the collection\n"
    (tmp_path / "test_one.py").write_text(f"{own}def test_waits():\n    time.sleep(0.4)\n", encoding="utf-8")
    words = [sys.executable, "-m", "pytest", "-q", "-ptests.times", "-pno:cacheprovider", "--rootdir=.", "test_one.py"]
    variables = os.environ | {"PYTHONPATH": str(ROOT), "TEST_TIMES": str(tmp_path / "times.csv")}
    done = subprocess.run(words, cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert done.returncode == 0 and "1 files, 1 tests" in done.stdout, done.stdout + done.stderr
    header, file, test = (tmp_path / "times.csv").read_text(encoding="utf-8").splitlines()
    assert header == "file or test,cpu,wait"
    for line, name in ((file, "test_one.py"), (test, "test_one.py::test_waits")):
        found, cpu, wait = line.split(",")
        assert found == name and float(wait) > 0.2 > float(cpu)


def write_run(folder: Path, losses: list[float], weight: float = 1.0, **more: Any) -> Path:
    (folder / "iter_0000005").mkdir(parents=True)
    rows = [{"iteration": step, "loss": loss, "step_time": id(folder), **more} for step, loss in enumerate(losses, 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    save_file({"w": np.array([weight])}, folder / "iter_0000005" / "weights-00-of-01.safetensors")
    return folder


LOSSES = [1 / step for step in range(1, 61)]
NEXT = math.nextafter(LOSSES[40], 2.0)
DIFFERENCES = [
    (LOSSES, {}, "None"),
    (LOSSES, {"new_metric": 3.0}, "None"),
    ([*LOSSES[:40], NEXT, *LOSSES[41:]], {}, f"step 41: loss was {LOSSES[40].hex()}, is {NEXT.hex()}"),
    (LOSSES[:59], {}, "step 60: iteration was 60, is missing"),
    (LOSSES, {"weight": math.nextafter(1.0, 2.0)}, "weights-00-of-01.safetensors: w was "),
]


def test_the_first_difference_of_27_runs_is_named_and_a_run_that_failed_is_one(tmp_path: Path) -> None:
    base = write_run(tmp_path / "base" / "run0", LOSSES)
    for number, (losses, changes, expected) in enumerate(DIFFERENCES):
        found = first_difference(base, write_run(tmp_path / "head" / f"run{number}", losses, **changes))
        assert str(found).startswith(expected)
    (tmp_path / "head" / "failed.stderr").write_text("Traceback\nValueError: x\n", encoding="utf-8")
    assert first_difference(base, tmp_path / "head" / "failed") == "head failed: ValueError: x"
    assert len({run.name for run in RUNS}) == 27 and {run.ranks for run in RUNS} == {1, 2}


def passing(monkeypatch, armed, *passages):
    monkeypatch.setenv(VARIABLE, armed)
    child = os.fork()
    if not child:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # a test before this one may have asked a run to stop by it
        for name, number in passages:
            point(name, number)
        os._exit(7)
    return child


def code_of(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_point_acts_at_its_own_name_and_number_and_holds_a_process_until_the_pipe_is_released(monkeypatch, tmp_path):
    kill = "job.leased=SIGUSR1,step.logged=SIGKILL@12"
    assert code_of(passing(monkeypatch, kill, ("step.logged", 1), ("job.appended", 12))) == 7
    assert code_of(passing(monkeypatch, kill, ("step.logged", 12))) == -signal.SIGKILL
    assert code_of(passing(monkeypatch, kill, ("job.leased", 5))) == -signal.SIGUSR1
    assert code_of(passing(monkeypatch, "", ("step.logged", 12))) == 7
    hold = Hold(tmp_path / "pipe")
    child = passing(monkeypatch, f"step.logged={hold.action}", ("step.logged", 1))
    assert hold.next_process() == child and os.waitpid(child, os.WNOHANG) == (0, 0)
    hold.release()
    assert code_of(child) == 7


def test_every_point_is_in_the_code_once_some_test_arms_it_and_a_word_without_one_is_refused(monkeypatch):
    says = "expected POINT=SIGNAL or POINT=hold:PIPE"
    for word in ("step=SIGKILL", "step.logged", "step.logged=kill", "step.logged=hold:", "step.logged=SIGKILL@"):
        monkeypatch.setenv(VARIABLE, f"job.leased=SIGTERM@3,{word}")
        refusal = wrong_arguments(f"{VARIABLE}: '{word}', {says}", point, "checkpoint.latest", 1)
        assert all(name in str(refusal) for name in POINTS)
    code = [path.read_text() for path in (ROOT / "megatron_ddrp").rglob("*.py") if path != ROOT / points.__file__]
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__))
    assert sorted(re.findall(r'\bpoint\("(.*?)", ', "".join(code))) == sorted(POINTS)
    assert [name for name in POINTS if f'"{name}' not in tests] == []
