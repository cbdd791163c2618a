"""Task files: labels as people write them, test files without labels, and files that `predict` writes."""

import csv
import datetime
import decimal
import hashlib
import io
import itertools
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_ddrp.data.atomic import take_lock
from megatron_ddrp.encoders.rows import Encoded, chunks
from megatron_ddrp.tasks.finetune import task_files
from megatron_ddrp.tasks.finetune.command import main
from megatron_ddrp.tasks.finetune.kinds import KINDS
from megatron_ddrp.tasks.finetune.kinds.contract import JsonLinesFile, TableFile
from megatron_ddrp.tasks.finetune.options import TaskFiles, read_task_file
from megatron_ddrp.tasks.finetune.runs import Cell
from megatron_ddrp.tasks.finetune.table_files import Columns, Task, read_rows
from megatron_ddrp.tasks.finetune.task_files import FineTuned, read_task
from tests.refusals import refused, wrong_arguments
from tests.unit.tasks.conftest import GLANCE, words


def read_two(folder, train, valid, ending=".csv", **more):
    """Read a task from the texts of a training and a validation file."""
    paths = [folder / f"{name}{ending}" for name in ("train", "valid")]
    for path, text in zip(paths, (train, valid), strict=True):
        path.write_text(text)
    return read_task(TaskFiles(*paths, **more))


def read(folder, labels, **more):
    """Read a task whose rows have these labels; lists are labels in JSON lines."""
    lists = isinstance(labels[0], list)
    path = folder / ("train.jsonl" if lists else "train.csv")
    lines = [json.dumps({"text": "x", "labels": each}) if lists else f'x,"{each}"' for each in labels]
    path.write_text("".join(f"{line}\n" for line in ([] if lists else ["text,label"]) + lines))
    return read_task(TaskFiles(train=path, valid=path, **more))


def read_tags(folder, train, valid, metric="seqeval-strict"):
    """Read a task whose training rows are `train`, and whose validation rows are `valid`: tags with blanks between."""
    texts = ["", ""]
    for place, rows in enumerate((train, valid)):
        for row in rows:
            tags = [tag if tag == "O" else f"{tag}-PER" for tag in row.split()]
            texts[place] += json.dumps({"tokens": ["x"] * len(tags), "tags": tags}) + "\n"
    return read_two(folder, *texts, ".jsonl", metric=metric)


def fault(call, *arguments, **more):
    """Return what a call is refused with, from the name of the file."""
    return str(refused("/", call, *arguments, **more)).rpartition("/")[2]


VECTORS = [[1, 0, 0], [0, 0], [True, False, True], [1, 1]]
WHOLE = [str(number % 5) for number in range(1000)]
"""More rows than those from which the kind of a task is guessed."""


BAD_LABELS = [
    (["A|B", '[""A"", ""B""]'], "multi-label", """, line 3: label is '["A", "B"]', expected labels with | between"""),
    (["1,5", "2,5"], None, ": labels look like numbers with a decimal comma, such as 1,5; write 1.5, or name the kind"),
    (["1,5"], "regression", ", line 2: label is '1,5', expected a number such as 1.5; mend or remove the row"),
    (["1.5", "NA"], None, ", line 3: label is 'NA', expected a number such as 1.5; mend"),
    (["1.5", ""], None, ", line 3: label is '', expected a number such as 1.5; mend"),
    (["1.5", "1_5"], "regression", ", line 3: label is '1_5', expected a number such as 1.5; mend"),
    (["1.5", "1e39"], "regression", ", line 3: label is '1e39', expected at most 3.40282e+38 in size; use another"),
    ([*WHOLE, "2.5"], None, ": labels look like whole numbers in the first rows and like 2.5 in later ones; name the"),
    *(([[1], each], None, f", line 2: label is {each}, a vector of 0 and 1; write a list of the") for each in VECTORS),
    (["A", "A"], None, ": all rows have the label 'A', expected two labels or more"),
    ([[0, 1], [1, 0]], None, ": every row has the labels 0 and 1, as vectors of 0 and 1 do"),
]
BAD_COLUMNS = [
    ({"text_column": "label"}, "column 'label' is --text-column and --label-column at once"),
    ({"text_pair_column": "label"}, "column 'label' is --text-pair-column and --label-column at once"),
    ({"text_pair_column": "text"}, "column 'text' is --text-column and --text-pair-column at once"),
]


@pytest.mark.parametrize(("columns", "told"), BAD_COLUMNS)
def test_a_column_with_two_uses_is_refused(tmp_path, columns, told):
    wrong_arguments(told, read, tmp_path, ["A", "B"], **columns)


def test_labels_are_read_as_the_named_kind_and_those_of_another_are_refused(tmp_path):
    """Read as lists, the vectors of two classes have the same labels, and a model that says both is perfect."""
    for labels, kind, told in BAD_LABELS:
        said = fault(read, tmp_path, labels, kind=kind)
        assert said.partition(".")[2].removeprefix("csv").removeprefix("jsonl").startswith(told)
    said = fault(read_two, tmp_path, "text,label\nx,A\ny,B\n", "text,label\nx,odd\n")
    assert said == "valid.csv, line 2: label 'odd' is in no row of the training file; it has A, B"
    for labels, kind, expected in (
        *((["1,5", "2,5"], "classification", ("1,5", "2,5")), (["1,5", "x"], None, ("1,5", "x"))),
        *(([*WHOLE, "2.5"], "classification", (*"01", "2", "2.5", *"34")), ([*WHOLE, "2.5"], "regression", ())),
        *(([[3, 1], [1], [], [0]], None, ("0", "1", "3")), ([[0, 1], [1]], None, ("0", "1"))),
        ([["a", "b"]], None, ("a", "b")),
    ):
        assert read(tmp_path, labels, kind=kind).task.labels == expected


@pytest.mark.parametrize(
    ("labels", "order"),
    [("+1 -1", "-1 +1"), ("1 -1", "-1 1"), ("1.0 -1.0", "-1.0 1.0"), ("+1 +0", "+0 +1"), ("1e0 -1e0", "-1e0 1e0")]
    + [("10 +9 -10", "-10 +9 10"), (f"{10**20 + 1} {10**20}", f"{10**20} {10**20 + 1}"), ("+1 -1 x", "+1 -1 x")],
)
def test_labels_that_are_numbers_are_sorted_by_size(tmp_path, labels, order):
    metric = "f1" if len(order.split()) == 2 else None
    data = read(tmp_path, labels.split(), kind="classification", metric=metric)
    assert data.task.labels == tuple(order.split())
    assert not metric or data.facts[0].startswith(f"classification, f1 of {order.split()[1]!r}; ")


def test_labels_that_look_alike_and_whole_numbers_with_a_point_are_told(tmp_path):
    """pandas writes whole numbers with a point once one of them was missing."""
    for pair in (("A", "A "), ("O\u0308ff", "\u00d6ff")):
        (told,) = (fact for fact in read(tmp_path, ["B", *pair]).facts if "Unicode" in fact)
        assert told.startswith("WARNING, labels that differ only in blanks or Unicode form are different classes: ")
        assert all(ascii(label) in told for label in pair) and told.isascii()
    assert not any("Unicode" in fact for fact in read(tmp_path, ["B", "A", "a"]).facts)
    told = "valid: all labels are whole numbers; if they are classes, name another --kind than regression"
    assert told in read(tmp_path, ["1.0", "0.0"]).facts
    assert told not in read(tmp_path, ["1.0", "0.5"]).facts
    assert told not in read(tmp_path, ["1.0", "0.0"], kind="regression").facts


def test_the_name_of_a_score_has_its_positive_label(tmp_path):
    data = read(tmp_path, ["ja", "nein"], metric="f1")
    assert data.facts[0] == "classification, f1 of 'nein'; text from text, label from label"
    assert data.task.metric == "f1"
    assert KINDS["multi-label"].score_name(Task("t", "f1", "multi-label", ("a", "b"))) == "f1"
    facts = Task("own", "kappa", "classification", ("a", "b")).facts | {"kind": "own"}
    own = {"task": "own", "score": 0.5, "dev_examples": 1, "metric": "own", "facts": facts}
    found = {"t": {"metric": "f1", "facts": data.task.facts}, "MRPC": {"metric": "f1"}, "own": own}
    assert [Cell(name, [row]).score_name for name, row in found.items()] == ["f1 of 'nein'", "f1", "own"]


def test_the_plan_names_the_scheme_of_tags_and_counts_what_breaks_it(tmp_path):
    for train, valid, scheme, broken in (
        *(("O B I B", "B I O B B", "IOB2", ""), ("B I O", "B I O I I B", "IOB2", "1 of 2, such as I- I- B-")),
        *(("O I E E", "I E O E", "IOE2", ""), ("O I E", "I E O E I", "IOE2", "1 of 2, such as E- I-")),
        *(("B I E S O", "S O B E", "IOBES", ""), ("B I E S O", "S I O I I", "IOBES", "2 of 2")),
        *(("B I L U O", "B O U", "BILOU", "1 of 2"), ("O B I", "O O", "IOB2", "")),
    ):
        facts = read_tags(tmp_path, [train], [valid]).facts
        assert facts[0] == f"tokens, seqeval-strict ({scheme}); text from tokens, label from tags"
        told = [fact for fact in facts if "break the rules" in fact]
        count, _, example = broken.partition(",")
        of_scheme = f"groups of neighbouring tags of one type break the rules of {scheme},{example}"
        assert len(told) == bool(broken)
        assert all(fact.startswith(f"valid: WARNING, {count} {of_scheme}") for fact in told)


UNRULED = [
    ("O B I", "I O I I B O I", "seqeval-strict", "valid.jsonl: its tags are of IOB1, for which --metric seqeval-"),
    ("O I E", "I O I E I O I", "seqeval-strict", "valid.jsonl: its tags are of IOE1, for which --metric seqeval-"),
    ("O I", "I O", "seqeval-strict", "train.jsonl: tags with I- have no strict rules, expected IOB2 (B- I-), IOE2"),
    ("O B M E", "O", "seqeval", "train.jsonl: tag 'M-PER', expected O, or B- or I- and a type, such as B-PER (also"),
]


@pytest.mark.parametrize(("train", "valid", "metric", "reason"), UNRULED)
def test_tags_without_rules_are_refused_by_name(tmp_path, train, valid, metric, reason):
    refused(re.escape(reason), read_tags, tmp_path, [train], [valid], metric)


def test_runs_that_earlier_versions_scored_by_other_rules_are_done_again(tmp_path):
    """They scored all tags as IOB2, and the digest of a task was that of its facts, columns and files."""
    for rows, is_same in ((["B I O"], True), (["B E O"], False)):
        data = read_tags(tmp_path, rows, rows)
        before = hashlib.sha256(json.dumps([data.task.facts, list(data.columns)]).encode())
        before.update(2 * hashlib.sha256((tmp_path / "train.jsonl").read_bytes()).digest())
        assert (data.digest == before.hexdigest()) == is_same


def test_labels_and_tags_on_which_no_model_has_a_score_are_warned_of(tmp_path):
    for metric, train, valid, is_told in (
        *(("matthews", "no yes", "yes yes", True), ("f1", "no yes", "no no", True), ("f1", "no yes", "no yes", False)),
        *(("accuracy", "no yes", "yes yes", False), ("pearson", "1.5 2.5", "2.5 2.5", True)),
        *(("spearman", "1.5 2.5", "1.5", True), ("pearson", "1.5 2.5", "1.5 3.5", False)),
    ):
        kind = "regression" if "." in train else "classification"
        rows = ["text,label\n" + "".join(f"x,{label}\n" for label in labels.split()) for labels in (train, valid)]
        told = f"WARNING, no model scores above 0 by {metric} on its labels: they are all alike, or none is positive"
        assert (f"valid: {told}" in read_two(tmp_path, *rows, metric=metric, kind=kind).facts) == is_told
    for metric in ("seqeval", "seqeval-strict"):
        for valid, is_told in (["O O"], True), (["O B"], False):
            facts = read_tags(tmp_path, ["O B I"], valid, metric).facts
            assert any(f"no model scores above 0 by {metric}" in fact for fact in facts) == is_told


def test_quotation_marks_that_a_program_has_put_into_a_tsv_are_warned_of(tmp_path):
    rows = 'text\tlabel\n"He said ""no""."\tA\n"open\tB\n"whole"\tA\n"a" and "b"\tB\n'
    told = "train: WARNING, 1 rows have texts in quotation marks with doubled marks inside; in .tsv they are text"
    found = [fact[: len(told)] for fact in read_two(tmp_path, rows, rows + "x\tA\n", ".tsv").facts if "marks" in fact]
    assert found == [told, told.replace("train", "valid")]
    rows = 'text,label\n"""He said """"no"""".""",A\nx,B\n'  # quoted again, so that the marks are text here too
    assert not any("marks" in fact for fact in read_two(tmp_path, rows, rows).facts)


NO_LABEL = "WARNING, label -1 is how Hugging Face's datasets mark rows without a label; it is a class here: "
TOLD = {"mark": f"{NO_LABEL}remove these rows", "scale": f"{NO_LABEL}unless the labels are a scale, remove these rows"}


@pytest.mark.parametrize(
    ("labels", "expected"),
    [("-1 0 1 2", ["mark"]), ("-1 0 1 2 3", ["mark"]), ("-1 0 1", ["scale"]), ("0 1 2 3", []), ("-2 -1 0 1", [])],
)
def test_the_mark_of_rows_without_a_label_is_no_silent_class(tmp_path, labels, expected):
    """SNLI has it; three labels from -1 may be a scale from negative to positive."""
    facts = read(tmp_path, labels.split()).facts
    assert [name for name, told in TOLD.items() if told in facts] == expected


@pytest.mark.parametrize(
    ("header", "read_as"),
    [("index,question,sentence", "question + sentence"), ("index,sentence,question", "question + sentence")]
    + [("index,question,context", "question + context"), ("index,sentence,other", "sentence")]
    + [("index,question,other", "question"), ("text,question,sentence", "text")],
)
def test_a_question_and_its_sentence_are_a_pair(tmp_path, header, read_as):
    """GLUE's QNLI has these columns, and its sentences alone do not decide the labels."""
    rows = header + ",label\n0,x,y,A\n1,z,w,B\n"
    assert f"text from {read_as}, label" in read_two(tmp_path, rows, rows).facts[0]


def test_a_file_or_rows_that_stand_in_another_one_or_in_the_text_of_pre_training_are_told(tmp_path):
    """Case, blanks and signs between words do not hide rows; a text of seven words is too short to count."""
    rows, told = "text,label\nx,A\ny,B\n", "WARNING, the same file as"
    assert f"valid: {told} train" in " ".join(read_two(tmp_path, rows, rows).facts)
    facts = read_two(tmp_path, rows, rows + "z,A\n", test=(str(tmp_path / "valid.csv"),)).facts
    expected = [f"test: {told} valid; its score says nothing about new rows"]
    assert [fact for fact in facts if "same file" in fact] == expected
    long, short = "One two, three four five six seven eight NINE!", "one two three four five six seven"
    pre = tmp_path / "pre.jsonl"
    pre.write_text("".join(json.dumps({"text": text}) + "\n" for text in (f"zero. {long.lower()} ten", short, "a b c")))
    train = f'text,label\n"{long}",A\nNew row,B\n{short},A\n'
    valid = 'text,label\nnew  ROW,A\nold row,B\n"zero one two three four five six seven ate",A\n'
    facts = read_two(tmp_path, train, valid, pretraining_text=(str(pre),)).facts
    of_text = "have a text of 8 words or more that stands in the pre-training text"
    expected = ["valid: WARNING, 1 of 3 rows have texts that stand in train too"]
    expected += [f"train: 1 of 3 rows {of_text}", f"valid: 0 of 3 rows {of_text}"]
    assert [fact for fact in facts if "rows have" in fact] == expected


def test_test_files_of_one_name_and_groups_that_are_none_are_refused(tmp_path):
    rows = "text,label\n" + "".join(f"x{number},{'AB'[number % 2]}\n" for number in range(21))
    for tests, groups, told in (
        ("a.csv b/a.tsv", None, "--test b/a.tsv: there is a file called a already; give this one a name: NAME=b/a.tsv"),
        ("train=a.csv", None, "--test train=a.csv: there is a file called train already"),
        ("valid.csv", "text", "column 'text' has 21 values, expected at most 20 for --test-groups"),
        ("valid.csv", "field", "valid.csv, line 2: no column 'field', it has text, label"),
    ):
        given = tuple(tests.replace("valid", f"{tmp_path}/valid").split())
        refused(re.escape(told), read_two, tmp_path, rows, rows, test=given, test_groups=groups)


def test_a_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / "train.csv")
    said = "train.csv: a pipe, but its rows are read several times"
    refused(said, read_task, TaskFiles(tmp_path / "train.csv", tmp_path / "valid.csv"))


def test_names_come_from_the_line_or_from_the_files(tmp_path):
    text = "train: a.csv\nvalid: b.csv\ntest: [near=c.csv, d.x.csv]\npretraining-text: p.txt\n"
    (tmp_path / "t.yaml").write_text(text)
    files = read_task_file(tmp_path / "t.yaml")
    assert files.tests == {"near": tmp_path / "c.csv", "d": tmp_path / "d.x.csv"}
    assert files.pretraining_text == (str(tmp_path / "p.txt"),) and files.test_facts() == ["near", "d", None]
    assert TaskFiles(test=("a=b/c.csv",)).tests == {"a": Path("b/c.csv")}
    assert TaskFiles(test=("a/b=c.csv",)).tests == {"test": Path("a/b=c.csv")}
    assert TaskFiles(test=("new=year=2024/c.csv",)).tests == {"new": Path("year=2024/c.csv")}
    place = tmp_path / "year=2024"
    place.mkdir()
    (place / "t.yaml").write_text("train: a.csv\nvalid: b.csv\ntest: [new rows.csv, c.csv]\n")
    assert read_task_file(place / "t.yaml").tests == {"new rows": place / "new rows.csv", "c": place / "c.csv"}
    assert TaskFiles(test=("c.csv",)).test_facts() == TaskFiles().test_facts() == []
    names = {"reviews-train.csv": "reviews", "reviews.csv.gz": "reviews", "topics/train.csv": "topics"}
    names |= {"topics/train-1.csv": "topics", "constrain.csv": "constrain", "trains.csv": "trains"}
    assert {train: TaskFiles(Path("data", train)).task_name for train in names} == names
    both = TaskFiles(Path("a"), Path("b"), test_groups="field")
    wrong_arguments("--test-groups needs --test, whose rows it divides", both.require)
    assert TaskFiles(Path("data/topics/train.csv"), name="of mine").task_name == "of-mine"


def test_the_columns_of_words_and_the_most_frequent_tag_of_most_words(tmp_path):
    rows = json.dumps({"tokens": ["red", "cat"], "ner_tags": ["B-A", "O"], "label": "x", "more": "a text"}) + "\n"
    data = read_two(tmp_path, rows, rows, ".jsonl")
    assert data.facts[0] == "tokens, seqeval; text from tokens, label from ner_tags"
    said = r"line 1: --text-pair-column more: words have no second text; leave the flag"
    refused(said, read_two, tmp_path, rows, rows, ".jsonl", text_pair_column="more")
    lines = (("red green dog runs", "A A A V"), ("runs", "V"))
    text = "".join(json.dumps({"tokens": said.split(), "tags": tags.split()}) + "\n" for said, tags in lines)
    assert read_two(tmp_path, text, text, ".jsonl", kind="tokens", metric="accuracy").baseline == 3 / 5


def test_a_test_file_with_a_column_of_predictions_is_refused_before_anything_is_loaded(topics, out, tmp_path):
    (topics / "test.jsonl").write_text(json.dumps({"text": "red cat", "prediction": "x"}) + "\n")
    command = words(topics, tmp_path / "no-such-encoder", out, "--test", topics / "test.jsonl")
    refused("test.jsonl, line 1: there is a column 'prediction' already; rename it", main, command)


def written(writer, ending, cells, prediction):
    """Return the last line that a writer of predictions writes for a row of cells."""
    stream = io.BytesIO()
    writer(stream, ending, Columns("text", None, "label"), KINDS["classification"].cell_text).write(cells, prediction)
    return stream.getvalue().decode().splitlines()[-1]


def test_cells_of_a_parquet_file_are_written_as_text_and_those_without_a_value_as_none():
    """A label is written as other columns are. A Parquet file has null and nan, and JSON has no nan."""
    day = datetime.date(2026, 1, 2)
    cells = {"1.50": decimal.Decimal("1.50"), "2026-01-02": day, "true": True, '["2026-01-02"]': [day]}
    for text, cell in cells.items():
        line = written(TableFile, ".tsv", {"note": cell, "label": cell}, "red")
        assert line.split("\t") == [text, text, "red"]
    told = json.loads(written(JsonLinesFile, ".jsonl", {"day": day}, "red"))
    assert told == {"day": "2026-01-02", "prediction": "red"}
    empty = {"note": None, "number": float("nan"), "label": None}
    assert written(TableFile, ".csv", empty, None) == ",,,null"
    assert json.loads(written(JsonLinesFile, ".jsonl", empty, None)) == dict.fromkeys([*empty, "prediction"])
    for cell in (float("inf"), [float("nan")]):
        with pytest.raises(ValueError, match=r"number of a cell is nan or infinite, which JSON cannot hold; write \."):
            written(JsonLinesFile, ".jsonl", {"number": cell}, None)


def test_a_command_predicts_and_writes_while_no_other_may(topics, bert_folder, out, monkeypatch):
    """Two that end at the same moment write the same file of predictions."""
    predict = FineTuned.predict

    def predict_under_a_lock(model, encoded):
        (name,) = (folder.name for folder in (out / "models").iterdir() if folder.is_dir())
        with (out / "locks" / f"{name}.lock").open("ab") as stream:
            assert not take_lock(stream.fileno())
        return predict(model, encoded)

    monkeypatch.setattr(FineTuned, "predict", predict_under_a_lock)
    assert main(words(topics, bert_folder, out, *GLANCE, "--test", topics / "new.jsonl")) == 0
    assert len([*(out / "predictions").glob("*-test.jsonl")]) == 1


ANSWERS = {
    "classification": (Columns("text", None, "label"), "A"),
    "multi-label": (Columns("text", None, "labels"), ["A", "B"]),
    "qa": (Columns("question", "context", "answers"), "Ada"),
}
"""Kind → columns, and the prediction for every row."""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Predict rows of JSON lines with a model that gives one answer; return the path of the output."""

    def write(rows, ending, kind="classification", prediction=None):
        columns, usual = ANSWERS[kind]
        model = FineTuned(None, None, Task("t", "f1", kind, ("A", "B")), columns, 64, None)
        monkeypatch.setattr(task_files, "load_finetuned", lambda *_: model)
        answer = usual if prediction is None else prediction
        encoded = Encoded(np.empty(0), np.empty(0), np.empty(0), np.empty(0), 0)
        monkeypatch.setattr(FineTuned, "encode", lambda self, texts: replace(encoded, ends=np.zeros(len(texts))))
        monkeypatch.setattr(FineTuned, "predict", lambda self, encoded: [answer] * len(encoded))
        (tmp_path / "new.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        task_files.predict_file(tmp_path, tmp_path / "new.jsonl", tmp_path / f"told{ending}", None)
        return tmp_path / f"told{ending}"

    return write


def test_a_column_that_the_first_row_lacks_is_refused_in_tables(write):
    rows = [{"text": "one"}, {"text": "two", "akz": "1 ZR 2/20"}]
    for ending in (".csv", ".tsv"):
        assert fault(write, rows, ending) == "new.jsonl, line 2: column 'akz' is not in the first row; write .jsonl"
        assert [row.cells.get("akz") for row in read_rows(str(write(rows[::-1], ending)))] == ["1 ZR 2/20", ""]
    assert json.loads(write(rows, ".jsonl").read_text().splitlines()[1])["akz"] == "1 ZR 2/20"


def test_tsv_keeps_every_blank_and_counts_cells_that_it_changes(write, capsys):
    text = " § 433  Abs. 2\u2028BGB "
    path = write([{"text": text}, {"text": "a\tb\r\nc"}], ".tsv")
    assert [row.cells["text"] for row in read_rows(str(path))] == [text, "a b  c"]
    assert capsys.readouterr().err == f"{path}: cells whose tabs and line breaks became blanks: 1\n"
    write([{"text": text}], ".tsv")
    assert capsys.readouterr().err == ""


def test_csv_with_any_line_break_is_read_back(write):
    texts = ["a\rb", "c\r\nd", "e\nf", 'g "h", i']
    path = write([{"text": text} for text in texts], ".csv")
    assert [row.cells["text"] for row in read_rows(str(path))] == texts
    with path.open(newline="") as stream:
        assert [row["text"] for row in csv.DictReader(stream)] == texts


def test_two_questions_with_one_id_are_refused(write):
    row = {"question": "Who?", "context": "Ada."}
    told = "new.jsonl, line 2: an earlier question has the id '1' too, which .json cannot hold; write .jsonl or .csv"
    for second in ({"id": "1"}, {}):
        assert fault(write, [row | {"id": "1"}, row | second], ".json", "qa") == told
    assert json.loads(write([row, row], ".json", "qa").read_text()) == {"0": "Ada", "1": "Ada"}
    assert len(write([row | {"id": "1"}] * 2, ".jsonl", "qa").read_text().splitlines()) == 2


def test_several_labels_are_written_as_training_reads_them(write):
    for ending in (".csv", ".tsv"):
        (row,) = read_rows(str(write([{"text": "one", "labels": ["B", "A"]}], ending, "multi-label")))
        assert row.cells == {"text": "one", "labels": "B|A", "prediction": "A|B"}
        parted = "label 'a|b' has a |, which separates labels in "
        assert parted in fault(write, [{"text": "one"}], ending, "multi-label", ["a|b"])
    told = json.loads(write([{"text": "one"}], ".jsonl", "multi-label").read_text())
    assert told["prediction"] == ["A", "B"]


def test_rows_without_a_prediction_are_counted(write, monkeypatch, capsys):
    monkeypatch.setitem(ANSWERS, "tokens", (Columns("tokens", None, "tags"), ["O", "O"]))
    rows = [{"text": "one", "tokens": ["a", "b"]}] * 3
    for kind, answer in (("classification", None), ("multi-label", None), ("tokens", ["O", None])):
        write(rows, ".jsonl", kind)
        assert capsys.readouterr().err == ""
        monkeypatch.setitem(ANSWERS, kind, (ANSWERS[kind][0], answer))
        path = write(rows, ".jsonl", kind)
        told = f"{path}: rows without a prediction, since outputs are not finite: 3\n"
        assert capsys.readouterr().err == told


def test_a_file_is_checked_before_its_first_row_is_predicted(write, monkeypatch):
    monkeypatch.setattr(task_files, "chunks", lambda *_: pytest.fail("a row was predicted"))
    told = "new.jsonl, line 2: text is empty, expected text; fill it in or remove the row"
    assert fault(write, [{"text": "one"}, {"text": " "}], ".csv") == told


def test_a_file_that_grows_while_it_is_labelled_leaves_no_output(write, tmp_path, monkeypatch):
    def while_it_grows(rows, size):
        first = next(rows)
        with (tmp_path / "new.jsonl").open("a") as stream:
            stream.write('{"text": "more"}\n')
        return chunks(itertools.chain([first], rows), size)

    monkeypatch.setattr(task_files, "chunks", while_it_grows)
    refused("new.jsonl: changed after this command had read it", write, [{"text": "one"}], ".csv")
    assert not (tmp_path / "told.csv").exists()
