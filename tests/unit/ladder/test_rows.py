"""Rows: later ones replace earlier ones, and every mistake is one line."""

from __future__ import annotations

import pytest

from megatron_ddrp.errors import UserError
from megatron_ddrp.tasks.ladder.ladder import check_ladder
from megatron_ddrp.tasks.ladder.rows import as_run, read_runs
from tests.unit.ladder.conftest import LOSS, RUNGS, full_row, ladder_of, make_row


def row(model="absolute", seed=1, loss=6.0, **other):
    return make_row(model, seed, RUNGS[0], {LOSS: loss}, **other)


def test_a_later_row_of_a_run_replaces_an_earlier_one(write_rows):
    first = write_rows([row(loss=6.0), row(seed=2), row(loss=5.5)])
    second = write_rows([row(seed=2, loss=5.0)], "more.jsonl")
    runs = read_runs([first, second])
    assert {run.seed: run.values[LOSS] for run in runs} == {1: 5.5, 2: 5.0}


def test_measures_may_be_missing_and_values_that_are_not_finite_are_left_out():
    run = as_run(make_row("ddrp+tcd", 1, RUNGS[0], {LOSS: None, "f(S)": 0.4, "CoLA": float("nan")}))
    assert (run.values, run.undefined, run.paradigms, run.curve) == ({"f(S)": 0.4}, (LOSS, "CoLA"), {}, ())
    assert run.arm.flags == (("hcd_weight", "0"),)
    assert run.arm.objective_name == "TCD alone"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "no row in .*rows.jsonl; train a run of the plan first"),
        ([{"run": "a", "model": "ddrp"}], "line 1: not a row of a run; delete this line"),
        ([row(steps=[1])], "line 1: not a row of a run"),
        ([row(flags=["lr"])], "line 1: not a row of a run"),
        ([row(similarity=[[1, 0.4]])], "line 1: not a row of a run"),
        ([row() | {"values": [1]}], "line 1: not a row of a run; delete this line"),
        (
            [row(), row(run="again")],
            "two runs of absolute, seed 1, 4,194,304 tokens: .* and again; delete the row of one",
        ),
        (
            [row(), row(run="again", common={"num_layers": 2})],
            "and again, which differ in hidden_size, bf16, lr; delete",
        ),
        (
            [row(), row(seed=2, objective="mth", flags={"hcd_weight": 0})],
            r"two models are called 'absolute': absolute mlm and absolute mth \(hcd_weight 0\); give each",
        ),
        (
            [row(parameters=1_569_152), row(seed=2, parameters=0), row(seed=3, parameters=1_568_896)],
            "absolute, 4,194,304 tokens, have 1,569,152 and 1,568,896 parameters: they are not one model; delete",
        ),
    ],
)
def test_a_mistake_is_one_line(write_rows, rows, message):
    with pytest.raises(UserError, match=message):
        read_runs([write_rows(rows)])


def test_a_changed_line_and_a_missing_file(write_rows, tmp_path):
    path = write_rows([row()])
    path.write_text(path.read_text().replace("6.0", "5.0"))
    with pytest.raises(UserError, match="line 1: changed since it was written"):
        read_runs([path])
    with pytest.raises(UserError, match="no such file; give the rows"):
        read_runs([tmp_path / "none.jsonl"])


def test_the_same_name_may_mean_another_model_in_a_check(write_rows):
    assert len(read_runs([write_rows([row(), row(check="rate", flags={"lr": 0.1})])])) == 2


def test_arms_stand_in_the_order_of_the_page():
    names = ["ddrp+contrast", "absolute+mth", "ddrp+free", "zz", "ddrp", "absolute"]
    rows = [row(name) for name in names] + [row("absolute+mth", half=True)]
    order = ["absolute", "ddrp", "zz", "ddrp+free", "absolute+mth", "ddrp+contrast", "absolute+mth, half the budget"]
    assert [arm.label for arm in ladder_of(rows).arms] == order
    assert ladder_of(rows).baseline.name == "absolute"
    assert ladder_of([row("ddrp"), row("rope")]).baseline.name == "ddrp"


def test_phenomena_and_fields():
    rows = [full_row("absolute", seed, 0) for seed in (1, 2)]
    ladder = ladder_of(rows)
    found = ladder.accuracies(ladder.baseline, RUNGS[0])
    assert list(found)[:3] == ["all", "anaphor agreement", "argument structure"]
    assert len(found) == 13
    assert found["argument structure"] == pytest.approx(0.5 + 0.02 * 1.5 / 3)  # the mean of its two paradigms
    for other in rows:
        other["paradigms"]["not_blimp"] = 0.5
    ladder = ladder_of(rows)
    assert ladder.accuracies(ladder.baseline, RUNGS[0]) == {
        "all": rows[0]["values"]["minimal pairs"],
        "morphology": 0.55,
    }


def test_only_some_runs_are_read(write_rows):
    path = write_rows([row(), row(run="other", seed=2)])
    assert [run.name for run in read_runs([path], lambda row: int(row["run"] == "other"))] == ["other"]
    with pytest.raises(UserError, match="no row in"):
        read_runs([path], lambda row: 0)


def test_of_the_rows_of_a_run_the_highest_rank_counts_then_the_last(write_rows):
    path = write_rows([row(loss=5.0, steps=1), row(loss=6.0, steps=1), row(loss=7.0, steps=0)])
    assert [run.values[LOSS] for run in read_runs([path], lambda row: 1 + row["steps"])] == [6.0]
    assert [run.values[LOSS] for run in read_runs([path])] == [7.0]


def test_a_check_borrows_its_baseline_from_the_ladder_at_its_rungs_and_seeds(write_rows):
    rows = [row(seed=seed) for seed in (1, 2, 3)]
    rows += [row("absolute", seed=1, half=True), row("ddrp", seed=2, check="warm-up", baseline="absolute")]
    check = check_ladder(read_runs([write_rows(rows)]), "warm-up")
    assert [(run.arm.name, run.seed, run.check) for run in check.runs] == [
        ("absolute", 2, "warm-up"),
        ("ddrp", 2, "warm-up"),
    ]
    assert check.baseline.name == "absolute"


def test_a_check_borrows_no_baseline_with_other_flags_and_also_one_of_another_check(write_rows):
    in_fp32 = {"common": row()["common"] | {"bf16": False}}
    rows = [row(), row(loss=5.0, check="rate", **in_fp32), row("ddrp", check="rate", baseline="absolute", **in_fp32)]
    rows.append(row("t5", check="warm-up", baseline="absolute", **in_fp32))
    runs = read_runs([write_rows(rows)])
    for name, other in (("rate", "ddrp"), ("warm-up", "t5")):
        found = check_ladder(runs, name).runs
        assert [(run.arm.name, run.values[LOSS]) for run in found] == [("absolute", 5.0), (other, 6.0)]
