"""Kills and power cuts at every moment of an update; and the checker itself, which must see a sync that is missing."""

import os
import re
import subprocess
import sys

import pytest

from tests.crash import recording
from tests.crash.outputs import OUTPUTS
from tests.crash.runs import RUNS

pytestmark = pytest.mark.skipif(recording.missing() is not None, reason=str(recording.missing()))

QUICK = [protocol.name for protocol in (*RUNS, *OUTPUTS) if protocol.is_quick]
REPLACE = """
import os, sys
from pathlib import Path
from tests.crash import recording
from tests.crash.states import MODELS, states_of

root, log = Path(sys.argv[1]), Path(sys.argv[2])
(root / "file").write_bytes(b"old")
before = recording.tree_of(root)
recording.start(root, log)
with open(root / "new", "wb") as file:
    file.write(b"longer")
    file.flush()
    if sys.argv[3] == "synced":
        os.fsync(file.fileno())
os.replace(root / "new", root / "file")
recording.mark("done")
recording.stop()
recorded = recording.Recording(root, before, log, recording.tree_of(root))
for model in MODELS:
    print(*sorted({(state.files["file"] or b"").decode() or "-" for state in states_of(recorded, model)}), sep=",")
"""


@pytest.fixture(scope="module")
def printed():
    """Return what one process prints about all quick protocols."""
    command = [sys.executable, "-m", "tests.crash", "states", "--quick"]
    ended = subprocess.run(command, capture_output=True, text=True)
    return ended.stdout + ended.stderr


@pytest.mark.parametrize("name", QUICK)
def test_each_state_is_old_or_new_and_the_same_command_ends_well(printed, name):
    assert re.search(rf"^{name}: \d+ operations, \d+ states -$", printed, re.M), printed
    kill, journal = re.findall(rf"^\| {name} \| \d+ \| (\d+), 0 \| (\d+), 0 \|$", printed, re.M)[0]
    assert int(kill) > 3 and int(journal) > 3


@pytest.mark.parametrize(
    ("synced", "kill", "power_cut", "worst"),
    [("synced", "longer,old", "longer,old", "longer,old"), ("", "longer,old", "-,lon,longer,old", None)],
)
def test_the_checker_sees_a_file_that_was_renamed_before_its_bytes_were_synced(
    tmp_path, synced, kill, power_cut, worst
):
    (tmp_path / "root").mkdir()
    command = [sys.executable, "-c", REPLACE, str(tmp_path / "root"), str(tmp_path / "log"), synced]
    ended = subprocess.run(
        command, env={**os.environ, **recording.environment(tmp_path)}, capture_output=True, text=True, check=True
    )
    lines = ended.stdout.split("\n")
    assert lines[:2] == [kill, power_cut]
    assert lines[2] == worst or worst is None and "\0" * 6 in lines[2].split(",")
