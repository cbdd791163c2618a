"""`--test` without labels: checked and named before training starts, predicted after the tables are written."""

import datetime
import decimal
import io
import json
import threading

import pytest

from megatron_ddrp.errors import UserError
from megatron_ddrp.tasks.finetune import task_files
from megatron_ddrp.tasks.finetune.command import main
from megatron_ddrp.tasks.finetune.kinds import KINDS
from megatron_ddrp.tasks.finetune.kinds.contract import JsonLinesFile, TableFile
from megatron_ddrp.tasks.finetune.table_files import Columns
from megatron_ddrp.tasks.finetune.task_files import FineTuned
from tests.unit.tasks.finetune.test_own_tasks import GLANCE, words

BAD_TEST = {
    "another column": ({"sentence": "red cat runs"}, r"test\.jsonl, line 1: no column 'text', it has sentence"),
    "an empty text": ({"text": " "}, r"test\.jsonl, line 1: text is empty"),
    "a prediction": ({"text": "red cat", "prediction": "x"}, r"there is a column 'prediction' already; rename it"),
}


@pytest.mark.parametrize(("row", "message"), BAD_TEST.values(), ids=BAD_TEST)
def test_a_bad_test_file_without_labels_is_refused_before_anything_is_loaded(topics, tmp_path, row, message):
    (topics / "test.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError, match=message) as refused:
        main(words(topics, tmp_path / "no-such-encoder", tmp_path / "out", "--test", topics / "test.jsonl"))
    assert "\n" not in str(refused.value)


def test_the_plan_says_that_a_test_file_has_no_labels(topics, bert_folder, tmp_path, capsys):
    main(words(topics, bert_folder, tmp_path / "out", *GLANCE, "--test", topics / "new.jsonl", "--dry-run"))
    told = "test: 9 rows without labels, to be predicted (no column 'label', it has id, text)"
    assert told in capsys.readouterr().out


def test_the_table_is_there_if_the_prediction_fails(topics, bert_folder, tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise UserError("no space left")

    monkeypatch.setattr("megatron_ddrp.tasks.finetune.task_files.predict_file", fail)
    with pytest.raises(UserError, match="no space left"):
        main(words(topics, bert_folder, tmp_path / "out", *GLANCE, "--test", topics / "new.jsonl"))
    assert (tmp_path / "out" / "table.md").read_text() in capsys.readouterr().out
    assert (tmp_path / "out" / "table.json").is_file()


def test_without_a_kept_model_a_test_file_is_told_to_be_unpredicted(topics, bert_folder, tmp_path, capsys):
    main(words(topics, bert_folder, tmp_path / "out", *GLANCE, "--no-keep-models", "--test", topics / "new.jsonl"))
    assert f"was kept; {topics / 'new.jsonl'} is not predicted" in capsys.readouterr().out


@pytest.mark.parametrize("writer", [JsonLinesFile, TableFile])
def test_times_of_a_parquet_file_are_written_as_text(writer):
    stream = io.BytesIO()
    file = writer(stream, ".csv", Columns("day", None, "kind"), KINDS["classification"].cell_text)
    file.write({"day": datetime.date(2026, 1, 2)}, "red")
    assert "2026-01-02" in stream.getvalue().decode() and "red" in stream.getvalue().decode()


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        (decimal.Decimal("1.50"), "1.50"),
        (datetime.date(2026, 1, 2), "2026-01-02"),
        (b"red", "b'red'"),
        (True, "true"),
        ([datetime.date(2026, 1, 2)], '["2026-01-02"]'),
    ],
)
def test_a_label_of_a_parquet_file_is_written_as_other_columns_are(cell, text):
    for kind in ("classification", "regression"):
        stream = io.BytesIO()
        TableFile(stream, ".tsv", Columns("text", None, "label"), KINDS[kind].cell_text).write(
            {"note": cell, "label": cell}, "red"
        )
        assert stream.getvalue().decode().splitlines()[1].split("\t") == [text, text, "red"]


def test_cells_without_a_value_are_empty_in_tables_and_null_in_json_lines():
    """A Parquet file has null and nan, and JSON has no nan."""
    told = []
    for writer, ending in ((TableFile, ".csv"), (TableFile, ".tsv"), (JsonLinesFile, ".jsonl")):
        stream = io.BytesIO()
        file = writer(stream, ending, Columns("text", None, "label"), KINDS["classification"].cell_text)
        file.write({"note": None, "number": float("nan"), "label": None}, None)
        told.append(stream.getvalue().decode().splitlines()[-1])
    assert told == [",,,null", "\t\t\tnull", '{"note": null, "number": null, "label": null, "prediction": null}']
    for cell in (float("inf"), [float("nan")]):
        with pytest.raises(
            ValueError, match=r"a number of a cell is nan or infinite, which JSON cannot hold; write \."
        ):
            file.write({"number": cell}, None)


def test_commands_that_end_at_the_same_moment_all_succeed(topics, bert_folder, tmp_path, monkeypatch):
    """The second one comes to its predictions while the first is writing the same file."""
    out, path, finish, ends = tmp_path / "out", topics / "new.jsonl", task_files.use_models, []

    def finish_twice(sweep):
        predict = FineTuned.predict

        def predict_beside_another(model, encoded):
            monkeypatch.setattr(FineTuned, "predict", predict)
            other.start()
            other.join(1)  # without a lock it fails at once
            return predict(model, encoded)

        def also_finish():
            try:
                ends.append(finish(sweep))
            except UserError as error:
                ends.append(str(error))

        other = threading.Thread(target=also_finish)
        monkeypatch.setattr(FineTuned, "predict", predict_beside_another)
        lines = finish(sweep)
        other.join()
        assert ends == [lines]
        return lines

    monkeypatch.setattr(task_files, "use_models", finish_twice)
    assert main(words(topics, bert_folder, out, *GLANCE, "--test", path)) == 0
    (told,) = (out / "predictions").glob("*-test.jsonl")
    assert len(told.read_text().splitlines()) == 9 and len(ends) == 1
