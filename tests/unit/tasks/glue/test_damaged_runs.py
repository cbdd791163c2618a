"""`--report` believes no score that a run's predictions do not give."""

import json

import numpy as np
import pytest

from megatron_ddrp.tasks.finetune.predictions import read_predictions, trusted_runs, write_predictions
from megatron_ddrp.tasks.glue.command import main
from megatron_ddrp.tasks.glue.suite import Glue
from megatron_ddrp.tasks.glue.tasks import TASKS
from tests.unit.tasks.glue.conftest import scored_folder

PREDICTIONS = [[0, 1, 0, 0], [1, 1, 0, 1], [1, 1, 1, 1]]


@pytest.fixture
def out(tmp_path):
    return scored_folder(tmp_path / "out", PREDICTIONS)


def file_of(out, seed):
    (path,) = (out / "predictions").glob(f"*-s{seed}-*.tsv")
    return path


def rewrite(path, old, new, count=1):
    content = path.read_text()
    assert old in content
    path.write_text(content.replace(old, new, count))


def without_sums(out):
    """As an earlier version left it."""
    path = out / "runs.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    own = [{k: v for k, v in row.items() if k not in ("crc32", "predictions_crc32")} for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in own))


def report(out, capsys):
    """(exit code, standard error, table.md) of `--report`."""
    code = main(["--report", str(out), "--output-dir", str(out.parent / "table")])
    return code, capsys.readouterr().err, (out.parent / "table" / "table.md").read_text()


def test_what_agrees_is_believed(out, capsys):
    code, said, text = report(out, capsys)
    assert (code, said) == (0, "") and "Damage" not in text
    assert "| e | CoLA | matthews | 57.74 | 0.00 to 57.74 | 0.00 to 100.00 | 57.74 | 3 | 1 |" in text
    without_sums(out)
    assert report(out, capsys) == (0, "", text)


def test_a_changed_prediction_takes_its_run_out(out, capsys):
    without_sums(out)
    rewrite(file_of(out, 2), "dev\t0\t1\t0", "dev\t0\t0\t0")
    code, said, text = report(out, capsys)
    assert code == 1 and len(said.splitlines()) == 1
    assert f"{file_of(out, 2)}: gives dev a matthews of 1.000000, runs.jsonl says 0.577" in said
    assert "| 2 | 1 |" in text and "## Damage found" in text and "-s2-" in text


def test_a_score_that_was_changed_a_little_is_noticed(out, capsys):
    without_sums(out)
    *others, last = [json.loads(line) for line in (out / "runs.jsonl").read_text().splitlines()]
    rows = [*others, last | {"score": last["score"] + 1e-4}]
    (out / "runs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, said, _ = report(out, capsys)
    assert code == 1 and "gives dev a matthews of 0.000000, runs.jsonl says 0.0001;" in said


def test_a_change_that_keeps_the_score_is_noticed_by_the_sum(out, capsys):
    rewrite(file_of(out, 3), "dev\t3\t1\t1", "dev\t3\t1\t1\n")
    code, said, _ = report(out, capsys)
    assert code == 1 and "changed since the run wrote it" in said and "-s3-" in said


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("dev\t1\t", "dev\t7\t", "dev: row 7 is at the place of row 1"),
        ("dev\t3\t0\t1\n", "", "holds 3 rows of dev, runs.jsonl says 4|gives dev a matthews"),
        ("dev\t2", "other\t0", "holds predictions for dev, other|is at the place of"),
        ("\tprediction\t", "\tguess\t", "its first line is"),
        ("dev\t0\t0\t0", "dev\t0\tx\t0", "no predictions of megatron-ddrp glue"),
        ("dev\t0\t0\t0", "dev\t0", "no predictions of megatron-ddrp glue"),
    ],
)
def test_damaged_predictions_are_named(out, old, new, reason):
    without_sums(out)
    rewrite(file_of(out, 1), old, new)
    found = trusted_runs(out, Glue())
    assert [row["seed"] for row in found.rows] == [2, 3]
    (told,) = found.left_out
    assert any(part in told for part in reason.split("|")) and str(file_of(out, 1)) in told


def test_a_changed_score_is_named_with_and_without_the_lines_sum(out, capsys):
    path = out / "runs.jsonl"
    rewrite(path, '"score": 0.577', '"score": 0.977')
    code, said, _ = report(out, capsys)
    assert code == 1 and f"{path}, line 1: changed since it was written" in said
    without_sums(out)
    code, said, _ = report(out, capsys)
    assert code == 1 and "gives dev a matthews of 0.577350, runs.jsonl says 0.977" in said


def test_missing_predictions_are_named_and_half_a_line_is_none(out, capsys):
    file_of(out, 1).unlink()
    with (out / "runs.jsonl").open("a") as stream:
        stream.write('{"task": "Co')
    code, said, text = report(out, capsys)
    assert code == 0 and "| 3 | 1 |" in text
    assert "-s1-" in said and "missing" in said and "its last line is cut off" in said


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
