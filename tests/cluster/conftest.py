"""Hosts, fork server and the table of the cluster tier. `make cluster` runs it; elsewhere each test is skipped."""

import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.pages import write_table
from megatron_ddrp.pages.markdown import Table
from tests.cluster.forks import SOCKET, write_shim
from tests.cluster.hosts import SYSTEM_PATH, WORLD, Host, login_environment, make_hosts, wait_for
from tests.cluster.runs import Pair, Seen, end, start, words_of
from tests.integration import conftest as integration

NAMES = ("node1", "node2", "login", "control", *(f"slurm{number}" for number in range(1, 8)))
ROWS = pytest.StashKey[list[Sequence[str]]]()
PROGRAMS = {"OpenSSH": "ssh -V", "pdsh": "pdsh -V", "Slurm": "slurmctld -V", "Open MPI": "mpirun --version"}

flags = integration.flags  # a fixture of this tier too


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write", action="store_true", help="replace the table of docs/launching.md by what was run here")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[ROWS] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.cluster)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Write the table if all tests passed and none was skipped."""
    if exitstatus or not session.config.getoption("--write"):
        return
    versions = [f"{name} {importlib.metadata.version(name.lower())}" for name in ("torch", "DeepSpeed")]
    versions += [f"{name} {version_of(command)}" for name, command in PROGRAMS.items()]
    machine = f"Linux {os.uname().release.split('-')[0]}, Python {sys.version.split()[0]}"
    table = Table(("started by", "what happens", "what comes"), session.config.stash[ROWS], wordy=(1, 2))
    note = "Bit for bit: rows, weights and moments equal those of an undisturbed run."
    write_table("launching.md", "cluster", f"{table}\n\n{machine}, {', '.join(versions)}. {note}")


def version_of(command: str) -> str:
    """Return the first version number that a program prints."""
    done = subprocess.run(command.split(), capture_output=True, text=True, env=os.environ | {"PATH": SYSTEM_PATH})
    return re.findall(r"\d+\.[\w.]*\w", done.stdout + done.stderr)[0]


@pytest.fixture(scope="session")
def seen(request: pytest.FixtureRequest) -> Seen:
    """`seen(started by, what happens, what comes)`: a row of the table."""
    return lambda *row: request.config.stash[ROWS].append(row)


@pytest.fixture(scope="session")
def hosts() -> dict[str, Host]:
    """All hosts of the tier, switched on, by name; and the server of forks. They end with this process."""
    if not (WORLD / "inside").exists():
        pytest.skip("runs in namespaces of its own: make cluster")
    write_shim()
    console = WORLD / "forks"
    with console.open("wb") as stream:
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.forks"], stdout=stream, stderr=stream, env=login_environment()
        )
    made = make_hosts(NAMES)
    for host in [host.start() for host in made.values()]:
        host.wait_until_up()
    wait_for(lambda: SOCKET.exists() or server.poll(), console.read_text)
    return made


@pytest.fixture(scope="session")
def pair(hosts: dict[str, Host]) -> Pair:
    """The two hosts of most runs."""
    return hosts["node1"], hosts["node2"]


@pytest.fixture(scope="session")
def whole(pair: Pair, flags: integration.Flags) -> Path:
    """The folder of a run that nobody disturbed."""
    save = WORLD / "runs" / "whole"
    save.parent.mkdir(exist_ok=True)
    assert end(start(pair, words_of(flags, save), save.parent)) == [0, 0]
    return save


@pytest.fixture
def folder(request: pytest.FixtureRequest) -> Path:
    """A folder for a test's runs, which all hosts see."""
    made = WORLD / "runs" / re.sub(r"\W", "-", request.node.name)
    made.mkdir(parents=True)
    return made
