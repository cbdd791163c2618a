"""Jobs in several processes: order, failures told with their log, one process a job, nothing done twice."""

from __future__ import annotations

import json
import queue
import sys
import threading
import time

import pytest

from megatron_ddrp.errors import UserError
from megatron_ddrp.lab.compare.experiment import Runner, full_command
from megatron_ddrp.lab.compare.plan import make_config
from megatron_ddrp.lab.compare.runs import Job, facts_of, job_name, open_store, start_of


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "out"


@pytest.fixture
def runner(folder):
    """workers → a runner and the lines that it says."""

    def make(workers=2):
        lines: list[str] = []
        return Runner(open_store(folder), workers, lines.append), lines

    return make


def job(folder, name, code="pass", needs=()):
    """A job that leaves a file with one line a time it was done."""
    output = folder / f"{name}.txt"
    write = f"open({str(output)!r}, 'a').write('done\\n')"
    return Job("triangle", name, name, (sys.executable, "-c", f"{code}; {write}"), output, tuple(needs))


def test_needs_come_first_and_nothing_is_done_twice(runner, folder):
    jobs = [job(folder, "third", needs=["second"]), job(folder, "second", needs=["first"]), job(folder, "first")]
    for _ in range(2):
        done, _ = runner()
        done.run(jobs)
        assert [row["job"] for row in open_store(folder)] == ["first", "second", "third"] and not done.failed
        assert {j.output.read_text() for j in jobs} == {"done\n"}


def test_a_failure_is_told_with_its_log_and_the_others_go_on(runner, folder):
    bad = job(folder, "bad", "print('out of luck'); raise SystemExit(3)")
    jobs = [bad, job(folder, "after", needs=["bad"]), job(folder, "other")]
    done, lines = runner()
    done.run(jobs)
    assert [row["job"] for row in open_store(folder)] == ["other"]
    assert set(done.failed) == {"bad", "after"} and done.failed["after"] == "needs bad"
    told = next(line for line in lines if line.startswith("FAILED"))
    assert "exit code 3, out of luck" in told and str(folder / "logs" / "bad.log") in told


def test_a_process_that_makes_nothing_has_failed(runner, folder):
    idle = Job("triangle", "idle", "idle", (sys.executable, "-c", "pass"), folder / "nothing")
    done, lines = runner()
    done.run([idle])
    assert "idle" in done.failed and "it made no" in lines[-1]


def test_two_runners_share_the_jobs(runner, folder):
    jobs = [job(folder, f"j{number}", "import time; time.sleep(0.1)") for number in range(6)]
    runners = [runner(1)[0] for _ in range(2)]
    threads = [threading.Thread(target=r.run, args=(jobs,)) for r in runners]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert {j.output.read_text() for j in jobs} == {"done\n"} and len(open_store(folder).rows) == 6


def test_a_job_that_another_process_holds_is_waited_for(runner, folder):
    only = job(folder, "only")
    lease = open_store(folder).lease("only")
    assert lease and open_store(folder).lease("only") is None
    done, _ = runner()
    lines = queue.SimpleQueue()
    done.say = lines.put
    thread = threading.Thread(target=done.run, args=([only],))
    thread.start()
    assert "waiting for that process" in lines.get(timeout=60) and not only.output.exists()
    lease.close()
    thread.join(60)
    assert only.output.read_text() == "done\n"


def test_a_runner_that_does_not_wait_leaves_what_others_hold(runner, folder):
    held, free = job(folder, "held"), job(folder, "free")
    after = job(folder, "after", needs=["free"])
    score, table = job(folder, "score", needs=["held"]), job(folder, "table", needs=["score", "free"])
    jobs = [held, free, after, score, table]
    lease = open_store(folder).lease("held")
    done, _ = runner(1)
    thread = threading.Thread(target=done.run, args=(jobs, False), daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert [row["job"] for row in open_store(folder)] == ["free", "after"]
    assert done.left(jobs) == [held, score, table] and not done.failed
    lease.close()
    done.run(jobs, wait=False)
    assert done.left(jobs) == []


def test_workers_share_the_cores(runner, folder, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("megatron_ddrp.lab.compare.experiment.os.cpu_count", lambda: 8)
    threads = "import os; open('{}', 'w').write(os.environ.get('OMP_NUM_THREADS', 'all'))"
    for workers, expected in ((4, "2"), (1, "all")):
        told = folder / f"threads-{workers}"
        done, _ = runner(workers)
        done.run([job(folder, f"w{workers}", threads.format(told))])
        assert told.read_text() == expected


def test_names_tell_facts_apart():
    names = {job_name("course", "BERT (MTH α1=0.1)", facts) for facts in ([1], [2], [1, 2])}
    assert len(names) == 3 and all(name.startswith("course-bert-mth-a1-0.1-") for name in names)


@pytest.mark.parametrize(
    ("tokenizer", "name"),
    [
        ("BertWordPieceLowerCase", "708debe29b69"),
        ("BertWordPieceCase", "538243eabaa2"),
        ("HuggingFace", "d6d77b193eb7"),
    ],
)
def test_runs_of_earlier_versions_keep_their_names(tokenizer, name):
    settings = {"tokenizer_type": tokenizer, "position_encoding": "rope", "seed": 1235, "lr": 2e-3, "packing": True}
    settings |= {"train_iters": 300, "num_layers": 2, "lr_warmup_fraction": 0.05, "bf16": True, "objective": "mth"}
    places = {"data_path": ("a",), "vocab_file": "v", "log_interval": 3}
    assert job_name("course", "x", [facts_of(make_config(settings | places, "plan"))]) == f"course-x-{name}"


def test_a_file_that_only_says_what_is_so_anyway_leaves_the_name(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 1}}', encoding="utf-8")
    config = make_config({"deepspeed_config": str(path)}, "plan")
    assert config.parallel.decided_by_deepspeed_config == ("zero_stage",)
    assert facts_of(config)["parallel"] == {"deepspeed_config": str(path)}


def test_cuda_graphs_leave_the_name():
    assert facts_of(make_config({"cuda_graphs": "on"}, "plan")) == facts_of(make_config({}, "plan"))


@pytest.mark.parametrize(
    ("launcher", "words"),
    [
        ("python", [sys.executable, "-m", "megatron_ddrp", "pretrain"]),
        ("python -m torch.distributed.run --nproc-per-node 2", [sys.executable, "-m", "torch.distributed.run"]),
        ("deepspeed --num_gpus 2", ["deepspeed", "--num_gpus", "2", "--module", "megatron_ddrp", "pretrain"]),
        ("torchrun --nproc-per-node 2", ["torchrun", "--nproc-per-node", "2", "-m", "megatron_ddrp", "pretrain"]),
    ],
)
def test_a_launcher_keeps_its_own_words(launcher, words):
    command = full_command(start_of(launcher))
    assert command[: len(words)] == words and command[-2:] == ["megatron_ddrp", "pretrain"]


def test_a_foreign_line_in_the_store_is_named(folder):
    folder.mkdir()
    (folder / "jobs.jsonl").write_text('{"run": 1}\n')
    with pytest.raises(UserError, match=r"jobs\.jsonl, line 1: not a job finished by megatron-ddrp compare"):
        open_store(folder)


def test_the_plan_counts_the_jobs_of_each_kind_and_takes_the_mean_of_finished_ones(folder):
    lines = Runner(store := open_store(folder), 2)
    store.append({"job": "p", "kind": "probe", "work": 40, "seconds": 30.0})  # of an earlier version
    jobs = [Job("course", name, name, (), folder, work=100.0) for name in "abc"] + [Job("glue", "g", "g", (), folder)]
    assert lines.plan(jobs) == [
        "4 of 4 jobs to do, 2 at once",
        "     3 x run",
        "     1 x glue",
        "  time left: not known until the first run is finished",
    ]
    store.append({"job": "a", "kind": "course", "work": 100.0, "seconds": 200.0})
    assert lines.plan(jobs)[1:] == [
        "     2 x run",
        "     1 x glue",
        "  time left: more than 3m20s (no glue is finished yet)",
    ]
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
        written = [json.dumps(row) + "\n" for row in rows]
        (folder / "first" / "metrics.jsonl").write_text("".join(written))
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
