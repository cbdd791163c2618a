"""The command, end to end on a tiny task and encoder."""

import csv
import json
import shutil
import subprocess
import sys
import zipfile

import pytest

from megatron_ddrp.encoders.encoder import load_encoder
from megatron_ddrp.errors import UserError
from megatron_ddrp.tasks.glue import main, parse_arguments

MNLI_LABELS = {"contradiction", "entailment", "neutral"}


def arguments(glue_dir, folder, out, *more):
    words = ["--tasks", "CoLA", "--data-dir", str(glue_dir), "--load", str(folder), "--output-dir", str(out)]
    return [*words, "--grid", "quick", "--seeds", "2", "--lr", "1e-2", "--batch-size", "8", "--epochs", "10", *more]


def rows(out):
    return [json.loads(line) for line in (out / "runs.jsonl").read_text().splitlines()]


def test_runs_are_recorded_and_not_repeated(glue_dir, bert_folder, tmp_path, capsys):
    out = tmp_path / "out"
    main(arguments(glue_dir, bert_folder, out))
    first = rows(out)
    assert [(row["task"], row["seed"], row["dev_examples"], row["metric"]) for row in first] == [
        ("CoLA", 1, 21, "matthews"),
        ("CoLA", 2, 21, "matthews"),
    ]
    assert first[0]["steps"] == 10 * 8
    assert first[0]["score"] > 0.5
    assert "| encoder | CoLA |\n" in (out / "table.md").read_text()

    (out / "runs.jsonl").write_text(json.dumps(first[1]) + "\n")  # as if seed 1 had been killed
    capsys.readouterr()
    main(arguments(glue_dir, bert_folder, out))
    assert "1 of 2 runs to do" in capsys.readouterr().out
    second = rows(out)
    assert second[0] == first[1]
    clock = {"seconds": 0, "crc32": 0}
    assert second[1] | clock == first[0] | clock
    assert (out / "table.json").is_file()


def test_random_weights_are_runs_of_their_own(glue_dir, bert_folder, tmp_path):
    out = tmp_path / "out"
    for more in ([], ["--random-init"]):
        main(arguments(glue_dir, bert_folder, out, "--epochs", "1", *more))
    assert [row["load"] for row in rows(out)] == [str(bert_folder)] * 2 + [f"{bert_folder}, random weights"] * 2
    assert len({row["encoder"] for row in rows(out)}) == 2


def test_bad_data_stops_before_the_encoder_is_loaded(glue_dir, tmp_path):
    path = glue_dir / "CoLA" / "dev.tsv"
    path.write_text("made\t2\t\tred cat runs\n")
    with pytest.raises(UserError, match=r"dev\.tsv, line 1: label '2', expected one of 0, 1"):
        main(arguments(glue_dir, tmp_path / "no-such-encoder", tmp_path / "out"))


def test_a_foreign_folder_is_refused(glue_dir, tmp_path):
    with pytest.raises(UserError, match="neither a training checkpoint nor a Hugging Face folder"):
        main(arguments(glue_dir, tmp_path, tmp_path / "out"))


def test_a_tokenizer_larger_than_its_model_is_refused(glue_dir, bert_folder, tmp_path):
    with (bert_folder / "vocab.txt").open("a") as stream:
        stream.write("more\n")
    with pytest.raises(UserError, match="15 pieces but its model embeds 14"):
        main(arguments(glue_dir, bert_folder, tmp_path / "out"))


@pytest.mark.parametrize(
    "wrong",
    [["--seeds", "0"], ["--lr", "-1"], ["--tasks", "XNLI"], ["--grid", "large"], ["--max-seq-length", "4"]]
    + [["--layerwise-lr-decay", "1.5"], ["--workers", "0"], ["--bf16", "--fp16"], ["--max-train-examples", "0"]],
)
def test_wrong_arguments_exit_with_2(glue_dir, tmp_path, wrong):
    with pytest.raises(UserError) as stopped:
        parse_arguments(arguments(glue_dir, tmp_path, tmp_path, *wrong))
    assert stopped.value.exit_code == 2 and "\n" not in str(stopped.value)


def test_the_command_line_needs_no_torch():
    code = "import sys\nfrom megatron_ddrp.tasks.glue import parse_arguments\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_data_or_encoder_the_command_says_so():
    with pytest.raises(UserError, match="--data-dir is needed") as stopped:
        parse_arguments(["--output-dir", "out", "--load", "x"])
    assert stopped.value.exit_code == 2


def recomputed(out, row):
    """A row's scores by scikit-learn and scipy, from its file of predictions alone."""
    from scipy.stats import pearsonr
    from sklearn.metrics import accuracy_score, matthews_corrcoef

    with (out / row["predictions"]).open(encoding="utf-8", newline="") as stream:
        lines = list(csv.DictReader(stream, delimiter="\t", quoting=csv.QUOTE_NONE))
    scores = {}
    for file in dict.fromkeys(line["file"] for line in lines):
        own = [line for line in lines if line["file"] == file]
        assert [int(line["index"]) for line in own] == list(range(len(own)))
        labels, predictions = ([line[key] for line in own] for key in ("label", "prediction"))
        if row["metric"] == "pearson":
            scores[file] = pearsonr([float(x) for x in labels], [float(x) for x in predictions]).statistic
        else:
            scores[file] = {"accuracy": accuracy_score, "matthews": matthews_corrcoef}[row["metric"]](
                labels, predictions
            )
    return scores


def test_scores_can_be_recomputed_from_the_predictions(three_tasks, bert_folder, tmp_path):
    out = tmp_path / "out"
    tasks = ["--tasks", "CoLA", "STS-B", "MNLI"]
    main(arguments(three_tasks, bert_folder, out, "--seeds", "1", *tasks))
    cola, sts, mnli = rows(out)
    assert recomputed(out, cola) == {"dev": cola["score"]}
    assert recomputed(out, sts) == {"dev": pytest.approx(sts["score"], abs=1e-12)}
    assert recomputed(out, mnli) == {"dev_matched": mnli["score"], **mnli["other_scores"]}
    assert cola["epoch_scores"][-1] == cola["score"]
    assert cola["epoch_scores"][cola["best_epoch"] - 1] == cola["best_epoch_score"] == max(cola["epoch_scores"])


def test_some_tasks_start_from_the_best_model_of_another(three_tasks, bert_folder, checkpoint_folder, tmp_path, capsys):
    out = tmp_path / "out"
    tasks = ["--tasks", "CoLA", "STS-B", "--start-from-task", "MNLI", "--epochs", "1"]
    more = [*tasks, "--load", str(bert_folder), str(checkpoint_folder)]
    main(arguments(three_tasks, bert_folder, out, *more, "--dry-run"))
    assert f"{bert_folder}, from MNLI" in capsys.readouterr().out and not out.exists()
    main(arguments(three_tasks, bert_folder, out, *more))
    found = {(row["task"], row["load"], row["encoder"]) for row in rows(out)}
    assert {(task, load) for task, load, _ in found} == {
        (task, f"{load}{', from MNLI' if task == 'STS-B' else ''}")
        for task in ("CoLA", "MNLI", "STS-B")
        for load in (bert_folder, checkpoint_folder)
    }
    assert len({encoder for *_, encoder in found}) == 4
    assert f"| {bert_folder}, from MNLI |" in (out / "table.md").read_text()
    (out / "runs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(out)[:-1]))
    capsys.readouterr()
    main(arguments(three_tasks, bert_folder, out, *more))
    assert "1 of 4 runs to do" in capsys.readouterr().out and len(rows(out)) == 12
    shutil.rmtree(out / "models")
    reason = f"--start-from-task MNLI: the best run of {bert_folder}, MNLI-.*, kept no model in"
    with pytest.raises(UserError, match=reason):
        main(arguments(three_tasks, bert_folder, out, *more))


def test_the_tables_show_the_settings_of_the_last_command_at_both_stages(three_tasks, bert_folder, tmp_path):
    out = tmp_path / "out"
    tasks = ["--tasks", "CoLA", "STS-B", "--start-from-task", "MNLI", "--epochs", "1"]
    for rate, seeds in (("1e-2", 2), ("1e-5", 1)):
        main(arguments(three_tasks, bert_folder, out, *tasks, "--lr", rate, "--seeds", str(seeds)))
        cells = json.loads((out / "table.json").read_text())["encoders"][str(bert_folder)]["tasks"]
        shown = {task: (cell["point"]["lr"], len(cell["scores"])) for task, cell in cells.items()}
        assert shown == {task: (float(rate), seeds) for task in ("CoLA", "MNLI")}
    assert main(["--report", str(out), "--output-dir", str(tmp_path / "all")]) == 0  # chooses among all runs
    cells = json.loads((tmp_path / "all" / "table.json").read_text())["encoders"][str(bert_folder)]["tasks"]
    assert [len(cell["scores"]) for cell in cells.values()] == [2, 2]


def test_no_task_to_start_is_refused(glue_dir, bert_folder, tmp_path):
    reason = "--start-from-task MNLI: --tasks must name at least one of RTE, MRPC, STS-B"
    with pytest.raises(UserError, match=reason):
        parse_arguments(arguments(glue_dir, bert_folder, tmp_path, "--start-from-task", "MNLI"))


def test_a_dry_run_tells_runs_and_rows_and_writes_nothing(glue_dir, bert_folder, tmp_path, capsys):
    out = tmp_path / "out"
    main(arguments(glue_dir, bert_folder, out, "--dry-run", "--lr", "1e-3", "1e-2"))
    printed = capsys.readouterr().out
    assert "1 encoder x 1 task x 2 grid points x 2 seeds = 4 runs on" in printed
    assert "CoLA      4 runs of 64 train, 21 dev" in printed
    assert f"  time left: not known until the first run of {bert_folder} is finished" in printed
    assert "missing: none; not used:" in printed
    assert "new in every run: the task's head" in printed
    assert not out.exists()


def test_the_submission_has_glues_format(three_tasks, bert_folder, tmp_path, capsys):
    out = tmp_path / "out"
    tasks = ["--tasks", "CoLA", "STS-B", "MNLI"]
    words = arguments(three_tasks, bert_folder, out, "--epochs", "1", "--seeds", "2", *tasks, "--predict-test")
    main(words)
    assert (
        "the server also wants RTE.tsv, MRPC.tsv, SST-2.tsv, QNLI.tsv, QQP.tsv, AX.tsv, WNLI.tsv"
        in capsys.readouterr().out
    )
    expected = {"CoLA.tsv": {"0", "1"}, "MNLI-m.tsv": MNLI_LABELS, "MNLI-mm.tsv": MNLI_LABELS, "STS-B.tsv": None}
    with zipfile.ZipFile(out / "submission" / "submission.zip") as archive:
        assert sorted(archive.namelist()) == sorted(expected)
        for name, labels in expected.items():
            text = archive.read(name).decode()
            assert text == (out / "submission" / name).read_text()
            header, *lines = (line.split("\t") for line in text.splitlines())
            assert header == ["index", "prediction"]
            assert [line[0] for line in lines] == [str(index) for index in range(13)]
            if labels:
                assert {line[1] for line in lines} <= labels
            else:
                assert all(0 <= float(line[1]) <= 5 for line in lines)
    best = max((row for row in rows(out) if row["task"] == "MNLI"), key=lambda row: row["score"])
    assert json.loads((out / "submission" / "MNLI.json").read_text())["dev_score"] == best["score"]
    main(words)
    assert "test predictions [" not in capsys.readouterr().out


def test_one_report_over_several_folders(glue_dir, bert_folder, tmp_path, capsys):
    for number in "12":
        main(arguments(glue_dir, bert_folder, tmp_path / number, "--epochs", "1", *["--random-init"] * (number == "2")))
    main(["--report", str(tmp_path / "1"), str(tmp_path / "2"), "--output-dir", str(tmp_path / "both")])
    text = (tmp_path / "both" / "table.md").read_text()
    assert f"| {bert_folder} |" in text
    assert f"| {bert_folder}, random weights |" in text
    with pytest.raises(UserError, match="no runs.jsonl in it"):
        main(["--report", str(tmp_path), "--output-dir", str(tmp_path / "both")])
    (tmp_path / "2" / "runs.jsonl").write_text("")
    with pytest.raises(UserError, match="2: no finished run in its runs.jsonl"):
        main(["--report", str(tmp_path / "1"), str(tmp_path / "2"), "--output-dir", str(tmp_path / "both")])


def test_several_checkpoints_stand_side_by_side(glue_dir, bert_folder, checkpoint_folder, tmp_path):
    out = tmp_path / "out"
    main(arguments(glue_dir, bert_folder, out, "--epochs", "1", "--load", str(bert_folder), str(checkpoint_folder)))
    assert {row["load"] for row in rows(out)} == {str(bert_folder), str(checkpoint_folder)}
    assert len(rows(out)) == 4


def test_fp16_on_a_cpu_is_refused(glue_dir, bert_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX2")
    with pytest.raises(UserError, match="--fp16 needs a GPU; leave --fp16 out") as refused:
        main(arguments(glue_dir, bert_folder, tmp_path / "out", "--fp16"))
    assert refused.value.exit_code == 2


@pytest.mark.parametrize("epochs", ["1", "2"])
def test_fewer_training_rows_than_a_batch(glue_dir, bert_folder, tmp_path, epochs, capsys):
    out = tmp_path / "out"
    words = arguments(glue_dir, bert_folder, out, "--epochs", epochs, "--seeds", "1", "--max-train-examples", "3")
    main([*words, "--dry-run"])
    assert "1 runs of 3 train, 21 dev" in capsys.readouterr().out
    main(words)
    assert [(row["train_examples"], row["steps"]) for row in rows(out)] == [(3, int(epochs))]


def test_a_run_that_collapses_scores_0_and_says_so(glue_dir, bert_folder, tmp_path, capsys):
    """Labels of one class: Matthews' correlation is 0/0 whatever is predicted."""
    path = glue_dir / "CoLA" / "dev.tsv"
    path.write_text("made\t1\t\tred cat runs\n" * 5)
    out = tmp_path / "out"
    assert main(arguments(glue_dir, bert_folder, out, "--epochs", "1", "--seeds", "1")) == 0
    (row,) = rows(out)
    assert (row["score"], row["undefined"], row["best_epoch_score"], row["epoch_scores"]) == (0.0, True, 0.0, [0.0])
    assert "matthews 0.00 (undefined, counts as 0)" in capsys.readouterr().out
    assert f"| {bert_folder} | 0.00 (1 undefined) |" in (out / "table.md").read_text()
    assert main(["--report", str(out), "--output-dir", str(tmp_path / "again")]) == 0
    assert (tmp_path / "again" / "table.md").read_text() == (out / "table.md").read_text()


def test_fewer_training_rows_are_runs_of_their_own(glue_dir, bert_folder, tmp_path):
    out = tmp_path / "out"
    for more in ([], ["--max-train-examples", "32"]):
        main(arguments(glue_dir, bert_folder, out, "--epochs", "1", "--seeds", "1", *more))
    assert [(row["train_examples"], row["steps"]) for row in rows(out)] == [(64, 8), (32, 4)]


def test_the_flags_of_training_reach_the_run(glue_dir, bert_folder, tmp_path):
    flags = {"--seeds": 1, "--epochs": 1, "--layerwise-lr-decay": 0.5, "--micro-batch-size": 3, "--max-seq-length": 500}
    main(arguments(glue_dir, bert_folder, tmp_path / "out", *(str(word) for pair in flags.items() for word in pair)))
    [row] = rows(tmp_path / "out")
    assert (row["layerwise_lr_decay"], row["micro_batch_size"]) == (0.5, 3)
    assert row["max_seq_length"] == load_encoder(bert_folder).max_length < 500
