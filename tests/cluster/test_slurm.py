"""Real `sbatch` of the recipes: jobs that stop, queue themselves again and resume, each with its own fault.

Slurm waits two minutes before it starts a requeued job. So all jobs are queued at once, then each gets its fault, and
then each is looked at: a story is a generator with these three parts.
"""

import re
import shlex
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import Host, missing, wait_for
from tests.cluster.runs import Seen, assert_equal, exit_code, hold, let_go, rows_of, wait_for_step
from tests.cluster.slurm import ENDED, HELD_AT, PATIENCE, RECIPE, STEPS, Job, Slurm
from tests.conftest import TinyCorpus
from tests.integration.conftest import Flags

Story = Iterator[None]
AGAIN = "saved, queued again by itself, 1 restart, bit for bit"


def assert_resumed(job: Job) -> None:
    """Check that a job completed after one restart, and that its run equals the undisturbed one bit for bit."""
    info = job.wait_until(*ENDED)
    assert (info["JobState"], info["Restarts"]) == ("COMPLETED", "1"), job.explain()
    whole = job.slurm.folder / "whole"
    wait_for(lambda: exit_code(whole) == "0", job.explain, PATIENCE)
    assert_equal(job.save, whole, STEPS)


def nothing_happens(slurm: Slurm, seen: Seen) -> Story:
    job = slurm.submit("whole", held_at=STEPS + 1)
    yield
    yield
    assert job.wait_until(*ENDED)["JobState"] == "COMPLETED", job.explain()
    assert [row["iteration"] for row in rows_of(job.save)] == list(range(1, STEPS + 1))
    seen("sbatch", "nothing", "COMPLETED")


def usr1_and_a_job_behind(slurm: Slurm, seen: Seen) -> Story:
    """Warn a job as before its time limit; another job waits for its end."""
    job = slurm.submit("usr1")
    script = f"sbatch --parsable --dependency=afterok:{job.number} -o /dev/null --wrap 'cp {job.save}/exit_code {{}}'"
    behind = Job(slurm, slurm.run(script.format(slurm.folder / "behind")).strip(), job.save)
    yield
    job.wait_until_held()
    slurm.run(f"scancel --signal=USR1 {job.number}")
    let_go(job.save)
    job.wait_until("PENDING")
    assert behind.info()["JobState"] == "PENDING"
    yield
    assert_resumed(job)
    behind.wait_until("COMPLETED")
    assert (slurm.folder / "behind").read_text() == "0\n"
    seen("sbatch", "scancel --signal=USR1", AGAIN)
    seen("sbatch", "a job with afterok behind it", "waits for the last start's end")


def time_limit(slurm: Slurm, seen: Seen) -> Story:
    """Let Slurm itself send the warning, up to a minute before it is due."""
    job = slurm.submit("limit", "--time=5", "--signal=USR1@240")
    yield
    job.wait_until_held()
    yield
    wait_for(lambda: job.info()["RunTime"] >= "00:01:20" or job.info()["JobState"] != "RUNNING", job.explain, PATIENCE)
    let_go(job.save)
    assert_resumed(job)
    seen("sbatch", "time limit with --signal=USR1@…", AGAIN)


def usr1_before_the_first_step(slurm: Slurm, seen: Seen) -> Story:
    job = slurm.submit("early", held_at=0)
    yield
    wait_for(lambda: "layout: 2 ranks" in job.text(), job.explain)
    slurm.run(f"scancel --signal=USR1 {job.number}")
    let_go(job.save)
    job.wait_until("PENDING")
    yield
    assert_resumed(job)
    seen("sbatch", "USR1 before the first step", AGAIN.removeprefix("saved, "))


def scontrol_requeue(slurm: Slurm, seen: Seen) -> Story:
    job = slurm.submit("requeue")
    yield
    job.wait_until_held()
    slurm.run(f"scontrol requeue {job.number}")
    let_go(job.save)
    yield
    assert_resumed(job)
    assert f"resumed from {job.save} at step " in job.text()
    seen("sbatch", "scontrol requeue", "saved, 1 restart, bit for bit")


def preemption(slurm: Slurm, seen: Seen) -> Story:
    job = slurm.submit("preempted", "-p", "low")
    yield
    job.wait_until_held()
    slurm.run("sbatch --parsable -p high -N2 -n2 --exclusive -o /dev/null --wrap 'sleep 1'")
    let_go(job.save)
    job.wait_until("PENDING")
    yield
    assert_resumed(job)
    seen("sbatch", "preempted by a partition of higher priority", "saved, 1 restart, bit for bit")


def power_cut_of_a_node(slurm: Slurm, seen: Seen) -> Story:
    job = slurm.submit("lost", "-p", "spare")
    yield
    job.wait_until_held()
    node = job.last_node()
    node.power_off()
    let_go(job.save)
    yield
    assert_resumed(job)
    node.power_on()
    seen("sbatch", "power cut of a node", "requeued by Slurm, 1 restart, bit for bit")


def scancel(slurm: Slurm, seen: Seen) -> Story:
    job = slurm.submit("cancelled")
    yield
    job.wait_until_held()
    slurm.run(f"scancel {job.number}")
    let_go(job.save)
    yield
    info = job.wait_until(*ENDED)
    assert (info["JobState"], info["Restarts"], exit_code(job.save)) == ("CANCELLED", "0", "75"), job.explain()
    seen("sbatch", "scancel", "saved (75), CANCELLED, not queued again")


def sigkill_of_a_rank(slurm: Slurm, seen: Seen) -> Story:
    job = slurm.submit("killed")
    yield
    job.wait_until_held()
    job.last_node().signal_rank(signal.SIGKILL, job.save)
    let_go(job.save)
    yield
    info = job.wait_until(*ENDED)
    assert (info["JobState"], info["Restarts"]) == ("FAILED", "0"), job.explain()
    assert job.text().count("lost another rank: ") <= 1 and "Traceback" not in job.text()
    assert not any(host.ranks(job.save) for host in slurm.nodes)
    seen("sbatch", "SIGKILL of a rank", "FAILED, the other rank ends, not queued again")


def array_of_seeds(slurm: Slurm, seen: Seen) -> Story:
    """Warn the task whose job has the array's own number: the other one must go on alone."""
    saves = {str(seed): slurm.folder / f"array-seed{seed}" for seed in (1, 2)}
    for save in saves.values():
        hold(save, HELD_AT)
    variables = {"SAVE": str(slurm.folder / "array"), "SBATCH_OUTPUT": f"{slurm.folder}/%j.out"}
    variables |= {"SEEDS": "1-2", "NODES": "2", "GPUS": "1"}
    number = re.findall(r"job (\d+)", slurm.run(f"bash {RECIPE} {shlex.join(slurm.words())}", **variables))[-1]
    yield
    tasks = {seed: Job(slurm, f"{number}_{seed}", save) for seed, save in saves.items()}
    for task in tasks.values():
        wait_for_step(task.save, HELD_AT, task.explain)
    warned = next(seed for seed, task in tasks.items() if task.info()["JobId"] == number)
    other = "1" if warned == "2" else "2"
    slurm.run(f"scancel --signal=USR1 {number}_{warned}")
    let_go(saves[warned])
    tasks[warned].wait_until("PENDING")
    assert tasks[other].info()["JobState"] == "RUNNING"
    let_go(saves[other])
    yield
    for seed, restarts in ((other, "0"), (warned, "1")):
        info = tasks[seed].wait_until(*ENDED)
        assert (info["JobState"], info["Restarts"]) == ("COMPLETED", restarts), tasks[seed].explain()
        assert [row["iteration"] for row in rows_of(saves[seed])] == list(range(1, STEPS + 1))
    assert rows_of(saves["1"]) != rows_of(saves["2"])
    seen("SEEDS=1-2 bash pretrain_ddrp_base_slurm.sh", "USR1 to one task", "it alone is queued again; each step once")


def parts_of_a_corpus(slurm: Slurm, seen: Seen) -> Story:
    corpus, prefix = slurm.corpus, slurm.folder / "parts"
    variables = {"SBATCH_MEM_PER_NODE": "1000", "SBATCH_OUTPUT": f"{slurm.folder}/%A-%a.out", "PARTS": "3"}
    variables |= {"INPUT": str(corpus.text_file), "PREFIX": str(prefix), "VOCAB": str(corpus.vocab_file)}
    printed = slurm.run("bash examples/preprocess_slurm.sh", **variables)
    merge = Job(slurm, re.findall(r"merge: (\d+)", printed)[0], prefix)
    yield
    yield
    assert merge.wait_until(*ENDED)["JobState"] == "COMPLETED", merge.explain()
    for suffix in ("bin", "idx"):
        once = Path(f"{corpus.prefix}.{suffix}").read_bytes()
        assert Path(f"{prefix}_text_document.{suffix}").read_bytes() == once
    seen("preprocess_slurm.sh", "nothing", "array and merge: the bytes of one run")


def shell_of_salloc(slurm: Slurm, seen: Seen) -> Story:
    """`srun` inside `salloc` needs MASTER_ADDR, as launching.md says."""
    yield
    yield
    words = " ".join([*slurm.words(), "--train-iters", "4", "--save", str(slurm.folder / "salloc")])
    meet = "export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1) MASTER_PORT=23456"
    train = f"srun python pretrain_bert.py {words}"
    done = slurm.control.run(f"salloc -N2 -n2 bash -c '{train}; echo code $?; {meet}; {train}; echo code $?'")
    printed = done.stdout + done.stderr
    assert re.findall(r"^code (\d+)$", printed, re.MULTILINE) == ["1", "0"], printed
    assert "srun started 2 processes" in printed and "Traceback" not in printed
    seen("srun in salloc", "with MASTER_ADDR; without", "0; refused in one line")


STORIES: list[Callable[..., Story]] = [
    nothing_happens,
    time_limit,
    usr1_and_a_job_behind,
    usr1_before_the_first_step,
    scontrol_requeue,
    preemption,
    power_cut_of_a_node,
    array_of_seeds,
    scancel,
    sigkill_of_a_rank,
    parts_of_a_corpus,
    shell_of_salloc,
]


@pytest.fixture(scope="module")
def told(hosts: dict[str, Host], flags: Flags, tiny_corpus: TinyCorpus, seen: Seen) -> dict[str, Story | Exception]:
    """Story → its generator after the first two parts, or the error there."""
    if reason := missing("slurmctld", "slurmd", "munged"):
        pytest.skip(reason)
    slurm = Slurm(hosts, flags, tiny_corpus)
    begun: dict[str, Story | Exception] = {story.__name__: story(slurm, seen) for story in STORIES}
    for _ in ("queue it", "do it harm"):
        for name, story in begun.items():
            try:
                if not isinstance(story, Exception):
                    next(story)
            except Exception as error:  # for the story's own test
                begun[name] = error
    return begun


@pytest.mark.parametrize("name", [story.__name__ for story in STORIES])
def test_job(name: str, told: dict[str, Story | Exception]) -> None:
    story = told[name]
    if isinstance(story, Exception):
        raise story
    assert next(story, "the end") == "the end"
