"""Files that `predict` writes: nothing is lost in silence, and every reader reads them back."""

import csv
import json
from dataclasses import replace

import numpy as np
import pytest

from megatron_ddrp.encoders.rows import Encoded
from megatron_ddrp.errors import UserError
from megatron_ddrp.tasks.finetune import task_files as predict
from megatron_ddrp.tasks.finetune.table_files import Columns, Task, read_rows
from megatron_ddrp.tasks.finetune.task_files import FineTuned, predict_file

KINDS = {
    "classification": (Columns("text", None, "label"), "A"),
    "multi-label": (Columns("text", None, "labels"), ["A", "B"]),
    "qa": (Columns("question", "context", "answers"), "Ada"),
}
"""Kind → columns, and the prediction for every row."""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Predict rows of JSON lines with a model that gives one answer; return the path of the output."""

    def write(rows, ending, kind="classification", prediction=None):
        columns, usual = KINDS[kind]
        model = FineTuned(None, None, Task("t", "f1", kind, ("A", "B")), columns, 64, None)
        monkeypatch.setattr(predict, "load_finetuned", lambda *_: model)
        answer = usual if prediction is None else prediction
        encoded = Encoded(np.empty(0), np.empty(0), np.empty(0), np.empty(0), 0)
        monkeypatch.setattr(FineTuned, "encode", lambda self, texts: replace(encoded, ends=np.zeros(len(texts))))
        monkeypatch.setattr(FineTuned, "predict", lambda self, encoded: [answer] * len(encoded))
        (tmp_path / "new.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        predict_file(tmp_path, tmp_path / "new.jsonl", tmp_path / f"told{ending}", None)
        return tmp_path / f"told{ending}"

    return write


def fault(write, *arguments):
    with pytest.raises(UserError) as refused:
        write(*arguments)
    return str(refused.value).rpartition("/")[2]


@pytest.mark.parametrize("ending", [".csv", ".tsv"])
def test_a_column_that_the_first_row_lacks_is_refused(write, ending):
    rows = [{"text": "one"}, {"text": "two", "akz": "1 ZR 2/20"}]
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
    assert fault(write, [row | {"id": "1"}] * 2, ".json", "qa") == told
    assert fault(write, [row | {"id": "1"}, row], ".json", "qa") == told
    assert json.loads(write([row, row], ".json", "qa").read_text()) == {"0": "Ada", "1": "Ada"}
    assert len(write([row | {"id": "1"}] * 2, ".jsonl", "qa").read_text().splitlines()) == 2


@pytest.mark.parametrize("ending", [".csv", ".tsv"])
def test_several_labels_are_written_as_training_reads_them(write, ending):
    path = write([{"text": "one", "labels": ["B", "A"]}], ending, "multi-label")
    (row,) = read_rows(str(path))
    assert row.cells == {"text": "one", "labels": "B|A", "prediction": "A|B"}
    parted = "label 'a|b' has a |, which separates labels in "
    assert parted in fault(write, [{"text": "one"}], ending, "multi-label", ["a|b"])
    told = json.loads(write([{"text": "one"}], ".jsonl", "multi-label").read_text())
    assert told["prediction"] == ["A", "B"]


def test_a_file_is_checked_before_its_first_row_is_predicted(write, monkeypatch):
    monkeypatch.setattr(predict, "chunks", lambda *_: pytest.fail("a row was predicted"))
    told = "new.jsonl, line 2: text is empty, expected text; fill it in or remove the row"
    assert fault(write, [{"text": "one"}, {"text": " "}], ".csv") == told


@pytest.mark.parametrize(("kind", "answer"), [("classification", None), ("multi-label", None), ("tokens", ["O", None])])
def test_rows_without_a_prediction_are_counted(write, monkeypatch, capsys, kind, answer):
    monkeypatch.setitem(KINDS, "tokens", (Columns("tokens", None, "tags"), ["O", "O"]))
    rows = [{"text": "one", "tokens": ["a", "b"]}] * 3
    write(rows, ".jsonl", kind)
    assert capsys.readouterr().err == ""
    monkeypatch.setitem(KINDS, kind, (KINDS[kind][0], answer))
    path = write(rows, ".jsonl", kind)
    told = f"{path}: rows without a prediction, because the model's outputs are not finite: 3\n"
    assert capsys.readouterr().err == told
