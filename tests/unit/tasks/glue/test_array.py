"""One sweep as a job array: several commands on one output folder, each run done once, one table."""

import json
import os
import sys

from megatron_ddrp.tasks.finetune.runs import RunStore
from megatron_ddrp.tasks.finetune.workers import Sweep
from megatron_ddrp.tasks.glue import main
from megatron_ddrp.tasks.jobs import drain
from tests.integration.launch import TIMEOUT, exit_codes_of, fork_server, redirect_streams
from tests.unit.tasks.glue.conftest import finished
from tests.unit.tasks.glue.test_main import arguments, rows
from tests.unit.tasks.glue.test_queue import RUNS


def array_task(number, folder, words):
    """Run a task of the array in this process. It leaves its log, and its process id for each run that it begins."""
    perform = Sweep.perform

    def counted(self, run):
        with (folder / f"begun-{run.name}").open("a") as stream:
            stream.write(f"{os.getpid()}\n")
        return perform(self, run)

    Sweep.perform = counted
    redirect_streams(folder / f"task-{number}.log", folder / f"task-{number}.errors")
    os.environ["SLURM_ARRAY_TASK_ID"] = str(number)
    sys.exit(main(words))


def test_the_tasks_of_an_array_share_the_runs_and_one_of_them_writes_the_table(glue_dir, bert_folder, tmp_path):
    several = ("--seeds", "4", "--epochs", "1", "--no-wait")
    main(arguments(glue_dir, bert_folder, tmp_path / "alone", *several))
    words = arguments(glue_dir, bert_folder, tmp_path / "array", *several)
    tasks = [fork_server().Process(target=array_task, args=(number, tmp_path, words)) for number in range(3)]
    assert exit_codes_of(tasks, TIMEOUT) == [0, 0, 0], [path.read_text() for path in tmp_path.glob("task-*.errors")]
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
