"""`python -m tasks.finetune`, end to end on small files and encoders."""

import csv
import json
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_ddrp.data.atomic import SUM, seal_object
from megatron_ddrp.encoders.encoder import load_encoder
from megatron_ddrp.errors import UserError
from megatron_ddrp.tasks.finetune.command import main
from megatron_ddrp.tasks.finetune.options import TaskFiles
from megatron_ddrp.tasks.finetune.runs import TuningRun
from megatron_ddrp.tasks.finetune.task_files import load_finetuned, read_task
from megatron_ddrp.tasks.finetune.workers import plan_text
from tests.unit.tasks.finetune.conftest import first_word_kind
from tests.unit.tasks.glue.conftest import sentences

LEARN = ["--lr", "1e-2", "--batch-size", "8", "--epochs", "8", "--seeds", "2"]
GLANCE = ["--lr", "1e-3", "--epochs", "1", "--seeds", "1"]


def rows(out):
    return [json.loads(line) for line in (out / "runs.jsonl").read_text().splitlines()]


def words(folder, load, out, *more):
    files = ["--train", folder / "train.jsonl", "--valid", folder / "valid.jsonl"]
    return [str(word) for word in (*files, "--load", load, "--output-dir", out, *more)]


def model_of(out):
    (folder,) = (path for path in (out / "models").iterdir() if path.is_dir())
    return folder


def test_three_classes_are_learned_told_and_kept(topics, bert_folder, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(words(topics, bert_folder, out, "--test", topics / "new.jsonl", *LEARN)) == 0
    printed = capsys.readouterr().out
    assert "classification, accuracy; text from text, label from label" in printed
    assert "train: animal " in printed and "always the most frequent label: " in printed
    first, second = rows(out)
    assert (first["task"], first["metric"], first["dev_examples"], first["head"]) == (
        "topics",
        "accuracy",
        21,
        "family",
    )
    assert max(first["score"], second["score"]) > first["baseline"] + 0.1
    assert "| (constant guess) |" in (out / "table.md").read_text()
    folder = model_of(out)
    best = max((first, second), key=lambda row: row["score"])
    card = (folder / "README.md").read_text()
    assert f"| score (accuracy) | {best['score']:.4f} on 21 development examples |" in card
    assert f"| score of always the most frequent label | {best['baseline']:.4f} |" in card
    assert f"{bert_folder.name}, fine-tuned on topics" in card and "pipeline_tag: text-classification" in card
    assert "AutoModelForSequenceClassification.from_pretrained" in card and str(tmp_path) not in card
    kept = json.loads((folder / "config.json").read_text())
    assert kept["finetuned"]["score"] == best["score"] and kept["id2label"] == {
        "0": "animal",
        "1": "colour",
        "2": "other",
    }
    told = [json.loads(line) for line in (out / "predictions" / f"{folder.name}-test.jsonl").read_text().splitlines()]
    assert [row["id"] for row in told] == list(range(9))
    assert {row["prediction"] for row in told} <= {"animal", "colour", "other"}

    (out / "runs.jsonl").write_text(json.dumps(first) + "\n")  # as if seed 2 had been killed
    main(words(topics, bert_folder, out, *LEARN))
    assert "1 of 2 runs to do" in capsys.readouterr().out
    assert rows(out)[1]["score"] == second["score"]
    assert main(["--report", str(out), "--output-dir", str(tmp_path / "again")]) == 0
    assert (tmp_path / "again" / "table.md").read_text() == (out / "table.md").read_text()


def test_the_kept_model_is_what_transformers_loads_and_predict_uses(topics, bert_folder, tmp_path, capfd):
    from transformers import AutoModelForSequenceClassification, BertTokenizer
    from transformers.utils import logging

    out, told = tmp_path / "out", tmp_path / "told.csv"
    main(words(topics, bert_folder, out, *LEARN, "--seeds", "1"))
    logging.enable_progress_bar()
    capfd.readouterr()
    main(["predict", "--load", str(model_of(out)), "--input", str(topics / "valid.jsonl"), "--output", str(told)])
    assert "Loading weights" not in capfd.readouterr().err
    with told.open(newline="") as stream:
        lines = list(csv.DictReader(stream))
    (row,) = rows(out)
    assert np.mean([line["prediction"] == line["label"] for line in lines]) == pytest.approx(row["score"])
    model = AutoModelForSequenceClassification.from_pretrained(model_of(out)).eval()
    tokenizer = BertTokenizer(str(bert_folder / "vocab.txt"), do_lower_case=True)
    for line in lines[:5]:
        logits = model(**tokenizer(line["text"], return_tensors="pt")).logits
        assert model.config.id2label[int(logits.argmax())] == line["prediction"]


def test_a_checkpoint_of_ours_is_kept_with_equal_predictions(topics, checkpoint_folder, tmp_path):
    out, told = tmp_path / "out", tmp_path / "told.jsonl"
    main(words(topics, checkpoint_folder, out, *GLANCE))
    (row,) = rows(out)
    assert row["head"] == "common"
    main(["predict", "--load", str(model_of(out)), "--input", str(topics / "valid.jsonl"), "--output", str(told)])
    lines = [json.loads(line) for line in told.read_text().splitlines()]
    stored = (out / row["predictions"]).read_text().splitlines()[1:]
    assert [line["prediction"] for line in lines] == [line.split("\t")[2] for line in stored]


def test_a_pair_regression_in_csv(checkpoint_folder, tmp_path):
    folder = tmp_path / "alike"
    folder.mkdir()
    for name, count, seed in (("train", 48, 0), ("valid", 16, 1)):
        with (folder / f"{name}.csv").open("w", newline="") as stream:
            writer = csv.writer(stream)
            writer.writerow(["id", "sentence1", "sentence2", "score"])
            pairs = zip(sentences(count, seed), sentences(count, seed + 9), strict=True)
            for number, ((first, _), (second, _)) in enumerate(pairs):
                writer.writerow([number, first, second, f"{len(set(first.split()) & set(second.split())):.1f}"])
    out = tmp_path / "out"
    files = ["--train", folder / "train.csv", "--valid", folder / "valid.csv", "--metric", "spearman"]
    main([str(word) for word in (*files, "--load", checkpoint_folder, "--output-dir", out, *GLANCE)])
    (row,) = rows(out)
    assert (row["metric"], row["facts"]["kind"], row["baseline"]) == ("spearman", "regression", None)
    told = tmp_path / "told.tsv"
    main(["predict", "--load", str(model_of(out)), "--input", str(folder / "valid.csv"), "--output", str(told)])
    header, first, *_ = told.read_text().splitlines()
    stored = (out / row["predictions"]).read_text().splitlines()[1].split("\t")
    assert float(first.split("\t")[4]) == pytest.approx(float(stored[2]), rel=1e-4, abs=1e-4)
    assert header.split("\t") == ["id", "sentence1", "sentence2", "score", "prediction"]
    assert np.isfinite(float(first.split("\t")[4]))


def test_prices_are_learned_and_the_kept_model_tells_them(bert_folder, tmp_path):
    transformers = pytest.importorskip("transformers")
    texts = {}
    for name, count, seed in (("train", 96, 0), ("valid", 21, 1)):
        given = [text for text, _ in sentences(count, seed)]
        labelled = [(text, 250_000.5 + 100_000 * (("cat" in text) + ("dog" in text))) for text in given]
        lines = ["text,price", *(f"{text},{price}" for text, price in labelled)]
        (tmp_path / f"{name}.csv").write_text("\n".join(lines) + "\n")
        texts[name] = [text for text, _ in labelled]
    out = tmp_path / "out"
    files = ["--train", tmp_path / "train.csv", "--valid", tmp_path / "valid.csv", "--label-column", "price"]
    flags = ["--load", bert_folder, "--output-dir", out, "--lr", "1e-2", "--epochs", "10", "--seeds", "1"]
    main([str(word) for word in (*files, *flags, "--batch-size", "8")])
    (row,) = rows(out)
    stored = [line.split("\t") for line in (out / row["predictions"]).read_text().splitlines()[1:]]
    predicted, labels = (np.array([float(line[column]) for line in stored]) for column in (2, 3))
    assert row["scales_labels"] and row["score"] > 0.7
    assert np.abs(predicted - labels).mean() < labels.std()
    model = transformers.AutoModelForSequenceClassification.from_pretrained(model_of(out)).eval()
    given = transformers.BertTokenizer(str(bert_folder / "vocab.txt"))(
        texts["valid"], padding=True, return_tensors="pt"
    )
    with torch.no_grad():
        told = model(**given).logits[:, 0].double().numpy()
    np.testing.assert_allclose(told, predicted, rtol=1e-5)


def test_several_labels_at_once_from_a_task_file(bert_folder, tmp_path):
    folder = tmp_path / "files"
    folder.mkdir()
    for name, count, seed in (("a", 64, 0), ("b", 21, 1)):
        lines = [{"body": text, "topics": sorted({first_word_kind(word) for word in text.split()})} for text, _ in
                 sentences(count, seed)]  # fmt: skip
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "topics-of.yaml").write_text("train: a.jsonl\nvalid: b.jsonl\ntext-column: body\nlabel-column: topics\n")
    out = tmp_path / "out"
    main(["--task-file", str(folder / "topics-of.yaml"), "--load", str(bert_folder), "--output-dir", str(out), *LEARN])
    row = rows(out)[0]
    assert (row["task"], row["metric"], row["facts"]["kind"]) == ("topics-of", "f1", "multi-label")
    assert row["score"] > 0.7
    told = tmp_path / "told.jsonl"
    main(["predict", "--load", str(model_of(out)), "--input", str(folder / "b.jsonl"), "--output", str(told)])
    assert all(set(json.loads(line)["prediction"]) <= {"animal", "colour", "other"} for line in told.open())


BAD = {
    "a missing column": (["--label-column", "class"], None, r"no column 'class', it has text, label"),
    "no usual column": (["--text-column", "body"], None, r"train\.jsonl, line 1: no column 'body'"),
    "one class": ([], ("train", '"label": "[a-z]*"', '"label": "x"'), "all rows have the label 'x', expected two"),
    "an unknown label": (
        [],
        ("valid", '"label": "other"', '"label": "odd"'),
        r"valid\.jsonl, line \d+: label 'odd'",
    ),
    "an empty text": ([], ("valid", '"text": "[a-z ]*"', '"text": " "'), r"valid\.jsonl, line 1: text is empty"),
    "no label": (
        [],
        ("train", '"label": "other"', '"label": null'),
        r"train\.jsonl, line \d+: label is None",
    ),
    "a foreign metric": (["--metric", "pearson"], None, "--metric pearson: --kind classification has accuracy"),
    "no number": (["--kind", "regression"], None, r"train\.jsonl, line 1: label is '\w+', expected a number"),
}


@pytest.mark.parametrize(("more", "change", "message"), BAD.values(), ids=BAD)
def test_bad_files_are_one_line_before_anything_is_loaded(topics, tmp_path, more, change, message):
    import re

    if change:
        path = topics / f"{change[0]}.jsonl"
        path.write_text(re.sub(change[1], change[2], path.read_text()))
    with pytest.raises(UserError, match=message) as refused:
        main(words(topics, tmp_path / "no-such-encoder", tmp_path / "out", *more))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["--train", "x.jsonl"], "--load is needed"),
        (["--train", "x.jsonl", "--load", "y"], "--valid is needed, or a --task-file"),
        (["--train", "x", "--task-file", "y", "--load", "z"], "--task-file and the flags of a task exclude each other"),
        (["--task-file", "no.yaml", "--load", "z"], "no.yaml: no such file; expected YAML with keys"),
        (["--kind", "ranking", "--load", "z"], "invalid choice: 'ranking'"),
        (["--load", "z", "--learning-rate", "1e-4"], "unrecognized arguments: --learning-rate 1e-4; use --lr"),
        (["--load", "z", "--validation_file", "v.csv"], "unrecognized arguments: --validation_file v.csv; use --valid"),
    ],
)
def test_wrong_arguments_exit_with_2(line, message, tmp_path):
    with pytest.raises(UserError) as stopped:
        main([*line, "--output-dir", str(tmp_path)])
    assert stopped.value.exit_code == 2
    assert message in str(stopped.value) and "\n" not in str(stopped.value)


def test_predict_refuses_what_it_cannot_do(topics, bert_folder, tmp_path):
    base = ["predict", "--input", str(topics / "new.jsonl")]
    with pytest.raises(UserError, match=r"not a model that finetune kept"):
        main([*base, "--load", str(bert_folder), "--output", str(tmp_path / "x.jsonl")])
    with pytest.raises(UserError, match=r"expected a name that ends in \.jsonl, \.csv, \.tsv"):
        main([*base, "--load", str(bert_folder), "--output", str(tmp_path / "x.txt")])


def test_a_wrong_model_folder_is_answered_with_the_models_beside_it(tmp_path):
    """Beside and below the wrong folder; a damaged name, OUT itself and OUT/models are the usual mistakes."""
    model = tmp_path / "out" / "models" / "reviews-815d2790"
    for path, columns in ((model, ["text", None, "label"]), (model.parent / "MNLI-815d2790", None)):
        path.mkdir(parents=True)
        task = {"name": "reviews", "metric": "accuracy", "kind": "classification", "labels": ["no", "yes"]}
        facts = {"task": task, "data": "", "score": 0.5, "run": "", "columns": columns}
        facts |= {"max_seq_length": 64}
        (path / "config.json").write_text(json.dumps({"finetuned": facts}))
    (model.parent / "notes.txt").write_text("")
    for wrong in ("out", "out/models", "out/models/reviews-runabs", "out/reviews", "out/models/MNLI-815d2790"):
        got = "not a model that finetune kept" if (tmp_path / wrong).exists() else "no such folder"
        with pytest.raises(UserError) as refused:
            load_finetuned(tmp_path / wrong, torch.device("cpu"))
        assert str(refused.value) == f"--load {tmp_path / wrong}: {got}; expected one of {model}"
    with pytest.raises(UserError, match=r"no such folder; expected a folder OUT/models/TASK-…"):
        load_finetuned(tmp_path / "elsewhere" / "x", torch.device("cpu"))


def test_a_second_text_is_refused_by_a_model_that_was_trained_on_single_ones(tmp_path):
    task = {"name": "reviews", "metric": "accuracy", "kind": "classification", "labels": ["no", "yes"]}
    facts = {"task": task, "data": "", "score": 0.5, "run": "", "columns": ["text", None, "label"]}
    facts |= {"max_seq_length": 64}
    (tmp_path / "config.json").write_text(json.dumps({"finetuned": facts}))
    with pytest.raises(UserError, match="--text-pair-column title: .* was trained on single texts; leave") as refused:
        load_finetuned(tmp_path, torch.device("cpu"), (None, "title"))
    assert refused.value.exit_code == 2


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (TaskFiles(Path("data/reviews-train.csv")), "reviews"),
        (TaskFiles(Path("data/reviews.csv.gz")), "reviews"),
        (TaskFiles(Path("data/topics/train.csv")), "topics"),
        (TaskFiles(Path("data/topics/train.csv"), name="of mine"), "of-mine"),
    ],
)
def test_a_task_is_called_as_its_page_says(given, name):
    assert given.task_name == name


def test_a_model_that_predicts_nothing_finite_says_null(topics, bert_folder, tmp_path):
    from safetensors.torch import load_file, save_file

    out, told = tmp_path / "out", tmp_path / "told.jsonl"
    main(words(topics, bert_folder, out, *GLANCE))
    path = model_of(out) / "model.safetensors"
    (model_of(out) / "export_sums.json").unlink()
    save_file({name: torch.full_like(tensor, torch.nan) for name, tensor in load_file(path).items()}, path)
    main(["predict", "--load", str(model_of(out)), "--input", str(topics / "new.jsonl"), "--output", str(told)])
    assert {json.loads(line)["prediction"] for line in told.open()} == {None}


@pytest.mark.parametrize("encoder", ["bert", "checkpoint"])
def test_a_kept_model_that_lacks_anything_is_refused(topics, bert_folder, checkpoint_folder, tmp_path, capfd, encoder):
    """Its encoder, its pooler, its classifier; or a classifier of other labels."""
    from safetensors.torch import load_file, save_file

    out, told = tmp_path / "out", tmp_path / "told.jsonl"
    main(words(topics, {"bert": bert_folder, "checkpoint": checkpoint_folder}[encoder], out, *GLANCE))
    path = model_of(out) / "model.safetensors"
    tensors = load_file(path)
    (model_of(out) / "export_sums.json").unlink(missing_ok=True)
    predict = ["predict", "--load", model_of(out), "--input", topics / "new.jsonl", "--output", told]
    for name in ("classifier.weight", "classifier.bias", "pooler.dense.bias", *list(tensors)[::7]):
        (dropped,) = (key for key in tensors if key.endswith(name))
        save_file({key: tensor for key, tensor in tensors.items() if key != dropped}, path)
        with pytest.raises(UserError, match=f"it lacks the weight {dropped}; fine-tune again") as refused:
            main(list(map(str, predict)))
        assert refused.value.exit_code == 1 and not told.exists() and "MISSING" not in capfd.readouterr().err
    for changed, said in (
        ({"classifier.bias": torch.zeros(7)}, r"the weight for classifier.bias is \[7\], but config.json requires"),
        (
            {next(key for key in tensors if ".0." in key).replace(".0.", ".9."): torch.zeros(2)},
            "has no place for the weight",
        ),
    ):
        save_file(tensors | changed, path)
        with pytest.raises(UserError, match=said):
            main(list(map(str, predict)))


def test_the_command_line_needs_no_torch():
    code = "import sys\nfrom megatron_ddrp.tasks.finetune.command import main\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_under_bf16_the_fp32_weights_are_kept(topics, checkpoint_folder, tmp_path):
    from safetensors.torch import load_file

    out = tmp_path / "out"
    main(words(topics, checkpoint_folder, out, *GLANCE, "--bf16"))
    kept = load_file(model_of(out) / "model.safetensors")
    assert all(tensor.dtype == torch.float32 for tensor in kept.values())
    assert any((tensor != tensor.bfloat16()).any() for tensor in kept.values())


def test_a_run_that_diverged_leaves_no_model(topics, bert_folder, checkpoint_folder, tmp_path, capsys):
    out = tmp_path / "out"
    for load in (bert_folder, checkpoint_folder):
        main([*words(topics, load, out, *GLANCE), "--lr", "1e12"])
    assert [row["score"] for row in rows(out)] == [0.0, 0.0] and all(row["undefined"] for row in rows(out))
    assert capsys.readouterr().out.count("no model of") == 2
    assert not [path for path in (out / "models").glob("*") if path.is_dir()]


def test_models_are_kept_only_where_they_are_wanted(topics, bert_folder, tmp_path):
    main(words(topics, bert_folder, tmp_path / "out", *GLANCE, "--no-keep-models"))
    assert not (tmp_path / "out" / "models").exists()


def test_a_better_run_that_kept_no_model_is_named(topics, bert_folder, tmp_path, capsys):
    out = tmp_path / "out"
    main(words(topics, bert_folder, out, *GLANCE))
    (row,) = rows(out)
    score = row["score"] + 0.1
    better = seal_object({name: row[name] for name in row if name != SUM} | {"seed": 9, "score": score})
    (out / "runs.jsonl").write_text("".join(json.dumps(each) + "\n" for each in (row, better)))
    capsys.readouterr()
    main(words(topics, bert_folder, out, *GLANCE))
    told = (
        f"is in {model_of(out)} (of those kept; the better run {TuningRun.of_row(better).name} kept none: to repeat it"
    )
    assert told in capsys.readouterr().out


def test_a_labelled_test_file_is_scored_beside_and_chooses_nothing(topics, bert_folder, tmp_path):
    out = tmp_path / "out"
    main(words(topics, bert_folder, out, *GLANCE, "--test", topics / "train.jsonl"))
    (row,) = rows(out)
    assert row["dev_examples"] == 21 and set(row["other_scores"]) == {"test"}
    assert "| topics (test) |" in (out / "table.md").read_text()


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [("valid", '"label": "other"', '"label": "animal"'), ("train", "red", "blue"), ("setting", "accuracy", "macro-f1")],
)
def test_runs_on_other_data_keep_a_model_table_and_predictions_of_their_own(
    topics, bert_folder, tmp_path, capsys, name, old, new
):
    out, path, metric = tmp_path / "out", topics / f"{name}.jsonl", old if name == "setting" else "accuracy"
    command = words(topics, bert_folder, out, *GLANCE, "--test", topics / "new.jsonl")
    before = path.read_text() if path.exists() else ""
    main([*command, "--metric", metric])
    first, table = model_of(out), (out / "table.md").read_text()
    kept = {file.name: file.read_bytes() for file in first.iterdir()}
    predicted = (out / "predictions" / f"{first.name}-test.jsonl").read_bytes()
    if before:
        path.write_text(before.replace(old, new))
    capsys.readouterr()
    main([*command, "--metric", new if name == "setting" else metric])
    assert name == "train" or (out / "table.md").read_text() != table  # few other rows may give the same score
    (second,) = (folder for folder in (out / "models").iterdir() if folder != first)
    data = json.loads((second / "config.json").read_text())["finetuned"]["data"]
    assert second.name == f"{first.name}-{data[:8]}" and data == rows(out)[1]["data"] != rows(out)[0]["data"]
    said = capsys.readouterr().out
    assert f"is in {second} ({first} keeps that of other files or settings); to use it: megatron-ddrp" in said
    assert f"predictions for {topics / 'new.jsonl'} are in {out}/predictions/{second.name}-test.jsonl" in said
    assert {file.name: file.read_bytes() for file in first.iterdir()} == kept
    assert (out / "predictions" / f"{first.name}-test.jsonl").read_bytes() == predicted
    if before:
        path.write_text(before)
    main([*command, "--metric", metric])
    assert (out / "table.md").read_text() == table
    assert f"the best model of {bert_folder} is in {first}; to use it: " in capsys.readouterr().out
    assert len(rows(out)) == 2


def test_a_model_on_other_data_keeps_its_folder_after_the_first_is_gone(topics, bert_folder, tmp_path, capsys):
    out, path = tmp_path / "out", topics / "valid.jsonl"
    main(words(topics, bert_folder, out, *GLANCE))
    first = model_of(out)
    path.write_text(path.read_text().replace('"label": "other"', '"label": "animal"'))
    main(words(topics, bert_folder, out, *GLANCE))
    shutil.rmtree(first)
    second = model_of(out)
    main(words(topics, bert_folder, out, *GLANCE))
    assert model_of(out) == second and f"is in {second} ({first} keeps" not in capsys.readouterr().out.splitlines()[-1]


def test_a_folder_of_another_program_is_not_replaced_by_a_model(topics, bert_folder, tmp_path):
    out = tmp_path / "out"
    theirs = out / "models" / f"topics-{load_encoder(bert_folder).fingerprint[:8]}"
    theirs.mkdir(parents=True)
    (theirs / "notes.txt").write_text("mine")
    main(words(topics, bert_folder, out, *GLANCE))
    assert (theirs / "notes.txt").read_text() == "mine" and [path.name for path in theirs.iterdir()] == ["notes.txt"]
    assert len([path for path in (out / "models").iterdir() if path.is_dir()]) == 2


def test_the_most_frequent_tag_is_that_of_most_words(tmp_path):
    for name in ("train", "valid"):
        line = {"tokens": ["red", "green", "dog", "runs"], "tags": ["A", "A", "A", "V"]}
        other = {"tokens": ["runs"], "tags": ["V"]}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(line) + "\n" + json.dumps(other) + "\n")
    files = TaskFiles(tmp_path / "train.jsonl", tmp_path / "valid.jsonl", kind="tokens", metric="accuracy")
    assert read_task(files).baseline == 3 / 5


def test_the_plan_names_a_folder_whose_weights_it_has_already(topics, bert_folder, tmp_path, capsys):
    twin = shutil.copytree(bert_folder, tmp_path / "twin")
    main(words(topics, bert_folder, tmp_path / "out", *GLANCE, "--dry-run", "--load", str(bert_folder), str(twin)))
    assert "left out, it has the same weights as" in capsys.readouterr().out


def test_ranks_are_told_of_cut_rows_and_twins_as_one_process_is():
    options = Namespace(suite=Namespace(read=dict), training=Namespace(max_seq_length=32))
    encoder = Namespace(name="alibi", origin="loaded: 3 weights", max_length=16, fingerprint="a")
    twin = Namespace(name="twin", fingerprint="a")
    options.search = Namespace(points=[0], seeds=1)
    found = Namespace(options=options, encoders={"a": encoder}, runs=[], twins=[twin], ranks=Namespace(world_size=2))
    found.data, found.device, found.store = {}, Namespace(type="cpu"), Namespace(missing=list)
    assert plan_text(found).splitlines() == [
        "plan: 1 encoder x 0 tasks x 1 grid point x 1 seed = 0 runs on cpu, each on 2 ranks; 0 of 0 runs to do",
        "  alibi: loaded: 3 weights",
        "    rows are cut to 16 pieces: the encoder was trained on no longer rows",
        "  twin: left out, it has the same weights as alibi",
    ]


def test_a_dry_run_of_finished_runs_says_what_was_read(topics, bert_folder, tmp_path, capsys):
    command = words(topics, bert_folder, tmp_path / "out", *GLANCE, "--dry-run")
    main(command[:-1])
    capsys.readouterr()
    main(command)
    said = capsys.readouterr().out
    assert "0 of 1 runs to do" in said and "  topics: valid: animal 4, colour 8, other 9" in said


def test_a_mended_tokenizer_is_another_encoder(topics, bert_folder, tmp_path, capsys):
    out = tmp_path / "out"
    command = words(topics, bert_folder, out, *GLANCE, "--dry-run")
    main(command[:-1])
    main(command)
    settings = bert_folder / "tokenizer_config.json"
    settings.write_text(json.dumps({"do_lower_case": False}))
    main(command)
    assert [line.rpartition("; ")[2] for line in capsys.readouterr().out.splitlines() if line.startswith("plan:")] == [
        "1 of 1 runs to do",
        "0 of 1 runs to do",
        "1 of 1 runs to do",
    ]


def test_the_training_file_as_valid_file_is_told(topics):
    path = topics / "train.jsonl"
    assert not any("same file" in fact for fact in read_task(TaskFiles(path, topics / "valid.jsonl")).facts)
    assert "valid: WARNING, the same file as train" in " ".join(read_task(TaskFiles(path, path)).facts)


def test_rows_that_are_cut_are_counted(topics, bert_folder, tmp_path, capsys):
    out, long = tmp_path / "out", " ".join(["red cat"] * 20)
    for name, count in (("train", 3), ("new", 2)):
        path = topics / f"{name}.jsonl"
        more = {"label": "colour"} if name == "train" else {"id": 9}
        lines = [json.dumps({"text": long} | more) for _ in range(count)]
        path.write_text(path.read_text() + "\n".join(lines) + "\n")
    main(words(topics, bert_folder, out, *GLANCE, "--max-seq-length", "16"))
    said = capsys.readouterr().err
    assert "warning: topics, train: 3 of 67 rows are longer than 16 pieces and are cut\n" in said
    assert "topics, valid:" not in said
    main(["predict", "--load", str(model_of(out)), "--input", str(topics / "new.jsonl")]
         + ["--output", str(tmp_path / "told.csv")])  # fmt: skip
    assert "new.jsonl: 2 of 11 rows are longer than 16 pieces and are cut\n" in capsys.readouterr().err


def test_f1_of_two_labels_names_the_positive_one_in_table_and_card(topics, bert_folder, tmp_path, capsys):
    for name in ("train", "valid"):
        path = topics / f"{name}.jsonl"
        path.write_text(path.read_text().replace('"animal"', '"other"'))
    main(words(topics, bert_folder, tmp_path / "out", *GLANCE, "--metric", "f1"))
    assert "classification, f1 of 'other'; text from text" in capsys.readouterr().out
    assert "| topics | f1 of 'other' |" in (tmp_path / "out" / "table.md").read_text()
    assert "| score (f1 of 'other') |" in (model_of(tmp_path / "out") / "README.md").read_text()
