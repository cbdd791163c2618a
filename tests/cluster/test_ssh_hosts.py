"""`deepspeed --hostfile` over real ssh and pdsh: its start, signals and end, and its words if a host is amiss.

DeepSpeed's command and pdsh are real processes. Its launchers and the ranks on the hosts are forked, except in the
first test, where every process is a Python of its own.
"""

import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cluster.hosts import REAL_PATH, SECONDS, SHIM, Host, missing, wait_for
from tests.cluster.runs import (
    PORTS,
    STEPS,
    Launched,
    Pair,
    Seen,
    assert_equal,
    exit_code,
    hold,
    let_go,
    rows_of,
    wait_for_step,
    words_of,
)
from tests.conftest import TinyCorpus
from tests.integration.conftest import Flags
from tests.integration.launch import ROOT, SCRIPT

DEEPSPEED, PDSH, FOREVER = "launcher.runner", "pdsh -S", "examples/run_forever.sh"
"""Words by which the processes of a login are found."""


@pytest.fixture(autouse=True)
def programs() -> None:
    if reason := missing("pdsh"):
        pytest.skip(reason)


def hostfile(folder: Path, names: Sequence[str] = ("node1", "node2")) -> Path:
    """Write a host file with one rank per host."""
    path = folder / "hosts"
    path.write_text("".join(f"{name} slots=1\n" for name in names), encoding="utf-8")
    return path


def deepspeed(folder: Path, words: Sequence[str], *options: str) -> list[str]:
    """Return the documented command on two hosts; each start has a port of its own."""
    launcher = f"deepspeed --quiet --hostfile {hostfile(folder)} --master_port {next(PORTS)}".split()
    return [*launcher, *options, str(SCRIPT), *words]


def test_the_recipe_for_two_machines_in_real_processes(
    pair: Pair, flags: Flags, tiny_corpus: TinyCorpus, whole: Path, folder: Path, seen: Seen
) -> None:
    save = folder / "recipe"
    words = [*words_of(flags, save), "--position-encoding", "ddrp", "--objective", "mlm", "--no-fp16"]
    variables = {"HOSTFILE": str(hostfile(folder)), "SAVE": str(save)}
    variables |= {"DATA": str(tiny_corpus.prefix), "VOCAB": str(tiny_corpus.vocab_file), "DS_ENV_FILE": os.devnull}
    recipe = ROOT / "examples" / "pretrain_ddrp_base_16gpu.sh"
    run = Launched(pair[0], ["bash", recipe, *words], folder, PATH=REAL_PATH, **variables)
    assert run.end(3 * SECONDS) == 0, run.text()
    assert exit_code(save) == "0" and len(rows_of(save)) == STEPS
    assert "layout: 2 ranks on cpu" in run.text()
    seen("pretrain_ddrp_base_16gpu.sh", "nothing", "0, every step")


def test_seven_ends_of_a_launcher_in_one_run(
    pair: Pair, hosts: dict[str, Host], flags: Flags, whole: Path, folder: Path, seen: Seen
) -> None:
    """The command runs on a login host. Each start resumes what the last one left, until a last one ends."""
    login, save = hosts["login"], folder / "ends"
    words = words_of(flags, save)

    def reach(run: Launched | None = None) -> Launched:
        """Hold the run, by default one that begins, after a later step."""
        step = len(rows_of(save)) + 4
        hold(save, step)
        run = run or Launched(login, deepspeed(folder, words), folder)
        wait_for_step(save, step, run.text)
        return run

    def saved_and_ended(run: Launched) -> None:
        let_go(save)
        wait_for(lambda: not any(host.ranks(save) for host in pair), run.text)
        assert exit_code(save) == "75", run.text()
        assert len(rows_of(save)) < STEPS

    def note(fault: str, comes: str) -> None:
        seen("deepspeed --hostfile", fault, comes)

    def goes_on_until_asked(run: Launched, host: Host, number: signal.Signals, fault: str, came: str = "") -> None:
        """Let the run reach a later step; then a signal to one rank lets all of them save and end."""
        reach(run)
        host.signal_rank(number, save)
        saved_and_ended(run)
        note(fault, f"{came}the run goes on; {number.name} to a rank: saved, DIR/exit_code 75")

    for fault, number, processes in (
        ("Ctrl-C", signal.SIGINT, (DEEPSPEED, PDSH)),  # a terminal signals both
        ("SIGTERM to deepspeed", signal.SIGTERM, (DEEPSPEED,)),
    ):
        run = reach()
        for process in processes:
            login.signal(number, process)
        assert run.end() == 1, run.text()
        saved_and_ended(run)
        note(fault, "1; the ranks save, DIR/exit_code 75; the same command resumes")

    run = reach()
    os.killpg(run.process.pid, signal.SIGHUP)
    wait_for(lambda: not login.processes(PDSH), run.text)
    goes_on_until_asked(run, pair[1], signal.SIGUSR1, "its terminal is closed")

    run = reach()
    login.power_off()
    goes_on_until_asked(run, pair[0], signal.SIGTERM, "power cut of the login host")
    login.power_on()

    run = reach()
    login.signal(signal.SIGKILL, PDSH)
    assert run.end() == 0
    goes_on_until_asked(run, pair[0], signal.SIGTERM, "pdsh is killed", "DeepSpeed's 0, and ")

    run = reach()
    pair[1].signal(signal.SIGKILL, "sshd")
    goes_on_until_asked(run, pair[0], signal.SIGTERM, "every sshd of host 2 is killed")
    assert run.end() in (1, 255), run.text()
    assert pair[1].run("/usr/sbin/sshd -f /mnt/etc/sshd_config").returncode == 0

    run = reach()
    pair[1].signal_rank(signal.SIGKILL, save)
    let_go(save)
    assert run.end() not in (0, 75)
    assert run.text().count("rank 0 lost another rank: ") == 1 and "Traceback" not in run.text()
    note("SIGKILL of a rank on host 2", "not 0, in one line")

    run = Launched(login, deepspeed(folder, words), folder)
    assert run.end() == 0 and exit_code(save) == "0", run.text()
    assert_equal(save, whole)
    note("all of these in one run, then nothing", "0, bit for bit")


def test_run_forever_survives_a_killed_pdsh_and_a_killed_rank(
    pair: Pair, flags: Flags, whole: Path, folder: Path, seen: Seen
) -> None:
    """The ranks outlive their pdsh, so the next start, with the same port, is refused until they have ended."""
    first, second = pair
    save = folder / "forever"
    command = deepspeed(folder, words_of(flags, save, distributed_timeout_minutes=0.5))
    hold(save, 6)
    run = Launched(first, ["bash", FOREVER, *command], folder, BACKOFF="1", GRACE="1", MAX_FAILURES="50")
    wait_for_step(save, 6, run.text)
    first.signal(signal.SIGKILL, PDSH)
    wait_for(lambda: "Address already in use" in run.text(), run.text)
    second.signal_rank(signal.SIGKILL, save)
    let_go(save)
    assert run.end() == 0, run.text()
    assert run.text().count("run_forever.sh: ended with code ") >= 2, run.text()
    assert_equal(save, whole)
    seen(
        "run_forever.sh deepspeed --hostfile",
        "pdsh is killed, then a rank",
        "a second start is refused while the ranks live on, a later one resumes; 0, bit for bit",
    )


def test_run_forever_passes_sigterm_on(pair: Pair, flags: Flags, folder: Path, seen: Seen) -> None:
    save = folder / "asked"
    command = deepspeed(folder, words_of(flags, save, save_interval=100))
    hold(save, 6)
    run = Launched(pair[0], ["bash", FOREVER, *command], folder)
    wait_for_step(save, 6, run.text)
    pair[0].signal(signal.SIGTERM, f"bash {FOREVER}")
    let_go(save)
    assert run.end() == 75, run.text()
    wait_for(lambda: not any(host.ranks(save) for host in pair), run.text)
    assert exit_code(save) == "75" and (save / "latest").exists(), run.text()
    seen("run_forever.sh deepspeed --hostfile", "SIGTERM to the script", "75, saved")


def test_torchrun_on_each_host(pair: Pair, flags: Flags, folder: Path, seen: Seen) -> None:
    save, port = folder / "torchrun", str(next(PORTS))
    common = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", pair[0].name, "--master-port", port]
    words = [str(SCRIPT), *words_of(flags, save, 6)]
    runs = [Launched(host, ["torchrun", "--node-rank", n, *common, *words], folder) for n, host in enumerate(pair)]
    assert [run.end() for run in runs] == [0, 0], "\n".join(run.text() for run in runs)
    assert len(rows_of(save)) == 6
    seen("torchrun on each host", "nothing", "0")


def test_open_mpi_needs_an_address(pair: Pair, flags: Flags, folder: Path, seen: Seen) -> None:
    if reason := missing("mpirun"):
        pytest.skip(reason)
    save, address = folder / "mpi", folder / "deepspeed_env"
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = deepspeed(folder, words_of(flags, save, 6), "--launcher", "openmpi")
    run = Launched(pair[0], command, folder, **as_root)
    assert run.end() == 1
    assert re.search("error: mpirun started 2 processes.*MASTER_ADDR", run.text()), run.text()
    address.write_text(f"MASTER_ADDR={pair[0].name}\nMASTER_PORT={next(PORTS)}\n", encoding="utf-8")
    run = Launched(pair[0], command, folder, **as_root, DS_ENV_FILE=str(address))
    assert run.end() == 0 and len(rows_of(save)) == 6, run.text()
    seen("deepspeed --launcher openmpi", "without MASTER_ADDR; with it", "refused in one line, which names it; 0")


def assert_rank_1_is_missed(host: Host, command: Sequence[str], folder: Path) -> None:
    """Check that a run ends because rank 1 did not come, and says so."""
    run = Launched(host, command, folder)
    assert run.end(2 * SECONDS) != 0
    assert re.search("error: rank 1 did not come within 0.2", run.text()), run.text()
    assert "free --master_port" not in run.text() and "frame #" not in run.text()


def test_a_host_without_the_environment(pair: Pair, flags: Flags, folder: Path, seen: Seen) -> None:
    nothing = folder / "nothing"
    nothing.mkdir()
    command = deepspeed(folder, words_of(flags, folder / "absent", distributed_timeout_minutes=0.2))
    with pair[1].mounted(nothing, SHIM):
        assert_rank_1_is_missed(pair[0], command, folder)
    seen("deepspeed --hostfile", "host 2 lacks the environment", "one line names rank 1, after the timeout")


def test_a_host_whose_name_is_not_known(pair: Pair, flags: Flags, folder: Path, seen: Seen) -> None:
    command = deepspeed(folder, words_of(flags, folder / "unknown", distributed_timeout_minutes=0.2))
    hostfile(folder, ("node1", "node77"))
    assert_rank_1_is_missed(pair[0], command, folder)
    seen("deepspeed --hostfile", "host 2 is a name that is not known", "one line names rank 1, after the timeout")
