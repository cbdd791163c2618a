"""Sweeps of several processes and commands, kills, and files that change while a command runs."""

import json
import os
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch

from megatron_ddrp.data.points import VARIABLE
from megatron_ddrp.parallel.process_group import Ranks
from megatron_ddrp.tasks import glue
from megatron_ddrp.tasks.finetune import task_files, workers
from megatron_ddrp.tasks.finetune.command import main, parse_arguments
from megatron_ddrp.tasks.finetune.options import TaskFiles
from megatron_ddrp.tasks.finetune.runs import RunStore, TuningRun
from megatron_ddrp.tasks.finetune.workers import Sweep
from megatron_ddrp.tasks.jobs import WAIT, drain
from tests.integration.launch import TIMEOUT, exit_codes_of, fork_server
from tests.refusals import refused
from tests.unit.tasks.conftest import GLANCE, finished, rows, words

RUNS = [
    TuningRun(task, 16, lr, 4, seed, 128, encoder="e", data="d", micro_batch_size=8)
    for task in ("RTE", "CoLA")
    for lr in (1e-5, 3e-5)
    for seed in range(1, 11)
]


def worker(folder, points="", wait=True):
    """Do RUNS with these points armed, and note each that begins; end with 1 if some are left to others."""

    def perform(run):
        with (folder / "begun").open("a") as stream:
            stream.write(f"{run.name}\n")
        return finished(run, run.seed / 97, by=os.getpid())

    os.environ[VARIABLE] = points
    store = RunStore(folder / "runs.jsonl")
    drain(RUNS, store, perform, wait=wait)
    if store.missing(RUNS):
        sys.exit(1)


def test_a_finished_run_is_appended_once_and_a_command_that_does_not_wait_leaves_what_others_hold(tmp_path):
    first, second = RunStore(tmp_path / "runs.jsonl"), RunStore(tmp_path / "runs.jsonl")
    for store in (first, second, first):
        store.append(finished(RUNS[0]))
    assert len(lasting_rows(tmp_path)) == 1
    second.append(finished(RUNS[1]))
    assert RUNS[1].name not in first
    first.refresh()
    assert RUNS[1].name in first
    lease = first.lease(RUNS[3].name)
    assert lease
    drain(RUNS, first, finished, wait=False)
    assert first.missing(RUNS) == [RUNS[3]] and len(first.rows) == len(RUNS) - 1
    waits = threading.Thread(target=drain, args=(RUNS, second, finished))
    waits.start()
    waits.join(3 * WAIT)
    assert waits.is_alive(), "the leased run is not done yet: somebody must wait for it"
    lease.close()
    waits.join(TIMEOUT)
    first.refresh()
    assert first.missing(RUNS) == []


def lasting_rows(folder):
    """Return the rows of a folder, sorted, without what differs from machine to machine."""
    differs = ("by", "seconds", "crc32")
    found = ({k: v for k, v in row.items() if k not in differs} for row in rows(folder))
    return sorted(json.dumps(row, sort_keys=True) for row in found)


def test_a_sweep_with_killed_workers_ends_as_one_undisturbed(tmp_path, monkeypatch):
    """One dies with a lease; of three others two die after a row, and one is left and ends the sweep."""
    calm, killed = tmp_path / "calm", tmp_path / "killed"
    for folder in (calm, killed):
        folder.mkdir()
    monkeypatch.setenv(VARIABLE, "")
    worker(calm)
    for points, codes in (
        ("job.leased=SIGKILL@3", [-signal.SIGKILL]),
        ("job.appended=SIGKILL@15,job.appended=SIGKILL@25", [-signal.SIGKILL] * 2 + [0]),
    ):
        workers = [fork_server().Process(target=worker, args=(killed, points)) for _ in codes]
        assert sorted(exit_codes_of(workers, TIMEOUT)) == codes, points
    assert lasting_rows(killed) == lasting_rows(calm)
    assert len(lasting_rows(killed)) == len(RUNS) == len({run.name for run in RUNS})


def test_the_tasks_of_an_array_share_the_runs_and_the_last_one_finds_all_of_them_done(tmp_path):
    tasks = [fork_server().Process(target=worker, args=(tmp_path, "", False)) for _ in range(3)]
    assert {0} <= {*exit_codes_of(tasks, TIMEOUT)} <= {0, 1}
    assert sorted((tmp_path / "begun").read_text().split()) == sorted(run.name for run in RUNS)
    assert len(rows(tmp_path)) == len(RUNS)


CHANGED = "changed after this command had read it; finished runs are kept; run the same command again"
ROW = json.dumps({"text": "red dog runs", "label": "colour"}) + "\n"


@pytest.fixture
def files(topics):
    (topics / "test.jsonl").write_text(3 * ROW)
    return TaskFiles(topics / "train.jsonl", topics / "valid.jsonl", (str(topics / "test.jsonl"),))


@pytest.mark.parametrize("name", ["train", "valid", "test"])
def test_rows_are_refused_once_their_file_has_changed(files, name):
    """Here the size of the file stays."""
    path = files.train.with_name(f"{name}.jsonl")
    data = task_files.read_task(files)
    examples = data.train if name == "train" else data.dev[name]
    before = list(examples)
    assert list(examples) == before
    path.write_text(path.read_text().replace("red", "bed", 1))
    assert str(path) in str(refused(CHANGED, list, examples))


def test_a_change_within_a_pass_and_a_file_that_is_gone_are_noticed(files):
    data = task_files.read_task(files)
    passing = iter(data.train)
    next(passing)
    with files.train.open("a") as stream:
        stream.write(ROW)
    refused(CHANGED, list, passing)
    files.valid.unlink()
    refused(r"valid\.jsonl: No such file or directory; give a readable file", list, data.dev["valid"])


@pytest.fixture
def after_each_run(monkeypatch):
    """Let a function be called after each run of a sweep."""
    perform = Sweep.perform

    def after_each_run(change):
        def perform_and_change(self, run):
            row = perform(self, run)
            change()
            return row

        monkeypatch.setattr(Sweep, "perform", perform_and_change)

    return after_each_run


@pytest.mark.parametrize("checkpoint_folder", ["absolute"], indirect=True)
def test_a_sweep_stops_before_a_run_on_changed_rows(topics, bert_folder, checkpoint_folder, out, after_each_run):
    """The second encoder reads the rows again."""
    path = topics / "train.jsonl"
    after_each_run(lambda: path.write_text(path.read_text().replace("animal", "colour", 1)))
    command = words(topics, bert_folder, out, *GLANCE, "--load", str(bert_folder), str(checkpoint_folder))
    refused(rf"train\.jsonl: {CHANGED}", main, command)
    assert len(rows(out)) == 1
    after_each_run(lambda: None)
    main(command)
    found = rows(out)
    assert [row["data"] == found[0]["data"] for row in found] == [True, False, False]


@pytest.mark.parametrize("checkpoint_folder", ["absolute"], indirect=True)
def test_a_worker_that_read_another_encoder_or_other_files_stops(topics, checkpoint_folder, out):
    options = parse_arguments(words(topics, checkpoint_folder, out, *GLANCE))
    digests = {name: data.digest for name, data in options.suite.read().items()}
    said = f"--load {checkpoint_folder}: changed after this command had read it"
    refused(said, workers._work, 0, options, digests, {"the encoder that the command has read"})
    with (topics / "train.jsonl").open("a") as stream:
        stream.write(ROW)
    said = "topics: its files changed after this command had read them; finished runs"
    refused(said, workers._work, 0, options, digests, set())


@pytest.mark.parametrize("checkpoint_folder", ["absolute"], indirect=True)
@pytest.mark.parametrize("loads", ["{run}", "{run} {run}/iter_0000003"])
def test_a_run_that_saves_meanwhile_is_one_encoder_to_workers(topics, training_run, out, monkeypatch, capsys, loads):
    def in_this_process(work, given, count, jobs, store, tell, program):
        for number in range(count):
            work(number, *given)
        store.refresh()

    monkeypatch.setattr(workers, "share_out", in_this_process)
    loads = loads.format(run=training_run).split()
    several = ("--epochs", "1", "--seeds", "3", "--workers", "2")
    assert main(words(topics, loads[0], out, *several, "--load", *loads)) == 0
    shown = capsys.readouterr().out
    assert "weights of the encoder from iter_0000003;" in shown and (out / "table.md").read_text() in shown
    assert [row["checkpoint"] for row in rows(out)] == [str(training_run / "iter_0000003")] * 3


@pytest.mark.parametrize("checkpoint_folder", ["absolute"], indirect=True)
def test_other_ranks_load_the_checkpoint_of_rank_0(topics, training_run, out, monkeypatch):
    """Rank 1 comes when the run has saved again; what rank 0 sends is as it was."""
    options = parse_arguments(words(topics, training_run, out, *GLANCE))
    sent = []

    def gather(item):
        sent.append(item)
        return sent[:1]

    monkeypatch.setattr(workers, "agree", lambda action: action())
    monkeypatch.setattr(workers, "gather_objects", gather)
    monkeypatch.setattr(workers, "refuse_differences", lambda _: None)
    sweeps = [workers._open_on_ranks(options, Ranks(rank, 2, torch.device("cpu"))) for rank in (0, 1)]
    assert [one.options.load for one in sweeps] == [(training_run / "iter_0000003",)] * 2
    assert [run.name for run in sweeps[0].runs] == [run.name for run in sweeps[1].runs] and sent[1] is None
    assert "= 1 run on cpu, each on 2 ranks; 1 of 1 runs to do" in workers.plan_text(sweeps[0])


def test_a_command_that_waits_leaves_no_job_to_others_in_silence(topics, bert_folder, out, monkeypatch, capsys):
    """Without its table a command does not end with code 0, unless it was told --no-wait."""
    monkeypatch.setattr(workers, "drain", lambda *_: None)
    said = r"1 job is missing in .*out, and the tables are not written: run the same"
    refused(said, main, words(topics, bert_folder, out, *GLANCE))
    assert main(words(topics, bert_folder, out, *GLANCE, "--no-wait")) == 0
    assert "1 job is being done by other commands" in capsys.readouterr().out


def test_a_test_file_without_labels_that_changed_is_not_predicted(topics, bert_folder, out, after_each_run, capsys):
    """The tables are there all the same."""
    path = topics / "new.jsonl"
    after_each_run(lambda: path.write_text(path.read_text() + '{"id": 9, "text": "red cat"}\n'))
    refused(rf"new\.jsonl: {CHANGED}", main, words(topics, bert_folder, out, *GLANCE, "--test", path))
    assert not list((out / "predictions").glob("*test*"))
    assert (out / "table.md").read_text() in capsys.readouterr().out and (out / "table.json").is_file()


def test_glue_reads_each_file_once(glue_dir, monkeypatch):
    read_bytes, asked = Path.read_bytes, []
    monkeypatch.setattr(Path, "read_bytes", lambda self: asked.append(self.name) or read_bytes(self))
    data = glue.read_task(glue.TASKS["CoLA"], glue_dir)
    assert asked == ["train.tsv", "dev.tsv"]
    before = list(data.train), list(data.dev["dev"])
    for name in asked:
        (glue_dir / "CoLA" / name).unlink()
    assert (list(data.train), list(data.dev["dev"])) == before
