"""One sweep as a job array: several commands on one output folder, each run done once, one table."""

import json
import os
import subprocess
import sys
from pathlib import Path

from megatron_ddrp.tasks.finetune.runs import RunStore
from megatron_ddrp.tasks.glue.command import main
from megatron_ddrp.tasks.jobs.workers import drain
from tests.unit.glue.conftest import finished
from tests.unit.glue.test_main import arguments, rows
from tests.unit.glue.test_queue import RUNS

ROOT = Path(__file__).parents[3]

ARRAY = """
import os, sys
from pathlib import Path
from megatron_ddrp.tasks.finetune.sweep import Sweep
from megatron_ddrp.tasks.glue.command import main

folder, words, perform = Path(sys.argv[1]), sys.argv[2:], Sweep.perform

def counted(self, run):
    with open(folder / f"begun-{run.name}", "a") as stream:
        stream.write(f"{os.getpid()}\\n")
    return perform(self, run)

Sweep.perform = counted
tasks = []
for number in range(3):  # torch is imported once, and has not computed anything yet
    sys.stdout.flush()
    if (task := os.fork()) == 0:
        sys.stdout = open(folder / f"task-{number}.log", "w")
        os.environ["SLURM_ARRAY_TASK_ID"] = str(number)
        code = main(words)
        sys.stdout.flush()
        os._exit(code)
    tasks.append(task)
sys.exit(any(os.waitpid(task, 0)[1] for task in tasks))
"""


def test_the_tasks_of_an_array_share_the_runs_and_one_of_them_writes_the_table(glue_dir, bert_folder, tmp_path):
    several = ("--seeds", "4", "--epochs", "1", "--no-wait")
    main(arguments(glue_dir, bert_folder, tmp_path / "alone", *several))
    words = arguments(glue_dir, bert_folder, tmp_path / "array", *several)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", ARRAY, str(tmp_path), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    alone, array = (sorted(map(result, rows(tmp_path / out))) for out in ("alone", "array"))
    assert array == alone and len(array) == 4
    begun = [path.read_text().split() for path in tmp_path.glob("begun-*")]
    assert len(begun) == 4 and all(len(starts) == 1 for starts in begun)
    for name in ("table.md", "table.json"):
        assert (tmp_path / "array" / name).read_text() == (tmp_path / "alone" / name).read_text()
    logs = [(tmp_path / f"task-{number}.log").read_text() for number in range(3)]
    wrote = ["written to" in log for log in logs]
    left = ["being done by other commands" in log and "the last one writes the tables" in log for log in logs]
    assert any(wrote) and all(one != other for one, other in zip(wrote, left, strict=True))


def result(row):
    """Return a line of runs.jsonl without what differs from machine to machine."""
    return json.dumps({key: value for key, value in row.items() if key not in ("seconds", "crc32")}, sort_keys=True)


def test_a_command_that_does_not_wait_leaves_what_others_hold(tmp_path):
    store, held = RunStore(tmp_path / "runs.jsonl"), RUNS[3]
    lease = store.lease(held.name)
    assert lease
    drain(RUNS, store, finished, wait=False)
    assert store.missing(RUNS) == [held] and len(store.rows) == len(RUNS) - 1
    lease.close()
    drain(RUNS, store, finished, wait=False)
    assert store.missing(RUNS) == []
