"""Files that change while a command runs: it stops in one line, and no run has other rows than its fingerprint says."""

import json
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from megatron_ddrp.errors import UserError
from megatron_ddrp.parallel.process_group import Ranks
from megatron_ddrp.tasks.finetune import task_files as predict
from megatron_ddrp.tasks.finetune import workers
from megatron_ddrp.tasks.finetune.command import main, parse_arguments
from megatron_ddrp.tasks.finetune.options import TaskFiles
from megatron_ddrp.tasks.finetune.task_files import read_task
from megatron_ddrp.tasks.finetune.workers import Sweep
from megatron_ddrp.tasks.glue import TASKS
from megatron_ddrp.tasks.glue import read_task as read_glue
from tests.unit.tasks.finetune.test_own_tasks import GLANCE, rows, words

CHANGED = "changed after this command had read it; finished runs are kept; run the same command again"
ROW = json.dumps({"text": "red dog runs", "label": "colour"}) + "\n"
CHANGES = {
    "a row more": lambda text: text + ROW,
    "another label": lambda text: text.replace("animal", "colour", 1),
    "another text of equal length": lambda text: text.replace("red", "bed", 1),
    "a new label": lambda text: text.replace("animal", "robot", 1),
    "rows in another order": lambda text: "".join(text.splitlines(keepends=True)[::-1]),
    "half a row": lambda text: text[:-20],
    "nothing": lambda text: "",
}


@pytest.fixture
def files(topics):
    (topics / "test.jsonl").write_text(3 * ROW)
    return TaskFiles(*(topics / f"{name}.jsonl" for name in ("train", "valid", "test")))


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("name", ["train", "valid", "test"])
def test_rows_are_refused_once_their_file_has_changed(files, name, change):
    path = getattr(files, name)
    path.write_text(3 * path.read_text().replace("bird", "red") + ROW.replace("colour", "animal"))
    data = read_task(files)
    examples = data.train if name == "train" else data.dev[name]
    before = list(examples)
    assert list(examples) == before
    path.write_text(change(path.read_text()))
    with pytest.raises(UserError, match=CHANGED) as refused:
        list(examples)
    assert str(path) in str(refused.value) and "\n" not in str(refused.value)


def test_a_change_within_a_pass_is_noticed_at_its_end(files):
    data = read_task(files)
    passing = iter(data.train)
    next(passing)
    with files.train.open("a") as stream:
        stream.write(ROW)
    with pytest.raises(UserError, match=CHANGED):
        list(passing)


def test_a_file_that_is_gone_is_named(files):
    data = read_task(files)
    files.valid.unlink()
    with pytest.raises(UserError, match=r"valid\.jsonl: No such file or directory; give a readable file"):
        list(data.dev["valid"])


@pytest.mark.parametrize("name", ["train", "valid"])
def test_a_sweep_stops_before_a_run_on_changed_rows(
    topics, bert_folder, checkpoint_folder, tmp_path, monkeypatch, name
):
    """The second encoder reads the rows again."""
    perform, path = Sweep.perform, topics / f"{name}.jsonl"

    def perform_and_change(self, run):
        row = perform(self, run)
        path.write_text(CHANGES["another label"](path.read_text()))
        return row

    monkeypatch.setattr(Sweep, "perform", perform_and_change)
    command = words(topics, bert_folder, tmp_path / "out", *GLANCE, "--load", str(bert_folder), str(checkpoint_folder))
    with pytest.raises(UserError, match=rf"{name}\.jsonl: {CHANGED}"):
        main(command)
    assert len(rows(tmp_path / "out")) == 1
    monkeypatch.setattr(Sweep, "perform", perform)
    main(command)
    found = rows(tmp_path / "out")
    assert [row["data"] == found[0]["data"] for row in found] == [True, False, False]


def test_a_worker_that_read_other_files_stops(files):
    digests = {"topics": read_task(files).digest}
    files.train.write_text(files.train.read_text() + ROW)
    options = Namespace(suite=Namespace(read=lambda: {"topics": read_task(files)}))
    with pytest.raises(UserError, match="topics: its files changed after this command had read them; finished runs"):
        workers._work(0, options, digests, set())


@pytest.mark.parametrize("checkpoint_folder", ["absolute"], indirect=True)
@pytest.mark.parametrize("loads", ["{run}", "{run} {run}/iter_0000003"])
def test_a_run_that_saves_meanwhile_is_one_encoder_to_all_workers(
    topics, training_run, tmp_path, monkeypatch, capsys, loads
):
    def in_this_process(work, given, count, jobs, store, tell, program):
        for number in range(count):
            work(number, *given)
        store.refresh()

    monkeypatch.setattr(workers, "share_out", in_this_process)
    loads = loads.format(run=training_run).split()
    several = ("--epochs", "1", "--seeds", "3", "--workers", "2")
    assert main(words(topics, loads[0], tmp_path / "out", *several, "--load", *loads)) == 0
    shown = capsys.readouterr().out
    assert "weights of the encoder from iter_0000003;" in shown
    assert (tmp_path / "out" / "table.md").read_text() in shown
    assert {row["checkpoint"] for row in rows(tmp_path / "out")} == {str(training_run / "iter_0000003")}
    assert len(rows(tmp_path / "out")) == 3


@pytest.mark.parametrize("checkpoint_folder", ["absolute"], indirect=True)
def test_other_ranks_load_the_checkpoint_of_rank_0(topics, training_run, tmp_path, monkeypatch):
    """Rank 1 comes when the run has saved again; what rank 0 sends is as it was."""
    options = parse_arguments(words(topics, training_run, tmp_path / "out", *GLANCE))
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


@pytest.mark.parametrize("checkpoint_folder", ["absolute"], indirect=True)
def test_a_worker_that_read_another_encoder_stops(topics, checkpoint_folder, tmp_path):
    options = parse_arguments(words(topics, checkpoint_folder, tmp_path / "out", *GLANCE))
    digests = {name: data.digest for name, data in options.suite.read().items()}
    with pytest.raises(UserError, match=f"--load {checkpoint_folder}: changed after this command had read it"):
        workers._work(0, options, digests, {"the encoder that the command has read"})


def test_a_command_that_waits_leaves_no_job_to_others_in_silence(topics, bert_folder, tmp_path, monkeypatch, capsys):
    """Without its table a command does not end with code 0, unless it was told --no-wait."""
    monkeypatch.setattr(workers, "drain", lambda *_: None)
    with pytest.raises(UserError, match=r"1 job is missing in .*out, and the tables are not written: run the same"):
        main(words(topics, bert_folder, tmp_path / "out", *GLANCE))
    assert main(words(topics, bert_folder, tmp_path / "out", *GLANCE, "--no-wait")) == 0
    assert "1 job is being done by other commands" in capsys.readouterr().out


def test_a_test_file_without_labels_that_changed_is_not_predicted(topics, bert_folder, tmp_path, monkeypatch, capsys):
    path, perform = topics / "new.jsonl", Sweep.perform

    def perform_and_change(self, run):
        path.write_text(path.read_text() + '{"id": 9, "text": "red cat"}\n')
        return perform(self, run)

    monkeypatch.setattr(Sweep, "perform", perform_and_change)
    with pytest.raises(UserError, match=rf"new\.jsonl: {CHANGED}"):
        main(words(topics, bert_folder, tmp_path / "out", *GLANCE, "--test", path))
    assert not list((tmp_path / "out" / "predictions").glob("*test*"))
    assert (tmp_path / "out" / "table.md").read_text() in capsys.readouterr().out


def test_a_file_that_changes_while_it_is_labelled_leaves_no_output(topics, tmp_path, monkeypatch):
    path = topics / "new.jsonl"

    class Model(Namespace):
        def encode(self, texts):
            path.write_text(path.read_text() + '{"id": 9, "text": "red cat"}\n')
            return Namespace(cut=0)

        def predict(self, encoded):
            return ["colour"] * 3

    task, columns = Namespace(kind="classification"), Namespace(text="text", pair=None, label="label")
    model = Model(task=task, columns=columns, max_length=8)
    monkeypatch.setattr(predict, "load_finetuned", lambda *_: model)
    monkeypatch.setattr(predict, "_TOGETHER", 3)
    with pytest.raises(UserError, match=CHANGED):
        predict.predict_file(tmp_path, path, tmp_path / "told.csv", torch.device("cpu"))
    assert not (tmp_path / "told.csv").exists()


def test_glue_reads_each_file_once(glue_dir, monkeypatch):
    read_bytes, asked = Path.read_bytes, []
    monkeypatch.setattr(Path, "read_bytes", lambda self: asked.append(self.name) or read_bytes(self))
    data = read_glue(TASKS["CoLA"], glue_dir)
    assert asked == ["train.tsv", "dev.tsv"]
    before = list(data.train), list(data.dev["dev"])
    for name in asked:
        (glue_dir / "CoLA" / name).unlink()
    assert (list(data.train), list(data.dev["dev"])) == before
