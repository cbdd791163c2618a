"""`python -m tasks.finetune`, end to end on small files and encoders."""

import contextlib
import io
import json
import random
import re
import shutil

import numpy as np
import pytest
import torch
import transformers

from megatron_ddrp.tasks.finetune.command import main
from megatron_ddrp.tasks.finetune.table_files import conll_text, read_rows
from tests.refusals import refused, wrong_arguments
from tests.unit.tasks.conftest import GLANCE, WORDS, model_of, predict, rows, sentences, words, write_bert, write_topics

LEARN = ["--lr", "1e-2", "--batch-size", "8", "--epochs", "8", "--seeds", "2"]


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """Return a folder with `topics`, `bert` and `out`, the sweep that learnt them, and what the command printed."""
    folder = tmp_path_factory.mktemp("learned")
    files = write_topics(folder / "topics")
    command = words(files, write_bert(folder / "bert"), folder / "out", "--test", files / "new.jsonl", *LEARN)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(command) == 0
    return folder, printed.getvalue()


def test_three_classes_are_learned_told_and_kept(learned):
    folder, printed = learned
    out = folder / "out"
    assert "classification, accuracy; text from text, label from label" in printed
    assert "train: animal " in printed and "always the most frequent label: " in printed
    first, second = rows(out)
    facts = [first[key] for key in ("task", "metric", "dev_examples", "head")]
    assert facts == ["topics", "accuracy", 21, "family"]
    best, model = max(first, second, key=lambda row: row["score"]), model_of(out)
    assert best["score"] > first["baseline"] + 0.1
    assert "| (constant guess) |" in (out / "table.md").read_text()
    card = (model / "README.md").read_text()
    for told in (
        f"| score (accuracy) | {best['score']:.4f} on 21 development examples |",
        f"| score of always the most frequent label | {best['baseline']:.4f} |",
        *("bert, fine-tuned on topics", "pipeline_tag: text-classification"),
        "AutoModelForSequenceClassification.from_pretrained",
    ):
        assert told in card
    assert str(folder) not in card
    kept = json.loads((model / "config.json").read_text())
    assert kept["finetuned"]["score"] == best["score"]
    assert kept["id2label"] == {"0": "animal", "1": "colour", "2": "other"}
    told = [json.loads(line) for line in (out / "predictions" / f"{model.name}-test.jsonl").read_text().splitlines()]
    assert [row["id"] for row in told] == list(range(9))
    assert {row["prediction"] for row in told} <= {"animal", "colour", "other"}


def test_a_dry_run_says_what_was_read_and_what_is_left_to_do(learned, tmp_path, capsys):
    folder, _ = learned
    twin = shutil.copytree(folder / "bert", tmp_path / "twin")
    more = ("--test", folder / "topics" / "new.jsonl", *LEARN, "--dry-run", "--load", folder / "bert", twin)
    main(words(folder / "topics", folder / "bert", folder / "out", *more))
    said = capsys.readouterr().out
    assert "0 of 2 runs to do" in said and "  topics: valid: animal 4, colour 8, other 9" in said
    assert "left out, it has the same weights as" in said
    assert "    rows are cut to 16 pieces: the encoder was trained on no longer rows\n" in said
    assert "test: 9 rows without labels, to be predicted (no column 'label', it has id, text)" in said


@pytest.mark.parametrize("checkpoint_folder", ["ddrp"], indirect=True)
def test_a_pair_regression_in_csv(checkpoint_folder, tmp_path):
    for name, count, seed in (("train", 48, 0), ("valid", 16, 1)):
        lines = ["id,sentence1,sentence2,score"]
        pairs = zip(sentences(count, seed), sentences(count, seed + 9), strict=True)
        for number, ((first, _), (second, _)) in enumerate(pairs):
            lines.append(f"{number},{first},{second},{len(set(first.split()) & set(second.split())):.1f}")
        (tmp_path / f"{name}.csv").write_text("\n".join(lines) + "\n")
    row, stored, folder = tuned(tmp_path, ".csv", checkpoint_folder, "--metric", "spearman", "--name", "alike")
    assert (row["metric"], row["facts"]["kind"], row["baseline"]) == ("spearman", "regression", None)
    assert row["scales_labels"]
    told = predict(folder, tmp_path / "valid.csv", tmp_path / "told.tsv")
    header, first, *_ = (line.split("\t") for line in told.read_text().splitlines())
    assert header == ["id", "sentence1", "sentence2", "score", "prediction"]
    assert np.isfinite(float(first[4])) and float(first[4]) == pytest.approx(stored[0], rel=1e-4, abs=1e-4)


def test_several_labels_at_once_from_a_task_file(bert_folder, out, tmp_path):
    for name, count, seed in (("a", 64, 0), ("b", 21, 1)):
        given = [text for text, _ in sentences(count, seed)]
        kinds = [{("animal", "colour", "other")[WORDS.index(word) // 3] for word in text.split()} for text in given]
        lines = [{"body": text, "topics": sorted(own)} for text, own in zip(given, kinds, strict=True)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    path = tmp_path / "topics-of.yaml"
    path.write_text("train: a.jsonl\nvalid: b.jsonl\ntext-column: body\nlabel-column: topics\n")
    main(["--task-file", str(path), "--load", str(bert_folder), "--output-dir", str(out), *LEARN])
    row = rows(out)[0]
    assert (row["task"], row["metric"], row["facts"]["kind"]) == ("topics-of", "f1", "multi-label")
    assert row["score"] > 0.7
    told = predict(model_of(out), tmp_path / "b.jsonl", tmp_path / "told.jsonl")
    assert all(set(json.loads(line)["prediction"]) <= {"animal", "colour", "other"} for line in told.open())
    wrong_arguments("told.jsonl: exists already", predict, model_of(out), tmp_path / "b.jsonl", told)


def test_wrong_arguments_exit_with_2(tmp_path):
    for line, message in {
        "--train x.jsonl": "--load is needed",
        "--train x.jsonl --load y": "--valid is needed, or a --task-file",
        "--train x --task-file y --load z": "--task-file and the flags of a task exclude each other",
        "--task-file no.yaml --load z": "no.yaml: no such file; expected YAML with keys",
        "--load z --learning-rate 1e-4": "unrecognized arguments: --learning-rate 1e-4; use --lr",
        "--load z --validation_file v.csv": "unrecognized arguments: --validation_file v.csv; use --valid",
    }.items():
        wrong_arguments(re.escape(message), main, [*line.split(), "--output-dir", str(tmp_path)])


def test_labelled_test_files_and_their_groups_are_scored_beside_and_choose_nothing(topics, bert_folder, out, tmp_path):
    """Each has an interval and differences of its own, and its score is that of its rows in the predictions."""
    lines = [json.loads(line) for line in (topics / "train.jsonl").read_text().splitlines()]
    lines = [row | {"field": ["books", "a  b"][number % 3 == 0]} for number, row in enumerate(lines)]
    (topics / "far.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    twin = write_bert(tmp_path / "twin", spread=0.3)
    tests = ("--test", f"far={topics / 'far.jsonl'}", topics / "new.jsonl", "--test-groups", "field")
    main(words(topics, bert_folder, out, *GLANCE[:-1], "2", *tests, "--epochs", "2", "--load", bert_folder, twin))
    row = rows(out)[0]
    scores, sizes = row["other_scores"], {"far": 64, "far/books": 42, "far/a b": 22}
    assert row["dev_examples"] == 21 and len(row["epoch_scores"]) == 2
    assert row["other_examples"] == sizes and scores.keys() == sizes.keys()
    files, _, predicted, labels = map(np.array, stored_predictions(out, row))
    for file, score in scores.items():
        right = (predicted == labels)[files == file]
        assert len(right) == sizes[file] and score == pytest.approx(right.mean())
    assert (predicted[files == "far"][::3] == predicted[files == "far/a b"]).all()
    table, told = (out / "table.md").read_text(), json.loads((out / "table.json").read_text())
    assert all(f"| topics ({file}) | accuracy |" in table for file in scores)
    ours, theirs = (told["encoders"][str(load)]["tasks"]["topics"] for load in (bert_folder, twin))
    assert all(low <= ours["other_medians"][file] <= high for file, (low, high) in ours["others_over_items"].items())
    assert [gain["file"] for gain in told["differences"]] == [None, "far", "far/a b", "far/books"]
    for gain in told["differences"][1:]:
        file, (low, high) = gain["file"], gain["over_items"]
        assert gain["mean"] == pytest.approx(ours["other_medians"][file] - theirs["other_medians"][file])
        assert low <= gain["mean"] <= high
    assert len([*(out / "predictions").glob("*-new.jsonl")]) == 2


def test_runs_on_other_data_keep_a_model_table_and_predictions_of_their_own(topics, bert_folder, out, capsys):
    """Also after the model of the first data is gone."""
    path = topics / "valid.jsonl"
    command = words(topics, bert_folder, out, *GLANCE, "--test", topics / "new.jsonl")
    main(command)
    first, table, before = model_of(out), (out / "table.md").read_text(), path.read_text()
    kept = {file: file.read_bytes() for file in (*first.iterdir(), out / "predictions" / f"{first.name}-test.jsonl")}
    capsys.readouterr()
    changed = before.replace('"label": "other"', '"label": "animal"')
    path.write_text(changed)
    main(command)
    assert (out / "table.md").read_text() != table
    (second,) = (folder for folder in (out / "models").iterdir() if folder != first)
    data = json.loads((second / "config.json").read_text())["finetuned"]["data"]
    assert second.name == f"{first.name}-{data[:8]}" and data == rows(out)[1]["data"] != rows(out)[0]["data"]
    said = capsys.readouterr().out
    assert f"is in {second} ({first} keeps that of other files or settings); to use it: megatron-ddrp" in said
    assert f"predictions for {topics / 'new.jsonl'} are in {out}/predictions/{second.name}-test.jsonl" in said
    assert {file: file.read_bytes() for file in kept} == kept and {*first.iterdir()} < {*kept}
    path.write_text(before)
    main(command)
    assert (out / "table.md").read_text() == table
    assert f"the best model of {bert_folder} is in {first}; to use it: " in capsys.readouterr().out
    path.write_text(changed)
    shutil.rmtree(first)
    main(command)
    said = capsys.readouterr().out
    assert model_of(out) == second and f"is in {second};" in said and f"({first} keeps" not in said
    assert len(rows(out)) == 2


def test_cut_rows_are_counted_and_f1_of_two_labels_names_the_positive_one(topics, bert_folder, out, tmp_path, capsys):
    long = json.dumps({"text": " ".join(["red cat"] * 20), "label": "colour", "id": 9})
    for name, count in (("train", 3), ("valid", 0), ("new", 2)):
        path = topics / f"{name}.jsonl"
        path.write_text(path.read_text().replace('"animal"', '"other"') + count * f"{long}\n")
    main(words(topics, bert_folder, out, *GLANCE, "--max-seq-length", "16", "--metric", "f1"))
    said, warned = capsys.readouterr()
    assert "warning: topics, train: 3 of 67 rows are longer than 16 pieces and are cut\n" in warned
    assert "topics, valid:" not in warned
    assert "classification, f1 of 'other'; text from text" in said
    assert "| topics | f1 of 'other' |" in (out / "table.md").read_text()
    assert "| score (f1 of 'other') |" in (model_of(out) / "README.md").read_text()
    predict(model_of(out), topics / "new.jsonl", tmp_path / "told.jsonl")
    assert "new.jsonl: 2 of 11 rows are longer than 16 pieces and are cut\n" in capsys.readouterr().err


QUICK = ["--lr", "1e-2", "--batch-size", "16", "--epochs", "2", "--seeds", "1"]


def stored_predictions(out, row):
    """Return the columns of a run's file of predictions: file, index, prediction and label of each row."""
    _, *lines = (out / row["predictions"]).read_text().splitlines()
    return list(zip(*(line.split("\t") for line in lines), strict=True))


def tuned(folder, ending, load, *more):
    """Train on train.ENDING, score valid.ENDING; return the row of runs.jsonl, predictions and the model's folder."""
    out = folder / "out"
    files = ["--train", folder / f"train{ending}", "--valid", folder / f"valid{ending}"]
    main([str(word) for word in (*files, "--load", load, "--output-dir", out, *QUICK, *more)])
    (row,) = rows(out)
    return row, [json.loads(prediction) for prediction in stored_predictions(out, row)[2]], model_of(out)


def test_tags_are_kept_predicted_and_written_as_conll(bert_folder, tmp_path, capsys):
    """Colours and animals are entities of one word or more."""
    draw = random.Random(2)
    for name, count in (("train", 64), ("valid", 12)):
        text = "-DOCSTART- O\n\n"
        for _ in range(count):
            words = [draw.choice(WORDS) for _ in range(draw.randrange(2, 30))]
            kinds = [("COLOUR", "ANIMAL", None)[WORDS.index(word) // 3] for word in words]
            before = [None, *kinds]
            tags = ["O" if k is None else f"{'I' if k == b else 'B'}-{k}" for k, b in zip(kinds, before, strict=False)]
            text += conll_text(words, tags)
        (tmp_path / f"{name}.conll").write_text(text)
    row, stored, folder = tuned(tmp_path, ".conll", bert_folder)
    assert "tokens, seqeval; text from tokens, label from tags" in capsys.readouterr().out
    assert row["metric"] == "seqeval" and row["dev_examples"] == 12
    assert row["score"] > 0.3 > row["baseline"]
    valid = [row.cells for row in read_rows(str(tmp_path / "valid.conll"))]
    (tmp_path / "words.conll").write_text("\n\n".join("\n".join(cells["tokens"]) for cells in valid))
    told = predict(folder, tmp_path / "words.conll", tmp_path / "told.conll")
    expected = [{"tokens": cells["tokens"], "tags": tags} for cells, tags in zip(valid, stored, strict=True)]
    assert [row.cells for row in read_rows(str(told))] == expected
    model = transformers.AutoModelForTokenClassification.from_pretrained(folder).eval()
    (short, tags) = next((c["tokens"], t) for c, t in zip(valid, stored, strict=True) if len(c["tokens"]) < 10)
    ids = torch.tensor([[2, *(5 + WORDS.index(word) for word in short), 3]])
    logits = model(ids).logits[0, 1:-1]
    assert [model.config.id2label[number] for number in logits.argmax(dim=-1).tolist()] == tags


@pytest.mark.parametrize("checkpoint_folder", ["ddrp"], indirect=True)
def test_answers_are_kept_predicted_and_written_for_squads_script(checkpoint_folder, tmp_path, capsys):
    """The questions are for the animal; every third has no answer."""
    draw = random.Random(3)
    for name, count in (("train", 48), ("valid", 9)):
        paragraphs = []
        for number in range(count):
            words = [draw.choice(WORDS[:3] + WORDS[6:]) for _ in range(draw.randrange(2, 30))]
            words[0] = draw.choice(WORDS[3:6]) if number % 3 else words[0]
            answers = [{"text": words[0], "answer_start": 0}] if number % 3 else []
            question = {"id": f"{name}-{number}", "question": "sleeps", "answers": answers}
            paragraphs.append({"context": " ".join(words), "qas": [question]})
        (tmp_path / f"{name}.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    more = ("--metric", "exact-match", "--name", "squad", "--epochs", "8")
    row, stored, folder = tuned(tmp_path, ".json", checkpoint_folder, *more)
    printed = capsys.readouterr().out
    assert "qa, exact-match; text from question + context, label from answers" in printed
    assert "train: no answer 16" in printed
    assert 0.8 < row["score"] == row["epoch_scores"][-1] <= row["beside"]["f1"]
    assert f"| squad | f1 | {100 * row['beside']['f1']:.2f} |" in printed
    assert main(["--report", str(tmp_path / "out"), "--output-dir", str(tmp_path / "again")]) == 0
    assert (tmp_path / "again" / "table.md").read_text() == (tmp_path / "out" / "table.md").read_text()
    told = json.loads(predict(folder, tmp_path / "valid.json", tmp_path / "told.json").read_text())
    assert told == {f"valid-{number}": answer for number, answer in enumerate(stored)}
    said = r"told.conll: expected a name that ends in .jsonl, .csv, .tsv, .json$"
    refused(said, predict, folder, tmp_path / "valid.json", tmp_path / "told.conll")
