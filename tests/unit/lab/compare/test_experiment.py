"""Experiment of a plan, and the rows of their finished runs."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from megatron_ddrp.errors import UserError
from megatron_ddrp.lab.compare.command import main, parse_arguments
from megatron_ddrp.lab.compare.experiment import Experiment, Runner, plan_experiment
from megatron_ddrp.lab.compare.measures import Recording
from megatron_ddrp.lab.compare.plan import read_plans
from megatron_ddrp.lab.compare.rows import open_rows
from megatron_ddrp.tasks.statistics import LOSS, TRAINING_LOSS
from tests.unit.lab.compare.conftest import finish_run, finish_similarity

LOWEST = {"budget": {"tokens": 5120}, "seeds": 2, "half_budget": ["BERT (MTH)"]}
MORE_SEEDS = {"budget": {"tokens": 5120}, "seeds": [1236], "models": ["BERT (MTH)"]}
HIGHEST = {"budget": {"tokens": 20480}, "seeds": 1, "models": ["BERT (MTH)", "BERT (MLM)"], "baseline": "BERT (MLM)"}
CHECK = {"check": "rate", "budget": {"tokens": 5120}, "seeds": [1], "models": ["BERT (MLM)"], "analyses": {}}


@pytest.fixture
def rungs(values):
    """Values of a plan with four rungs."""
    for key in ("budget", "seeds", "half_budget"):
        del values[key]
    return values | {"rungs": [CHECK, LOWEST, MORE_SEEDS, HIGHEST]}


@pytest.fixture
def open_ladder(write, tmp_path):
    """Values, more words → the ladder of an output folder."""

    def make(values, *words) -> Experiment:
        options = parse_arguments([str(write(values)), "--output-dir", str(tmp_path / "out"), *words])
        return plan_experiment(options)

    return make


def finish(ladder: Experiment, loss: float = 5.0) -> None:
    """Finish every job of the ladder."""
    for work in ladder.works:
        for run in work.runs:
            if run.job.name not in ladder.store:
                finish_run(work, run, loss + run.seed / 1e4 + run.half)
        for analysis in work.measures:
            if analysis.job.name not in ladder.store:
                finish_similarity(work, analysis.run, 0.3, 0.2)
    ladder.record()


def test_an_entry_of_rungs_replaces_keys_of_the_file(rungs, write):
    plans = read_plans(write(rungs))
    assert [plan.budget.tokens for plan in plans] == [5120, 5120, 5120, 20480]
    assert [plan.seeds for plan in plans] == [(1,), (1234, 1235), (1236,), (1234,)]
    assert [[m.name for m in plan.models] for plan in plans[2:]] == [["BERT (MTH)"], ["BERT (MTH)", "BERT (MLM)"]]
    assert len(plans[1].models) == 2 and plans[1].half_budget == ("BERT (MTH)",) and not plans[2].half_budget
    assert [plan.check for plan in plans] == ["rate", "", "", ""] and plans[0].analyses.self_similarity == 0
    assert all(plan.flags == plans[0].flags for plan in plans)


def test_the_command_line_replaces_values_on_every_rung(rungs, write):
    plans = read_plans(write(rungs), {"workers": 2})
    assert [plan.workers for plan in plans] == [2] * 4


@pytest.mark.parametrize(
    ("rung", "expected"),
    [
        ("5 tokens", "rungs[2]: got '5 tokens', expected keys of a plan"),
        ({"seeds": 2}, "rungs[2].budget: missing"),
        (
            LOWEST | {"models": ["DDRP"]},
            "rungs[2].models: got 'DDRP', expected names of models: BERT (MLM), BERT",
        ),
        (LOWEST | {"models": [{"name": "X"}]}, "rungs[2].models: got {'name': 'X'}, expected names of models: BERT"),
        (LOWEST | {"sedes": 2}, "rungs[2]: unknown setting 'sedes'; did you mean seeds?"),
        (LOWEST | {"models": ["BERT (MLM)"]}, "rungs[2]: half_budget: got 'BERT (MTH)', expected one of BERT (MLM)"),
    ],
)
def test_a_mistake_in_a_rung_is_one_line(rungs, write, rung, expected):
    file = write(rungs | {"rungs": [HIGHEST, rung]})
    with pytest.raises(UserError) as caught:
        read_plans(file)
    assert str(caught.value).startswith(f"{file}: {expected}") and caught.value.exit_code == 2


@pytest.mark.parametrize("none", [[], {}, 3, None])
def test_rungs_are_a_list_with_an_entry(rungs, write, none):
    with pytest.raises(UserError, match="rungs: expected a list of rungs"):
        read_plans(write(rungs | {"rungs": none}))


def test_checks_are_for_plans_with_rungs(values, write):
    with pytest.raises(UserError, match="check: only for an entry of rungs"):
        read_plans(write(values | {"check": "rate"}))


def test_jobs_stand_in_the_order_of_the_rungs_each_once_and_a_run_before_its_measures(rungs, open_ladder):
    again = open_ladder(rungs | {"rungs": [*rungs["rungs"], LOWEST]})
    ladder = open_ladder(rungs)
    names = [job.name for job in ladder.jobs()]
    assert names == [job.name for job in again.jobs()] and len(names) == len(set(names))
    runs = [run for work in ladder.works for run in work.runs]
    assert len(runs) == 1 + 2 * 3 + 1 + 2
    places = {name: place for place, name in enumerate(names)}
    assert [places[run.job.name] for run in runs] == sorted(places[run.job.name] for run in runs)
    assert all(places[need] < places[job.name] for job in ladder.jobs() for need in job.needs)


def test_a_row_has_everything_about_a_run(rungs, open_ladder):
    ladder = open_ladder(rungs)
    finish(ladder)
    rows = ladder.rows.rows
    assert len(rows) == 10 and not ladder.jobs()
    (row,) = [row for row in rows if row["half"] and row["seed"] == 1235]
    assert row["values"]["validation masked-LM loss"] == pytest.approx(6.1235)
    assert (row["planned_tokens"], row["steps"], row["budget"]) == (5120, 20, "5,120 tokens")
    assert (row["model"], row["encoding"], row["objective"], row["check"]) == ("BERT (MTH)", "absolute", "mth", "")
    (row,) = [row for row in rows if row["planned_tokens"] == 20480 and row["model"] == "BERT (MTH)"]
    assert row["values"]["f(S)"] == 0.3 and row["values"]["f(H)"] == 0.2 and row["tokens"] == 100 * 160
    curve = [pytest.approx(point) for point in ([4000, 4.8734], [8000, 5.9234], [16000, 5.1234])]
    assert row["curves"]["validation masked-LM loss"] == curve
    assert row["curves"]["f(H)"] == [[8000, 0.25], [16000, 0.2]] and row["baseline"] == "BERT (MLM)"
    assert 100 * 16 < row["parameters"] < 30_522 * 16 and row["seconds"] == 20.0 and row["common"]["hidden_size"] == 16
    assert [row["check"] for row in rows if row["seed"] == 1] == ["rate"]


def test_a_run_with_a_row_is_not_repeated_in_an_empty_folder(rungs, open_ladder, tmp_path):
    kept = tmp_path / "kept.jsonl"
    ladder = open_ladder(rungs, "--rows", str(kept))
    finish(ladder)
    shutil.rmtree(tmp_path / "out")
    again = open_ladder(rungs, "--rows", str(kept))
    assert not again.jobs()
    (tmp_path / "out").mkdir(exist_ok=True)
    kept.unlink()
    assert len([job for job in open_ladder(rungs, "--rows", str(kept)).jobs() if job.kind == "course"]) == 10


def test_a_new_measure_repeats_a_run_whose_folder_is_gone_and_its_row_replaces_the_old(rungs, open_ladder, tmp_path):
    ladder = open_ladder(rungs)
    finish(ladder)
    more = rungs | {"analyses": {"self-similarity": 11}}
    wanted = open_ladder(more).jobs()
    kinds = [job.kind for job in wanted if job.name not in ladder.store]
    assert set(kinds) == {"self-similarity"}  # the runs themselves are in the store
    finish(open_ladder(more))
    rows = open_rows(tmp_path / "out" / "rows.jsonl").rows
    assert len(rows) == 10 + 7 and len({row["run"] for row in rows}) == 10


def test_a_plan_shows_what_was_measured_as_it_says_and_goes_back_without_work(rungs, open_ladder, tmp_path):
    """Other measures of the same runs are neither shown as this plan's nor compared with them."""
    first, second = rungs, rungs | {"analyses": {"self-similarity": 11}}
    finish(open_ladder(first))
    ladder = open_ladder(second)
    shown = ladder.finished_runs()
    assert len(shown) == 10 and not ladder.missing_runs and not ladder.left_out
    assert {"f(S)" in run.values for run in shown} == {False}  # 10 sentences are not 11
    assert "self-similarity BERT (MTH), seed 1234: not started" in ladder.missing
    kept = tmp_path / "kept.jsonl"
    shutil.copy(ladder.rows.path, kept)
    (tmp_path / "out" / "jobs.jsonl").unlink()
    alone = open_ladder(second, "--rows", str(kept))
    assert len(alone.left_out) == 7 and {run.check or run.arm.half for run in alone.finished_runs()} == {"rate", True}
    assert sum(line.startswith("left out until it is measured") for line in alone.missing) == 7
    finish(open_ladder(second))
    for plan in (first, second):
        ladder = open_ladder(plan)
        assert not ladder.jobs() and not ladder.left_out
        assert len([row for row in ladder.rows if ladder.rank(row) == 2]) == 10 == len(ladder.finished_runs())


def test_a_job_of_several_runs_brings_back_those_whose_folders_are_gone(rungs, open_ladder, tmp_path):
    """Throughput times all models together, although some of the runs have rows."""
    timed = rungs | {"analyses": {"throughput": [16]}, "rungs": [{"budget": {"tokens": 5120}, "seeds": 1}]}
    ladder = open_ladder(timed, "--rows", str(tmp_path / "kept.jsonl"))
    (work,) = ladder.works
    finish_run(work, work.runs[0], 5.0)
    ladder.record()
    assert len(ladder.rows.rows) == 1  # the last of the runs has the job
    shutil.rmtree(tmp_path / "out")
    jobs = open_ladder(timed, "--rows", str(tmp_path / "kept.jsonl")).jobs()
    assert [job.kind for job in jobs] == ["course", "course", "throughput"]
    assert {job.name for job in jobs} >= set(jobs[-1].needs)


def test_models_with_batches_of_their_own_share_the_rung_of_a_budget_in_tokens(rungs, open_ladder):
    rungs["models"][1]["flags"] = {"global-batch-size": 12, "micro-batch-size": 4}
    ladder = open_ladder(rungs | {"rungs": [{"budget": {"tokens": 5000}, "seeds": 1}]})
    finish(ladder)
    assert {row["steps"] for row in ladder.rows} == {39, 13}
    assert {row["planned_tokens"] for row in ladder.rows} == {5000}


def test_a_run_without_all_its_measures_has_no_row(rungs, open_ladder):
    ladder = open_ladder(rungs)
    for work in ladder.works:
        for run in work.runs:
            finish_run(work, run, 5.0)
    ladder.record()
    assert {row["check"] or row["half"] for row in ladder.rows} == {"rate", True}  # they have no analysis


def test_a_run_that_a_check_shares_with_a_rung_has_one_row_which_is_the_rungs(rungs, open_ladder):
    ladder = open_ladder(rungs | {"rungs": [CHECK | {"seeds": [1234]}, LOWEST]})
    shared = ladder.works[0].runs[0]
    finish_run(ladder.works[0], shared, 5.0)
    ladder.record()
    assert not ladder.rows.rows  # the rung's measures are missing
    finish(ladder)
    assert [row["check"] for row in ladder.rows] == [""] * 6


def test_the_dry_run_prints_every_rung_and_what_is_left(rungs, write, tmp_path, capsys):
    assert main([str(write(rungs)), "--output-dir", str(tmp_path / "out"), "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "4 budgets" in printed and "2 models x 1 seed (1234)" in printed and "20,480 tokens each" in printed
    assert (
        "check, rate: 1 model x 1 seed (1)" in printed
        and "and half of it" in printed
        and not (tmp_path / "out").exists()
    )


def test_the_plan_says_once_that_this_cpu_multiplies_slowly_in_bf16(rungs, write, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    in_bf16 = HIGHEST | {"training": rungs["training"] | {"bf16": True}}
    for plan, count in ((rungs, 0), (rungs | {"rungs": [LOWEST, in_bf16]}, 1)):
        assert main([str(write(plan)), "--output-dir", str(tmp_path / "out"), "--dry-run"]) == 0
        assert capsys.readouterr().out.count("this CPU has no AVX-512") == count


def test_the_missing_runs_are_told_once_of_validation_of_another_kind(
    rungs, open_ladder, write, prose_then_code, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(Runner, "run", lambda *_, **__: None)
    words = ["--output-dir", str(tmp_path / "out"), "--no-wait"]
    for prefix, count in ((rungs["corpus"]["data_path"][0], 0), (prose_then_code, 1)):
        plan = rungs | {"corpus": rungs["corpus"] | {"data_path": [prefix]}}
        assert main([str(write(plan)), *words]) == 0
        assert capsys.readouterr().out.count("the validation text is of another kind") == count
    finish(open_ladder(plan))
    assert main([str(write(plan)), *words]) == 0
    assert "of another kind" not in capsys.readouterr().out


def test_rows_are_json(rungs, open_ladder, tmp_path):
    finish(open_ladder(rungs))
    lines = (tmp_path / "out" / "rows.jsonl").read_text(encoding="utf-8").splitlines()
    assert len([json.loads(line)["crc32"] for line in lines]) == 10


def test_the_tokens_of_a_curve_are_those_of_metrics_jsonl(tmp_path):
    """Short rows in the first six of ten steps; a validation between two logged steps."""
    tokens = {1: 8, 2: 16, 4: 32, 6: 48, 8: 176, 10: 304}
    rows = [{"iteration": step, "consumed_tokens": count, "lm_loss": 5.0} for step, count in tokens.items()]
    rows += [{"iteration": step, "valid_lm_loss": 5.0} for step in (5, 9, 10)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = Recording(cast(Any, None), cast(Any, SimpleNamespace(folder=tmp_path, steps=10)))
    assert [point[0] for point in found.curves[TRAINING_LOSS]] == list(tokens.values())
    assert [point[0] for point in found.curves[LOSS]] == [40, 240, 304]
    assert [found.tokens_at(step) for step in (0, 3, 7)] == [0, 24, 112] and found.tokens == 304
