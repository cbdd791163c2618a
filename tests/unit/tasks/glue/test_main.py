"""The command, end to end on tiny tasks and encoders, and its submission."""

import json
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import pearsonr
from sklearn.metrics import accuracy_score, matthews_corrcoef

from megatron_ddrp.encoders.encoder import load_encoder
from megatron_ddrp.tasks.glue import TASKS, main, parse_arguments, write_test_predictions
from tests.refusals import refused, wrong_arguments
from tests.unit.tasks.conftest import arguments, rows, stored_predictions, write_bert

MNLI_LABELS, MNLI_FILES = {"contradiction", "entailment", "neutral"}, ["MNLI-m.tsv", "MNLI-mm.tsv"]
QUICK = ("--epochs", "1", "--seeds", "1", "--predict-test")


WRONG = {
    **{"--seeds 0": "--seeds", "--lr -1": "--lr", "--tasks XNLI": "--tasks", "--grid large": "--grid"},
    **{"--max-seq-length 4": "--max-seq-length", "--layerwise-lr-decay 1.5": "--layerwise-lr-decay"},
    **{"--workers 0": "--workers", "--bf16 --fp16": "--fp16", "--max-train-examples 0": "--max-train-examples"},
    "--start-from-task MNLI": "MNLI: --tasks must name at least one of RTE, MRPC, STS-B",
}


def test_wrong_arguments_exit_with_2_and_bad_data_stops_before_the_encoder_is_loaded(
    glue_dir, bert_folder, out, tmp_path, monkeypatch
):
    for wrong, said in WRONG.items():
        wrong_arguments(said, parse_arguments, arguments(glue_dir, tmp_path, tmp_path, *wrong.split()))
    wrong_arguments("--data-dir is needed", parse_arguments, ["--output-dir", "out", "--load", "x"])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX2")
    said = "--fp16 needs a GPU; leave --fp16 out"
    wrong_arguments(said, main, arguments(glue_dir, bert_folder, out, "--fp16"))
    (glue_dir / "CoLA" / "dev.tsv").write_text("made\t2\t\tred cat runs\n")
    said = r"dev\.tsv, line 1: label '2', expected one of 0, 1"
    refused(said, main, arguments(glue_dir, tmp_path / "no-such-encoder", out))


def recomputed(out, row):
    """A row's scores by scikit-learn and scipy, from its file of predictions alone."""
    files, indices, predictions, labels = map(np.array, stored_predictions(out, row))
    scores = {}
    for file in dict.fromkeys(files.tolist()):
        own = files == file
        assert [int(index) for index in indices[own]] == list(range(own.sum()))
        if row["metric"] == "pearson":
            scores[file] = pearsonr(labels[own].astype(float), predictions[own].astype(float)).statistic
        else:
            metric = {"accuracy": accuracy_score, "matthews": matthews_corrcoef}[row["metric"]]
            scores[file] = metric(labels[own], predictions[own])
    return scores


def test_scores_follow_from_the_predictions_and_the_submission_has_glues_format(three_tasks, bert_folder, out, capsys):
    """A test set is predicted anew once it has changed."""
    tasks = ["--tasks", "CoLA", "STS-B", "MNLI"]
    command = arguments(three_tasks, bert_folder, out, "--epochs", "2", *tasks, "--predict-test")
    main(command)
    said = capsys.readouterr().out
    wanted = "the server also wants RTE.tsv, MRPC.tsv, SST-2.tsv, QNLI.tsv, QQP.tsv, AX.tsv, WNLI.tsv"
    assert wanted in said and "test predictions [" in said
    for row in rows(out):
        found = recomputed(out, row)
        expected = {list(found)[0]: row["score"], **row.get("other_scores", {})}
        assert found == pytest.approx(expected, rel=0, abs=1e-12 if row["task"] == "STS-B" else 0)
        assert len(expected) == 1 + (row["task"] == "MNLI")
        assert row["epoch_scores"][-1] == row["score"] and row["metric"] == TASKS[row["task"]].metric
        assert row["epoch_scores"][row["best_epoch"] - 1] == row["best_epoch_score"] == max(row["epoch_scores"])
    labels = {"CoLA.tsv": {"0", "1"}, "MNLI-m.tsv": MNLI_LABELS, "MNLI-mm.tsv": MNLI_LABELS, "STS-B.tsv": None}
    files = archived(out / "submission")
    assert sorted(files) == sorted(labels)
    for name, text in files.items():
        assert text == (out / "submission" / name).read_bytes()
        indices, told = zip(*(line.split("\t") for line in text.decode().splitlines()), strict=True)
        assert indices == ("index", *map(str, range(13))) and told[0] == "prediction"
        assert {*told[1:]} <= labels[name] if labels[name] else all(0 <= float(one) <= 5 for one in told[1:])
    best = max((row for row in rows(out) if row["task"] == "MNLI"), key=lambda row: row["score"])
    assert json.loads((out / "submission" / "MNLI.json").read_text())["dev_score"] == best["score"]
    main(command)
    assert "test predictions [" not in capsys.readouterr().out
    path = three_tasks / "CoLA" / "test.tsv"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:8]))
    main(command)
    assert "test predictions [1/1]" in capsys.readouterr().out
    assert len(archived(out / "submission")["CoLA.tsv"].splitlines()) == 8


@pytest.mark.parametrize("checkpoint_folder", ["ddrp"], indirect=True)
def test_some_tasks_start_from_the_best_model_of_another_and_share_its_submission(
    three_tasks, bert_folder, checkpoint_folder, out, capsys
):
    loads = [str(bert_folder), str(checkpoint_folder)]
    more = [*QUICK, "--tasks", "CoLA", "STS-B", "--start-from-task", "MNLI", "--load", *loads]
    main(arguments(three_tasks, bert_folder, out, *more, "--dry-run"))
    assert f"{bert_folder}, from MNLI" in capsys.readouterr().out and not out.exists()
    main(arguments(three_tasks, bert_folder, out, *more))
    found = {(row["task"], row["load"], row["encoder"]) for row in rows(out)}
    assert {(task, load) for task, load, _ in found} == {
        (task, f"{load}{', from MNLI' if task == 'STS-B' else ''}")
        for task in ("CoLA", "MNLI", "STS-B")
        for load in loads
    }
    assert len({encoder for *_, encoder in found}) == 4
    assert f"| {bert_folder}, from MNLI |" in (out / "table.md").read_text()
    folders = list(out.glob("submission*"))
    assert [sorted(archived(folder)) for folder in folders] == 2 * [["CoLA.tsv", *MNLI_FILES, "STS-B.tsv"]]
    assert {json.loads((folder / "encoder.json").read_text())["name"] for folder in folders} == {*loads}
    (out / "runs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(out)[:-1]))
    capsys.readouterr()
    main(arguments(three_tasks, bert_folder, out, *more))
    assert "1 of 2 runs to do" in capsys.readouterr().out and len(rows(out)) == 6
    shutil.rmtree(out / "models")
    reason = f"--start-from-task MNLI: the best run of {bert_folder}, MNLI-.*, kept no model in"
    refused(reason, main, arguments(three_tasks, bert_folder, out, *more))


def test_the_tables_show_the_settings_of_the_last_command_at_both_stages(three_tasks, bert_folder, out, tmp_path):
    tasks = ["--tasks", "CoLA", "STS-B", "--start-from-task", "MNLI", "--epochs", "1"]
    for rate, seeds in (("1e-2", 2), ("1e-5", 1)):
        main(arguments(three_tasks, bert_folder, out, *tasks, "--lr", rate, "--seeds", str(seeds)))
        cells = json.loads((out / "table.json").read_text())["encoders"][str(bert_folder)]["tasks"]
        shown = {task: (cell["point"]["lr"], len(cell["scores"])) for task, cell in cells.items()}
        assert shown == {task: (float(rate), seeds) for task in ("CoLA", "MNLI")}
    assert main(["--report", str(out), "--output-dir", str(tmp_path / "all")]) == 0  # chooses among all runs
    cells = json.loads((tmp_path / "all" / "table.json").read_text())["encoders"][str(bert_folder)]["tasks"]
    assert [len(cell["scores"]) for cell in cells.values()] == [2, 2]


def test_a_dry_run_tells_runs_and_rows_and_writes_nothing(glue_dir, bert_folder, out, capsys):
    main(arguments(glue_dir, bert_folder, out, "--dry-run", "--lr", "1e-3", "1e-2"))
    printed = capsys.readouterr().out
    for told in (
        "1 encoder x 1 task x 2 grid points x 2 seeds = 4 runs on",
        "CoLA      4 runs of 64 train, 21 dev",
        f"  time left: not known until the first run of {bert_folder} is finished",
        *("missing: none; not used:", "new in every run: the task's head"),
    ):
        assert told in printed
    assert not out.exists()


def test_random_weights_are_another_encoder_and_one_report_covers_several_folders(glue_dir, bert_folder, tmp_path):
    folders = [str(tmp_path / name) for name in "12"]
    report = ["--report", *folders, "--output-dir", str(tmp_path / "both")]
    for folder, more in zip(folders, ([], ["--random-init"]), strict=True):
        main(arguments(glue_dir, bert_folder, folder, "--epochs", "1", *more))
    loads = [str(bert_folder)] * 2 + [f"{bert_folder}, random weights"] * 2
    found = [row for folder in folders for row in rows(Path(folder))]
    assert [row["load"] for row in found] == loads and len({row["encoder"] for row in found}) == 2
    main(report)
    text = (tmp_path / "both" / "table.md").read_text()
    assert all(f"| {load} |" in text for load in loads)
    refused("no runs.jsonl in it", main, ["--report", str(tmp_path), *report[-2:]])
    (tmp_path / "2" / "runs.jsonl").write_text("")
    refused("2: no finished run in its runs.jsonl", main, report)


def test_the_flags_of_training_reach_the_run(glue_dir, bert_folder, out, capsys):
    """32 training rows are half as many steps as all 64, and 3, fewer than a batch, are one step per epoch."""
    flags = ["--seeds", "1", "--epochs", "1", "--layerwise-lr-decay", "0.5", "--micro-batch-size", "3"]
    command = arguments(glue_dir, bert_folder, out, *flags, "--max-seq-length", "500")
    for more in ([], ["--max-train-examples", "32"], ["--max-train-examples", "3", "--epochs", "2"]):
        main([*command, *more])
    found = rows(out)
    assert [(row["train_examples"], row["steps"]) for row in found] == [(64, 8), (32, 4), (3, 2)]
    assert "1 runs of 3 train, 21 dev" in capsys.readouterr().out
    assert {(row["layerwise_lr_decay"], row["micro_batch_size"]) for row in found} == {(0.5, 3)}
    assert {row["max_seq_length"] for row in found} == {load_encoder(bert_folder).max_length} != {500}


def archived(folder):
    with zipfile.ZipFile(folder / "submission.zip") as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_server_gets_numbers_within_the_range_and_names_of_classes(tmp_path):
    """STS-B's scores are 0 to 5; a row without a prediction gets 0."""
    path = tmp_path / "x.tsv"
    write_test_predictions(path, TASKS["STS-B"], np.array([-0.25, 2.5, 5.125, np.nan, np.inf]))
    header, *lines = (line.split("\t") for line in path.read_text().splitlines())
    assert header == ["index", "prediction"] and [line[0] for line in lines] == ["0", "1", "2", "3", "4"]
    assert [float(line[1]) for line in lines] == [0, 2.5, 5, 0, 5]
    write_test_predictions(path, TASKS["RTE"], np.array([1, 0]))
    assert path.read_text() == "index\tprediction\n0\tnot_entailment\n1\tentailment\n"


def test_a_second_encoder_gets_a_submission_of_its_own(three_tasks, bert_folder, out, tmp_path, capsys):
    other = write_bert(tmp_path / "other", spread=0.3)
    main(arguments(three_tasks, bert_folder, out, *QUICK, "--tasks", "CoLA", "STS-B"))
    first, plain = archived(out / "submission"), out / "submission"
    assert f"test predictions of {bert_folder}: written to {plain / 'submission.zip'};" in capsys.readouterr().out
    main(arguments(three_tasks, other, out, *QUICK, "--tasks", "STS-B"))
    assert archived(plain) == first
    (second,) = out.glob("submission-*")
    assert list(archived(second)) == ["STS-B.tsv"] and archived(second)["STS-B.tsv"] != first["STS-B.tsv"]
    told = f"{second / 'submission.zip'}; {plain} keeps those of another encoder"
    assert f"test predictions of {other}: written to {told}" in capsys.readouterr().out
    owners = [json.loads((folder / "encoder.json").read_text()) for folder in (plain, second)]
    assert [owner["name"] for owner in owners] == [str(bert_folder), str(other)]
    assert second.name == f"submission-{owners[1]['encoder']}"
    main(arguments(three_tasks, bert_folder, out, *QUICK, "--tasks", "MNLI"))
    assert archived(plain).keys() == {*first, *MNLI_FILES}
