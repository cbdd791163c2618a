"""Experiments: names of jobs, jobs in several processes, rows of finished runs, and a run that is trained again and its
comparison with its row (training is made up here; test_tasks.py trains)."""

import json
import queue
import re
import shutil
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from megatron_ddrp.lab.compare.command import main, parse_arguments
from megatron_ddrp.lab.compare.experiment import Experiment, Runner, full_command, plan_experiment
from megatron_ddrp.lab.compare.measures import PlanJobs, Recording, make_row
from megatron_ddrp.lab.compare.plan import make_config, read_plans
from megatron_ddrp.lab.compare.rows import RunRow, open_rows
from megatron_ddrp.lab.compare.runs import Job, facts_of, job_name, open_store, start_of
from megatron_ddrp.run.metrics import store_level
from megatron_ddrp.tasks.statistics import LOSS, OTHER_LOSS, TRAINING_LOSS
from tests.refusals import refused, wrong_arguments
from tests.unit.lab.compare.conftest import finish_run, finish_similarity, read_plan, record, write_lines

PLAN = """
models:
  - {name: BERT, encoding: absolute, objective: mlm}
  - {name: "DDRP, MTH", encoding: ddrp, objective: mth, flags: {hcd-weight: 0.5, direction-init: free}}
half_budget: ["DDRP, MTH"]
seeds: [7, 8]
budget: {tokens: 4096}
checkpoints: 2
corpus: {input: [corpus.txt], vocab_size: 300, shuffle: true}
model: {num-layers: 1, hidden-size: 16, num-attention-heads: 2, seq-length: 32}
training: {micro-batch-size: 4, global-batch-size: 4, lr: 1.0e-3, eval-iters: 1}
glue: {data_dir: glue, tasks: [RTE, CoLA], checkpoints_of: [BERT], seeds: 2}
minimal_pairs: {data_dir: pairs, max_pairs: 5, score: pll}
tasks: [{file: order.yaml, seeds: 1, epochs: [2, 3]}]
analyses: {self-similarity: 8, triangle: 9, attention-maps: 8, space: 8, direction: 8, throughput: [16, 32]}
"""
KEYS = """
course-bert-7-c7ca4901fa37 course-bert-8-64becc54f726
course-ddrp-mth-7-ad038258c6ed course-ddrp-mth-half-the-budget-7-160d8c64d6ed
attention-maps-bert-seed-7-83b19a18ce64 direction-bert-seed-7-83b19a18ce64
self-similarity-ddrp-mth-seed-7-bdc1564b3936 space-ddrp-mth-seed-8-7692f8975c52
triangle-ddrp-mth-seed-7-5b53d7fa5041 throughput-2-models-seed-7-e965973e3b1a
finetune-order-bert-seed-7-4314c983d583 finetune-order-ddrp-mth-half-the-budget-seed-7-d52c3cf414de
glue-bert-seed-7-step-16-b369b7372e08 glue-bert-seed-7-step-32-91de51dfcdb2
glue-ddrp-mth-half-the-budget-seed-7-step-16-a084b8c7749a
minimal-pairs-bert-seed-7-61e9d7f193b6 minimal-pairs-ddrp-mth-seed-7-ca3316efee8f
vocabulary-bfa4386490a2 dataset-bfa4386490a2 shuffled-bfa4386490a2
"""
"""One or more names of each kind of job of the plan, as finished folders have them."""


def kinds_of(names):
    return {name.split("-")[0] for name in names}


def test_names_of_jobs_stay_and_changed_pairs_or_the_middle_of_a_task_file_are_another_job(tmp_path, monkeypatch):
    """The bytes of a job's inputs are in its name; a number of workers and a baseline are not."""
    monkeypatch.chdir(tmp_path)
    row, pair = '{"text": "a b", "label": "in order"}\n', '{"sentence_good": "a b", "sentence_bad": "b a"}\n'
    for name, content in {
        "corpus.txt": "a text of words\n\nanother text\n" * 9,
        "order.yaml": "{train: train.jsonl, valid: train.jsonl, kind: classification}",
        "train.jsonl": row,
        "pairs/order.jsonl": pair,
        "glue/RTE/train.tsv": "x",
        "glue/CoLA/train.tsv": "y",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)

    def names_of(text) -> set[str]:
        (tmp_path / "plan.yaml").write_text(text)
        plan = read_plan(tmp_path / "plan.yaml")
        return {job.name for job in Experiment([plan], tmp_path / "out", open_store(tmp_path / "out")).jobs()}

    found = names_of(PLAN)
    assert found >= set(KEYS.split()) and len(found) == 46
    assert kinds_of(found) == kinds_of(KEYS.split())
    assert found == names_of(PLAN + "workers: 2\nbaseline: BERT\n")
    (tmp_path / "train.jsonl").write_text(row * 100_000)
    long = names_of(PLAN)
    (tmp_path / "train.jsonl").write_text(row * 50_000 + row.replace("a b", "b a") + row * 49_999)
    changed = names_of(PLAN)
    assert kinds_of(long ^ changed) == {"finetune"} and found != long
    (tmp_path / "pairs" / "order.jsonl").write_text(pair * 2)
    assert kinds_of(changed ^ names_of(PLAN)) == {"minimal"}


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "out"


def job(folder, name, code="pass", needs=()):
    """A job that leaves a file with one line a time it was done."""
    output = folder / f"{name}.txt"
    write = f"open({str(output)!r}, 'a').write('done\\n')"
    return Job("triangle", name, name, (sys.executable, "-c", f"{code}; {write}"), output, tuple(needs))


def test_needs_come_first_nothing_is_done_twice_and_a_foreign_line_is_named(folder):
    jobs = [job(folder, "third", needs=["second"]), job(folder, "second", needs=["first"]), job(folder, "first")]
    for _ in range(2):
        runner = Runner(open_store(folder), 2)
        runner.run(jobs)
        assert [row["job"] for row in open_store(folder)] == ["first", "second", "third"] and not runner.failed
        assert {j.output.read_text() for j in jobs} == {"done\n"}
    (folder / "jobs.jsonl").write_text('{"run": 1}\n')
    refused(r"jobs\.jsonl, line 1: not a job finished by megatron-ddrp compare", open_store, folder)


def test_a_failure_is_told_with_its_log_and_the_others_go_on(folder):
    bad = job(folder, "bad", "print('out of luck'); raise SystemExit(3)")
    idle = Job("triangle", "idle", "idle", (sys.executable, "-c", "pass"), folder / "nothing")
    lines: list[str] = []
    runner = Runner(open_store(folder), 1, lines.append)
    runner.run([bad, job(folder, "after", needs=["bad"]), idle, job(folder, "other")])
    assert [row["job"] for row in open_store(folder)] == ["other"]
    assert set(runner.failed) == {"bad", "after", "idle"} and runner.failed["after"] == "needs bad"
    told, made_nothing = (line for line in lines if line.startswith("FAILED"))
    assert "exit code 3, out of luck" in told and str(folder / "logs" / "bad.log") in told
    assert "it made no" in made_nothing


def test_two_runners_share_the_jobs_and_wait_or_not_for_one_that_another_process_holds(folder):
    jobs = [job(folder, f"j{number}", "import time; time.sleep(0.1)") for number in range(6)]
    threads = [threading.Thread(target=Runner(open_store(folder), 1).run, args=(jobs,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert {j.output.read_text() for j in jobs} == {"done\n"} and len(open_store(folder).rows) == 6
    only = job(folder, "only")
    lease = open_store(folder).lease("only")
    assert lease and open_store(folder).lease("only") is None
    lines = queue.SimpleQueue()
    thread = threading.Thread(target=Runner(open_store(folder), 2, lines.put).run, args=([only],))
    thread.start()
    assert "waiting for that process" in lines.get(timeout=60) and not only.output.exists()
    lease.close()
    thread.join(60)
    assert only.output.read_text() == "done\n"
    folder = folder.parent / "another"  # where the runner does not wait
    held, free = job(folder, "held"), job(folder, "free")
    after = job(folder, "after", needs=["free"])
    score, table = job(folder, "score", needs=["held"]), job(folder, "table", needs=["score", "free"])
    jobs = [held, free, after, score, table]
    lease = open_store(folder).lease("held")
    runner = Runner(open_store(folder), 1)
    thread = threading.Thread(target=runner.run, args=(jobs, False), daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert [row["job"] for row in open_store(folder)] == ["free", "after"]
    assert runner.left(jobs) == [held, score, table] and not runner.failed
    lease.close()
    runner.run(jobs, wait=False)
    assert runner.left(jobs) == []


def test_names_tell_facts_apart_stay_those_of_earlier_versions_and_hold_no_setting_without_a_result(tmp_path):
    names = {job_name("course", "BERT (MTH α1=0.1)", facts) for facts in ([1], [2], [1, 2])}
    assert len(names) == 3 and all(name.startswith("course-bert-mth-a1-0.1-") for name in names)
    earlier = {"BertWordPieceLowerCase": "708debe29b69", "BertWordPieceCase": "538243eabaa2"}
    settings = {"position_encoding": "rope", "seed": 1235, "lr": 2e-3, "packing": True, "data_path": ("a",)}
    settings |= {"train_iters": 300, "num_layers": 2, "lr_warmup_fraction": 0.05, "bf16": True, "objective": "mth"}
    for tokenizer, name in (earlier | {"HuggingFace": "d6d77b193eb7"}).items():
        given = settings | {"tokenizer_type": tokenizer, "vocab_file": "v", "log_interval": 3}
        assert job_name("course", "x", [facts_of(make_config(given, "plan"))]) == f"course-x-{name}"
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 1}}', encoding="utf-8")
    config = make_config({"deepspeed_config": str(path)}, "plan")
    assert config.parallel.decided_by_deepspeed_config == ("zero_stage",)  # as it is anyway
    assert facts_of(config)["parallel"] == {"deepspeed_config": str(path)}
    assert facts_of(make_config({"cuda_graphs": "on"}, "plan")) == facts_of(make_config({}, "plan"))


def test_a_launcher_keeps_its_own_words_and_workers_share_the_cores(folder, monkeypatch):
    for launcher, words in (
        ("python", f"{sys.executable} -m megatron_ddrp pretrain"),
        ("python -m torch.distributed.run --nproc-per-node 2", f"{sys.executable} -m torch.distributed.run"),
        ("deepspeed --num_gpus 2", "deepspeed --num_gpus 2 --module megatron_ddrp pretrain"),
        ("torchrun --nproc-per-node 2", "torchrun --nproc-per-node 2 -m megatron_ddrp pretrain"),
    ):
        command = full_command(start_of(launcher))
        assert command[: len(words.split())] == words.split() and command[-2:] == ["megatron_ddrp", "pretrain"]
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("megatron_ddrp.lab.compare.experiment.os.cpu_count", lambda: 8)
    threads = "import os; open('{}', 'w').write(os.environ.get('OMP_NUM_THREADS', 'all'))"
    for workers, expected in ((4, "2"), (1, "all")):
        told = folder / f"threads-{workers}"
        Runner(open_store(folder), workers).run([job(folder, f"w{workers}", threads.format(told))])
        assert told.read_text() == expected
    assert [row["threads"] for row in open_store(folder)] == ["2", str(torch.get_num_threads())]


def test_the_plan_counts_the_jobs_of_each_kind_and_takes_the_mean_of_finished_ones(folder):
    lines = Runner(store := open_store(folder), 2)
    store.append({"job": "p", "kind": "probe", "work": 40, "seconds": 30.0})  # of an earlier version
    jobs = [Job("course", name, name, (), folder, work=100.0) for name in "abc"] + [Job("glue", "g", "g", (), folder)]
    unknown = "  time left: not known until the first run is finished"
    assert lines.plan(jobs) == ["4 of 4 jobs to do, 2 at once", "     3 x run", "     1 x glue", unknown]
    store.append({"job": "a", "kind": "course", "work": 100.0, "seconds": 200.0})
    at_least = "  time left: more than 3m20s (no glue is finished yet)"
    assert lines.plan(jobs)[1:] == ["     2 x run", "     1 x glue", at_least]
    store.append({"job": "other", "kind": "course", "work": 50.0, "seconds": 10.0})  # 210 s of 150 steps in all
    assert lines.plan(jobs[:3])[-1] == "  time left: 2m20s" and lines.plan(jobs[:2])[-1] == "  time left: 2m20s"
    assert lines.plan(jobs[:1]) == ["0 of 1 jobs to do, 2 at once"]


def test_the_status_counts_the_steps_of_running_training(folder, monkeypatch):
    lines = Runner(store := open_store(folder), 2)
    run, waiting = (Job("course", name, name, (), folder / name, work=1000.0) for name in ("first", "second"))
    score = Job("glue", "g", "g", (), folder / "g")
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    (folder / "first").mkdir(parents=True)

    def status(*rows):
        write_lines(folder / "first" / "metrics.jsonl", rows)
        return lines.status([(run, 40.0), (score, 40.0)], [run, score, waiting])

    start = {"iteration": 1, "step_time": 30.0}
    first = "run first step 1 of 1,000 since 1m00s; glue g since 1m00s; eta not known until the first run is finished"
    assert status(start) == first
    # 900 steps and 1,000 more of 2 s; the row of a validation has no time
    rows = [start, {"iteration": 50, "step_time": 2.0}, {"iteration": 100, "step_time": 2.0}, {"iteration": 100}]
    begin = "run first step 100 of 1,000 since 1m00s; glue g since 1m00s; eta"
    assert status(*rows) == f"{begin} more than 31m40s (no glue is finished yet)"
    store.append({"job": "other", "kind": "glue", "work": 1.0, "seconds": 200.0})
    assert status(*rows) == f"{begin} 33m20s"


LOWEST = {"budget": {"tokens": 5120}, "seeds": 2, "half_budget": ["BERT (MTH)"]}
MORE_SEEDS = {"budget": {"tokens": 5120}, "seeds": [1236], "models": ["BERT (MTH)"]}
HIGHEST = {"budget": {"tokens": 20480}, "seeds": 1, "models": ["BERT (MTH)", "BERT (MLM)"], "baseline": "BERT (MLM)"}
CHECK = {"check": "rate", "budget": {"tokens": 5120}, "seeds": [1], "models": ["BERT (MLM)"], "analyses": {}}


@pytest.fixture
def rungs(values):
    for key in ("budget", "seeds", "half_budget"):
        del values[key]
    return values | {"rungs": [CHECK, LOWEST, MORE_SEEDS, HIGHEST]}


@pytest.fixture
def open_ladder(write, tmp_path):
    """Values, more words → the ladder of an output folder."""
    words = ["--output-dir", str(tmp_path / "out")]
    return lambda values, *more: plan_experiment(parse_arguments([str(write(values)), *words, *more]))


def finish(ladder: Experiment, loss: float = 5.0) -> None:
    for work in ladder.works:
        for run in work.runs:
            if run.job.name not in ladder.store:
                finish_run(work, run, loss + run.seed / 1e4 + run.half)
        for analysis in work.measures:
            if analysis.job.name not in ladder.store:
                finish_similarity(work, analysis.run, 0.3, 0.2)
    ladder.record()


def test_an_entry_of_rungs_replaces_keys_of_the_file_and_a_mistake_is_one_line(rungs, write):
    plans = read_plans(write(rungs))
    assert [plan.budget.tokens for plan in plans] == [5120, 5120, 5120, 20480]
    assert [plan.seeds for plan in plans] == [(1,), (1234, 1235), (1236,), (1234,)]
    assert [[m.name for m in plan.models] for plan in plans[2:]] == [["BERT (MTH)"], ["BERT (MTH)", "BERT (MLM)"]]
    assert len(plans[1].models) == 2 and plans[1].half_budget == ("BERT (MTH)",) and not plans[2].half_budget
    assert [plan.check for plan in plans] == ["rate", "", "", ""] and plans[0].analyses.self_similarity == 0
    assert all(plan.flags == plans[0].flags for plan in plans)
    assert [plan.workers for plan in read_plans(write(rungs), {"workers": 2})] == [2] * 4
    for rung, expected in (
        ("5 tokens", "rungs[2]: got '5 tokens', expected keys of a plan"),
        ({"seeds": 2}, "rungs[2].budget: missing"),
        (LOWEST | {"models": ["DDRP"]}, "rungs[2].models: got 'DDRP', expected names of models: BERT (MLM), BERT"),
        (LOWEST | {"models": [{"name": "X"}]}, "rungs[2].models: got {'name': 'X'}, expected names of models: BERT"),
        (LOWEST | {"models": ["BERT (MLM)"]}, "rungs[2]: half_budget: got 'BERT (MTH)', expected one of BERT (MLM)"),
    ):
        file = write(rungs | {"rungs": [HIGHEST, rung]})
        wrong_arguments("^" + re.escape(f"{file}: {expected}"), read_plans, file)
    for none in ([], {}, 3, None):
        refused("rungs: expected a list of rungs", read_plans, write(rungs | {"rungs": none}))


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
    work = ladder.works[0]
    run = work.runs[0]
    finish_run(work, run, 5.0 + run.seed / 1e4)
    store_level(run.folder, 7.0, 0.47)
    with (run.folder / "metrics.jsonl").open("a") as stream:
        stream.write(f'{{"iteration": {run.steps}, "other_lm_loss": 6.75}}\n')
    finish(ladder)
    rows = ladder.rows.rows
    assert len(rows) == 10 and not ladder.jobs()
    told = {row["run"]: (row.get("validation_gap"), row["values"].get(OTHER_LOSS)) for row in rows}
    assert told.pop(run.job.name) == (0.47, 6.75) and {*told.values()} == {(None, None)}
    lines = ladder.rows.path.read_text(encoding="utf-8").splitlines()
    assert len([json.loads(line)["crc32"] for line in lines]) == 10
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


def test_a_run_with_a_row_is_not_repeated_in_an_empty_folder_but_for_a_job_of_several(rungs, open_ladder, tmp_path):
    words = ("--rows", str(tmp_path / "kept.jsonl"))
    finish(open_ladder(rungs, *words))
    shutil.rmtree(tmp_path / "out")
    assert not open_ladder(rungs, *words).jobs()
    (tmp_path / "kept.jsonl").unlink()
    assert len([job for job in open_ladder(rungs, *words).jobs() if job.kind == "course"]) == 10
    # throughput times all models together, although some of the runs have rows
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


def test_a_plan_shows_what_was_measured_as_it_says_and_goes_back_without_work(rungs, open_ladder, tmp_path):
    """Other measures of the same runs are neither shown as this plan's nor compared with them."""
    first, second = rungs, rungs | {"analyses": {"self-similarity": 11}}
    finish(open_ladder(first))
    ladder = open_ladder(second)
    assert {job.kind for job in ladder.jobs() if job.name not in ladder.store} == {"self-similarity"}
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
    rows = open_rows(tmp_path / "out" / "rows.jsonl").rows
    assert len(rows) == 10 + 7 and len({row["run"] for row in rows}) == 10  # a new measure's row replaces the old
    for plan in (first, second):
        ladder = open_ladder(plan)
        assert not ladder.jobs() and not ladder.left_out
        assert len([row for row in ladder.rows if ladder.rank(row) == 2]) == 10 == len(ladder.finished_runs())


def test_models_with_batches_of_their_own_share_the_rung_of_a_budget_in_tokens(rungs, open_ladder):
    rungs["models"][1]["flags"] = {"global-batch-size": 12, "micro-batch-size": 4}
    ladder = open_ladder(rungs | {"rungs": [{"budget": {"tokens": 5000}, "seeds": 1}]})
    finish(ladder)
    assert {row["steps"] for row in ladder.rows} == {39, 13}
    assert {row["planned_tokens"] for row in ladder.rows} == {5000}


def test_a_run_without_all_measures_has_no_row_and_one_that_a_check_shares_has_the_rungs(rungs, open_ladder, tmp_path):
    ladder = open_ladder(rungs | {"rungs": [CHECK | {"seeds": [1234]}, LOWEST]})
    finish_run(ladder.works[0], ladder.works[0].runs[0], 5.0)
    ladder.record()
    assert not ladder.rows.rows  # the rung's measures are missing
    finish(ladder)
    assert [row["check"] for row in ladder.rows] == [""] * 6
    ladder = open_ladder(rungs, "--output-dir", str(tmp_path / "other"))
    for work in ladder.works:
        for run in work.runs:
            finish_run(work, run, 5.0)
    ladder.record()
    assert {row["check"] or row["half"] for row in ladder.rows} == {"rate", True}  # they have no analysis


def test_the_dry_run_prints_every_rung_and_once_that_bf16_is_slow_here(rungs, write, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    in_bf16 = HIGHEST | {"training": rungs["training"] | {"bf16": True}}
    printed = []
    for plan in (rungs, rungs | {"rungs": [LOWEST, in_bf16]}):
        assert main([str(write(plan)), "--output-dir", str(tmp_path / "out"), "--dry-run", "--page-only"]) == 0
        printed.append(capsys.readouterr().out)
    assert [text.count("this CPU has no AVX-512") for text in printed] == [0, 1]
    for words in (
        *("4 budgets", "2 models x 1 seed (1234)", "20,480 tokens each", "check, rate: 1 model x 1 seed (1)"),
        "and half of it",
    ):
        assert words in printed[0]
    assert not (tmp_path / "out").exists()


def test_other_validation_text_is_told_once(rungs, open_ladder, write, prose_then_code, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Runner, "run", lambda *_, **__: None)
    words = ["--output-dir", str(tmp_path / "out"), "--no-wait"]
    for prefix, count in ((rungs["corpus"]["data_path"][0], 0), (prose_then_code, 1)):
        plan = rungs | {"corpus": rungs["corpus"] | {"data_path": [prefix]}}
        assert main([str(write(plan)), *words]) == 0
        assert capsys.readouterr().out.count("the validation text is of another kind") == count
    finish(open_ladder(plan))
    assert main([str(write(plan)), *words]) == 0
    assert "of another kind" not in capsys.readouterr().out


def test_the_tokens_of_a_curve_are_those_of_metrics_jsonl(tmp_path):
    """Short rows in the first six of ten steps; a validation between two logged steps."""
    tokens = {1: 8, 2: 16, 4: 32, 6: 48, 8: 176, 10: 304}
    rows = [{"iteration": step, "consumed_tokens": count, "lm_loss": 5.0} for step, count in tokens.items()]
    rows += [{"iteration": step, "valid_lm_loss": 5.0} for step in (5, 9, 10)]
    write_lines(tmp_path / "metrics.jsonl", rows)
    found = Recording(cast(Any, None), cast(Any, SimpleNamespace(folder=tmp_path, steps=10)))
    assert [point[0] for point in found.curves[TRAINING_LOSS]] == list(tokens.values())
    assert [point[0] for point in found.curves[LOSS]] == [40, 240, 304]
    assert [found.tokens_at(step) for step in (0, 3, 7)] == [0, 24, 112] and found.tokens == 304


NAME = "course-bert-mth-half-the-budget-1235-"
CURVES = {TRAINING_LOSS: [[9, 7.0], [500, 6.28571]], LOSS: [[2000, 5.12346]]}
RUN = RunRow("course-m-1", "m", "rope", "mlm", 1, 2048, {LOSS: 5.123456789}, hardware="Some CPU", curves=CURVES)


def test_equal_losses_are_equal_to_the_last_digit_and_what_differs_is_named_with_its_place_and_the_machines():
    told = "equal to the last digit: 3 of 3 points and the validation loss 5.123456789"
    at_other_tokens = {name: [[at + 1, loss] for at, loss in points] for name, points in CURVES.items()}
    assert RUN.check_equal(RUN) == replace(RUN, curves=at_other_tokens).check_equal(RUN) == told
    untold = {"values": {LOSS: 5.0}, "hardware": "", "versions": {"torch": "1"}}
    for changes, told in (
        ({"curves": CURVES | {TRAINING_LOSS: [[9, 7.0], [500, 6.28562]]}}, f"2 of 3 .* 9e-05, {TRAINING_LOSS} at 500 "),
        ({"curves": CURVES | {LOSS: []}}, "2 of 3 points are; .* the row has nothing; only this machine has nothing;"),
        ({"curves": CURVES | {LOSS: [*CURVES[LOSS], [2001, 5.0]]}}, "3 of 4 points are; largest difference 0, "),
        ({"values": {LOSS: 5.123456788}}, "3 of 3 .* 5.123456788 in the row, 5.123456789 here, difference 1e-09; only"),
        (untold, "untold hardware, torch 1; .* has Some CPU;"),
    ):
        refused(f"^not equal: .*{told}", replace(RUN, **changes).check_equal, RUN)


def test_one_run_is_trained_again(values, tiny_corpus, write, open_work, write_rows, tmp_path, monkeypatch, capsys):
    values["corpus"] = {"input": [str(tiny_corpus.text_file)], "vocab_file": str(tiny_corpus.vocab_file)}
    work, trained = open_work(values), []
    plan = write(values | {"minimal_pairs": {"data_dir": "nowhere"}})
    run = next(run for run in work.runs if run.job.name.startswith(NAME))
    finish_run(work, run, 5.123456789)
    row = make_row(work, run)
    rows = write_rows([row | {"run": f"{NAME[:-2]}4-0"}, row | {"values": {LOSS: 1.0}}, row])

    def train(runner, jobs):
        trained.append([job.kind for job in jobs])
        again = PlanJobs(work.plan, runner.folder, runner.store)
        for job in jobs[:-1]:
            record(again, job)
        finish_run(again, next(run for run in again.runs if run.job == jobs[-1]), 5.123456789)

    def reproduce(name, rows=rows):
        words = ["--reproduce", name, "--rows", str(rows), "--output-dir", str(tmp_path / "out")]
        return main([str(plan), *words])

    monkeypatch.setattr(Runner, "run", train)
    before = rows.read_bytes()
    assert reproduce(NAME) == 0 and trained == [["dataset", "dataset", "course"]]
    assert capsys.readouterr().out.endswith(" 3 of 3 points and the validation loss 5.123456789\n")
    assert len([*tmp_path.glob("out/reproduced/courses/*")]) == 1 and not [*tmp_path.glob("out/**/rows.jsonl")]
    assert row["hardware"] == "2 cores of Some CPU, 1 thread" and rows.read_bytes() == before
    wrong_arguments("'course-brt': 0 runs of .* fit; give one of .*4-0, course-bert-mth", reproduce, "course-brt")
    wrong_arguments("'course': 2 runs of .*rows.jsonl fit; give one of .*4-0, .*1235-", reproduce, "course")
    wrong_arguments("4-0 is no run of .*plan.yaml; it had another text", reproduce, f"{NAME[:-2]}4-0")
    wrong_arguments(": 0 runs of .* fit", reproduce, NAME, write_rows([row | {"values": {}}]))
