"""One sweep, many processes: what kills leave behind, and that no run is done twice."""

import json
import os
import signal
import time

from megatron_ddrp.data.points import VARIABLE
from megatron_ddrp.tasks.finetune.runs import RunStore, TuningRun
from megatron_ddrp.tasks.jobs import drain
from tests.integration.launch import fork_server
from tests.unit.tasks.glue.conftest import finished

RUNS = [
    TuningRun(task, 16, lr, 4, seed, 128, encoder="e", data="d", micro_batch_size=8)
    for task in ("RTE", "CoLA")
    for lr in (1e-5, 3e-5)
    for seed in range(1, 11)
]
LONG = 400
"""Seconds after which something hangs."""


def worker(folder, seconds, barrier=None, begun=None, points=""):
    """Do RUNS, from when all workers are there; every start of a run leaves a line in its own file.

    With `begun` tell it of every start, and without `seconds` never end a run. Arm the `points`.
    """
    if points:
        os.environ[VARIABLE] = points
    if barrier:
        barrier.wait(LONG)

    def perform(run):
        with open(folder / f"begun-{run.name}", "a") as stream:
            stream.write(f"{os.getpid()}\n")
        if begun:
            begun.put(run.name)
        if seconds is None:
            signal.pause()
        time.sleep(seconds)
        return finished(run, run.seed / 97, by=os.getpid())

    drain(RUNS, RunStore(folder / "runs.jsonl"), perform)


def start(folder, count, seconds=0.004, barrier=None, begun=None, points=""):
    arguments = (folder, seconds, barrier, begun, points)
    processes = [fork_server().Process(target=worker, args=arguments) for _ in range(count)]
    for process in processes:
        process.start()
    return processes


def look(folder, answer):
    """Tell whether the first run is free."""
    answer.value = RunStore(folder / "runs.jsonl").lease(RUNS[0].name) is not None


def rows(folder):
    lines = (folder / "runs.jsonl").read_text().splitlines()
    return sorted(
        json.dumps({k: v for k, v in json.loads(line).items() if k not in ("by", "crc32")}, sort_keys=True)
        for line in lines
    )


def test_a_sweep_with_killed_workers_ends_as_one_undisturbed(tmp_path):
    """One dies with a lease and one after its row; of three others, one is left and ends the sweep."""
    calm, killed = tmp_path / "calm", tmp_path / "killed"
    for folder in (calm, killed):
        folder.mkdir()
    worker(calm, 0)
    for points, count, ended in (
        ("job.leased=SIGKILL@3", 1, []),
        ("job.appended=SIGKILL@7", 1, []),
        ("job.appended=SIGKILL@15,job.appended=SIGKILL@25", 3, [0]),
    ):
        processes = start(killed, count, points=points)
        for process in processes:
            process.join(LONG)
        killed_ones = [-signal.SIGKILL] * max(1, count - 1)
        assert sorted(process.exitcode for process in processes) == killed_ones + ended, points
    assert rows(killed) == rows(calm)
    assert len(rows(killed)) == len(RUNS) == len({run.name for run in RUNS})


def test_undisturbed_workers_begin_every_run_once_and_share_them(tmp_path):
    barrier = fork_server().Barrier(4)
    for process in start(tmp_path, 4, barrier=barrier):
        process.join(LONG)
    begun = {path.name: path.read_text().split() for path in tmp_path.glob("begun-*")}
    assert set(begun) == {f"begun-{run.name}" for run in RUNS}
    assert all(len(starts) == 1 for starts in begun.values())
    assert len({starts[0] for starts in begun.values()}) > 1


def test_the_run_of_a_dead_worker_is_taken_over(tmp_path):
    """A worker dies within a run while another waits for it."""
    begun = fork_server().Queue()
    (stuck,) = start(tmp_path, 1, seconds=None, begun=begun)
    first = begun.get(timeout=LONG)
    (other,) = start(tmp_path, 1, seconds=0, begun=begun)
    rest = [begun.get(timeout=LONG) for _ in range(len(RUNS) - 1)]
    assert sorted([first, *rest]) == sorted(run.name for run in RUNS)
    assert other.is_alive(), "the leased run is not done yet: somebody must wait for it"
    os.kill(stuck.pid, signal.SIGKILL)
    stuck.join()
    other.join(LONG)
    assert other.exitcode == 0
    assert len(rows(tmp_path)) == len(RUNS)
    assert (tmp_path / f"begun-{first}").read_text().split() == [str(stuck.pid), str(other.pid)]


def test_a_lease_is_seen_by_others_until_it_is_released(tmp_path):
    lease = RunStore(tmp_path / "runs.jsonl").lease(RUNS[0].name)
    assert lease

    def free():
        answer = fork_server().Value("b", 2)
        process = fork_server().Process(target=look, args=(tmp_path, answer))
        process.start()
        process.join(LONG)
        return answer.value

    assert free() == 0
    lease.close()
    assert free() == 1


def test_a_finished_run_is_appended_once(tmp_path):
    first, second = RunStore(tmp_path / "runs.jsonl"), RunStore(tmp_path / "runs.jsonl")
    for store in (first, second, first):
        store.append(finished(RUNS[0]))
    assert len(rows(tmp_path)) == 1
    second.append(finished(RUNS[1]))
    assert RUNS[1].name not in first
    first.refresh()
    assert RUNS[1].name in first
