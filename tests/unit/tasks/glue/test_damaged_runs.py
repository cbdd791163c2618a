"""`--report` leaves damaged lines out, and predictions are read as they were written."""

import json

import numpy as np
import pytest

from megatron_ddrp.tasks.finetune.runs import read_predictions, write_predictions
from megatron_ddrp.tasks.glue import TASKS, main
from tests.unit.tasks.glue.conftest import scored_folder

PREDICTIONS = [[0, 1, 0, 0], [1, 1, 0, 1], [1, 1, 1, 1]]


@pytest.fixture
def out(tmp_path):
    return scored_folder(tmp_path / "out", PREDICTIONS)


def report(out, capsys):
    """(exit code, standard error, table.md) of `--report`."""
    code = main(["--report", str(out), "--output-dir", str(out.parent / "table")])
    return code, capsys.readouterr().err, (out.parent / "table" / "table.md").read_text()


def test_whole_lines_are_shown_with_and_without_sums(out, capsys):
    """Earlier versions wrote no sums, and later ones a sum of the predictions."""
    code, said, text = report(out, capsys)
    assert (code, said) == (0, "") and "Damage" not in text
    assert "| e | CoLA | matthews | 57.74 | 0.00 to 57.74 | 0.00 to 100.00 | 57.74 | 3 | 1 |" in text
    path = out / "runs.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    own = [{key: value for key, value in row.items() if key != "crc32"} for row in rows]
    for more in ({}, {"predictions_crc32": "00000000"}):
        path.write_text("".join(json.dumps(row | more) + "\n" for row in own))
        assert report(out, capsys) == (0, "", text)


def test_a_changed_line_is_left_out_and_named(out, capsys):
    path = out / "runs.jsonl"
    content = path.read_text()
    assert '"score": 0.577' in content
    path.write_text(content.replace('"score": 0.577', '"score": 0.977', 1))
    code, said, text = report(out, capsys)
    assert code == 1 and f"{path}, line 1: changed since it was written" in said and len(said.splitlines()) == 1
    assert "| 2 | 1 |" in text and "## Damage found" in text


def test_missing_predictions_cost_the_interval_and_half_a_line_is_none(out, capsys):
    (path,) = (out / "predictions").glob("*-s1-*.tsv")
    path.unlink()
    with (out / "runs.jsonl").open("a") as stream:
        stream.write('{"task": "Co')
    code, said, text = report(out, capsys)
    assert code == 0 and "| e | CoLA | matthews | 57.74 | 0.00 to 57.74 |" in text and "0.00 to 100.00" not in text
    assert len(said.splitlines()) == 1 and "its last line is cut off" in said


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("dev\t1\t", "dev\t7\t", "dev: row 7 is at the place of row 1"),
        ("\tprediction\t", "\tguess\t", "its first line is"),
        ("dev\t0\t0\t0", "dev\t0\tx\t0", "x"),
        ("dev\t0\t0\t0", "dev\t0", "not enough values"),
    ],
)
def test_damaged_predictions_are_refused(out, old, new, reason):
    (path,) = (out / "predictions").glob("*-s1-*.tsv")
    content = path.read_text()
    assert old in content
    with pytest.raises(ValueError, match=reason):
        read_predictions(content.replace(old, new, 1).encode(), TASKS["CoLA"])


@pytest.mark.parametrize("task", ["CoLA", "STS-B", "MNLI"])
def test_predictions_are_read_as_they_were_written(tmp_path, task):
    highest = 5.0 if task == "STS-B" else len(TASKS[task].labels) - 1
    values = np.linspace(0, highest, 7) if task == "STS-B" else np.arange(7.0) % (highest + 1)
    predicted = values[::-1].copy()
    predicted[2] = np.nan
    write_predictions(tmp_path / "x.tsv", TASKS[task], {"a": (values, predicted), "b": (values[:3], values[:3])})
    found = read_predictions((tmp_path / "x.tsv").read_bytes(), TASKS[task])
    assert list(found) == ["a", "b"]
    np.testing.assert_array_equal(found["a"], (values, predicted))
    np.testing.assert_array_equal(found["b"], (values[:3], values[:3]))
