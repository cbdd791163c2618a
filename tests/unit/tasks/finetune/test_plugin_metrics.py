"""Metrics of plug-ins: their range, and values that are not defined."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from megatron_ddrp.config.registry import load_plugin, plugins_forgotten_after
from megatron_ddrp.errors import UserError
from megatron_ddrp.tasks.finetune.command import main
from megatron_ddrp.tasks.finetune.kinds import KINDS
from megatron_ddrp.tasks.finetune.table_files import Task

PLUGIN = """
import numpy as np
def rmse(labels, predictions):
    return np.sqrt(np.mean((labels - predictions) ** 2))
def negative(labels, predictions):
    error = rmse(labels, predictions)
    return None if error == 0 else -error
def rounded(labels, predictions):
    return np.float64(1 + 1e-12) if (labels == predictions).all() else float("nan")
def by_class(labels, predictions):
    return None if (predictions == predictions[0]).all() else -0.5
for function in (rmse, negative, rounded):
    function.kinds = ("regression",)
by_class.kinds = ("classification",)
METRICS = {"rmse": rmse, "negative": negative, "rounded": rounded, "by-class": by_class}
"""
LABELS = np.array([0.5, 3.0, 4.0, 0.0])


@pytest.fixture
def plugin(tmp_path):
    """The file of the plug-in, which this process knows until the end of the test."""
    path = tmp_path / "own_metrics.py"
    path.write_text(PLUGIN, encoding="utf-8")
    with plugins_forgotten_after():
        load_plugin(path)
        yield path


@pytest.mark.parametrize(("name", "value"), [("rmse", "2"), ("negative", "-2")])
def test_a_value_out_of_range_is_refused(plugin, name, value):
    metric = KINDS["regression"].metrics[name]
    with pytest.raises(UserError, match=rf"--metric {name} gave {value}: expected a number from -1 to 1") as refused:
        metric.value(LABELS, LABELS + 2)
    assert "1 / (1 + error)" in str(refused.value) and "\n" not in str(refused.value)
    assert abs(metric.value(LABELS, LABELS + 1)) == 1


def test_a_value_out_of_range_on_some_of_the_rows_counts_as_the_end_of_the_range(plugin):
    """All rows together are in the range; without this no table could be made of finished runs."""
    metric = KINDS["regression"].metrics["negative"]
    predictions = LABELS + [2.0, 0.0, 0.0, 0.0]
    assert metric.value(LABELS, predictions) == -1
    drawn = np.array([[4, 0, 0, 0], [2, 2, 0, 0], [0, 2, 2, 0], [1, 3, 0, 0]], np.uint8)
    assert metric.samples(drawn, LABELS, predictions).tolist() == [-1, -1, -1, -1]  # -2, -√2, undefined, -1


def test_rounding_is_in_range_and_nan_is_undefined(plugin):
    metric = KINDS["regression"].metrics["rounded"]
    assert metric.value(LABELS, LABELS) == pytest.approx(1) and metric.value(LABELS, LABELS[::-1]) is None


def test_an_undefined_value_counts_as_the_worst(plugin):
    metric = KINDS["regression"].metrics["negative"]
    drawn = np.array([[4, 0, 0, 0], [0, 4, 0, 0], [1, 1, 1, 1]], np.uint8)
    half = LABELS + [0.0, 0.5, 0.5, 0.5]
    assert metric.samples(drawn, LABELS, half).tolist() == pytest.approx([-1, -0.5, -math.sqrt(3) / 4])
    assert metric.counted(LABELS, LABELS) == metric.counted(LABELS, LABELS * math.nan) == -1
    assert KINDS["regression"].metrics["pearson"].counted(LABELS, LABELS * math.nan) == 0
    task = Task(name="t", kind="classification", labels=("a", "b"), metric="by-class")
    assert KINDS["classification"].baseline(task, {"a": 1, "b": 2}, LABELS) == -1
    assert KINDS["classification"].baseline(replace(task, metric="matthews"), {"a": 1, "b": 2}, LABELS) == 0


def test_only_metrics_of_the_package_have_a_constant_guess_of_0(plugin):
    task = Task(name="t", kind="regression", labels=(), metric="pearson")
    assert KINDS["regression"].constant_guess(task, LABELS) == 0
    assert KINDS["regression"].constant_guess(replace(task, metric="negative"), LABELS) is None


@pytest.mark.usefixtures("plugin")
def test_a_run_that_diverged_is_worse_than_every_other(topics, bert_folder, tmp_path, capsys):
    """At a learning rate of 1e12 no output is finite."""
    out = tmp_path / "out"
    for name, count in (("train", 64), ("valid", 21)):
        lines = [json.dumps({"text": f"red {'cat ' * (n % 3)}", "label": n % 3 / 4 + 0.125}) for n in range(count)]
        (topics / f"{name}.jsonl").write_text("\n".join(lines))
    files = ["--train", topics / "train.jsonl", "--valid", topics / "valid.jsonl", "--kind", "regression"]
    words = [*files, "--metric", "negative", "--load", bert_folder, "--output-dir", out, "--seeds", "1"]
    main([str(word) for word in (*words, "--epochs", "1", "--lr", "1e-3", "1e12")])
    good, bad = (json.loads(line) for line in (out / "runs.jsonl").read_text().splitlines())
    assert (bad["score"], bad["undefined"], bad["epoch_scores"]) == (-1, True, [-1]) and -1 < good["score"] < 0
    assert "negative -100.00 (undefined, counts as -100)" in capsys.readouterr().out
    (cells,) = json.loads((out / "table.json").read_text())["encoders"].values()
    assert cells["tasks"]["topics"]["point"]["lr"] == 1e-3 and cells["tasks"]["topics"]["constant_guess"] is None
    assert main(["--report", str(out), "--output-dir", str(tmp_path / "again")]) == 0
    assert (tmp_path / "again" / "table.md").read_text() == (out / "table.md").read_text()
