"""Ranks and what they say to each other: launchers' variables, rendezvous, devices, places in a grid and agreement.

Variables are complete, or refused before a process trains alone. Ranks that see a GPU and ranks that see none do not
wait for each other. A single rank has no port where torch's backend for it copies, else the real one. The GPU of a rank
follows from the number of GPUs that the launcher lets it see; without a GPU torch's answers are set. Axes of a grid
differ in size. Work may take longer than a collective call may wait.
"""

import datetime
import os
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version

from megatron_ddrp.config import ParallelConfig
from megatron_ddrp.errors import UserError
from megatron_ddrp.parallel import process_group, rendezvous
from megatron_ddrp.parallel.pipeline import seed_draws
from megatron_ddrp.parallel.process_group import Ranks, gather_rows, own_device, place_in_grid, row_counts
from megatron_ddrp.parallel.rendezvous import complete_environment, refuse_other_devices
from tests.refusals import refused, wrong_arguments


@pytest.fixture
def meetings(monkeypatch):
    """Answers of the other rank, one per collective call; without more of them the other rank is done and content."""
    answers, seen = [], []

    def gather(own):
        seen.append(own)
        other = answers.pop(0) if answers else (True if isinstance(own, bool) else None)
        return [own, other] if isinstance(own, bool) else [own, ("b", other)]

    monkeypatch.setattr(process_group, "gather_objects", gather)
    monkeypatch.setattr("socket.gethostname", lambda: "a")
    monkeypatch.setattr(process_group, "PAUSE", 0.01)
    return answers, seen


def test_ranks_meet_while_this_one_works(meetings):
    _, seen = meetings
    enough = Event()

    def work():
        while len(seen) < 4:
            enough.wait(0.001)
        return "read"

    assert process_group.agree_on_long_work(work) == "read"
    assert seen[:4] == [False] * 4 and seen[-2:] == [True, ("a", None)]


def test_a_rank_that_is_done_meets_those_that_work(meetings):
    answers, seen = meetings
    answers += [False, False, False]
    assert process_group.agree_on_long_work(lambda: 3) == 3
    assert seen == [True, True, True, True, ("a", None)]


def test_errors_of_both_ranks_are_raised_here(meetings):
    answers, _ = meetings

    def refuse():
        raise UserError("damaged", 2)

    assert wrong_arguments(r"^damaged \(on host a\)$", process_group.agree_on_long_work, refuse).agreed
    answers += [True, ("of another rank", 1)]
    refused(r"^of another rank \(on host b\)$", process_group.agree_on_long_work, lambda: None)
    with pytest.raises(ZeroDivisionError):
        process_group.agree_on_long_work(lambda: 1 // 0)


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ([("a", ("no vocabulary", 2)), ("a", ("no vocabulary", 2))], "no vocabulary"),
        ([("a", ("no vocabulary", 2)), ("b", ("no vocabulary", 2))], "no vocabulary"),
        ([("a", None), ("a", ("of rank 1", 2)), ("a", ("of rank 2", 1))], "of rank 1"),
    ],
)
def test_of_several_errors_the_first_ranks_is_raised_and_one_of_all_hosts_names_none(monkeypatch, told, words):
    monkeypatch.setattr(process_group, "gather_objects", lambda _: told)
    wrong_arguments(f"^{words}$", process_group.agree, lambda: None)


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ({"--seed": "2", "--notes": "False"}, "--seed is 2 on rank 2 (host b) and 1 on rank 0: start all"),
        ({"--seed": "1"}, "--notes is not given on rank 2 (host b) and False on rank 0: start all"),
        ({"--seed": "1", "--notes": "False", "dataset 2": "x"}, "dataset 2 is x on rank 2 (host b) and not given on"),
    ],
)
def test_ranks_with_other_settings_are_refused_on_every_rank(monkeypatch, theirs, words):
    own = {"--seed": "1", "--notes": "False"}
    monkeypatch.setattr(process_group, "gather_objects", lambda item: [("a", own), item, ("b", theirs)])
    assert wrong_arguments(f"^{re.escape(words)}", process_group.refuse_differences, own).agreed
    monkeypatch.setattr(process_group, "gather_objects", lambda item: [("a", own), item, ("b", own)])
    process_group.refuse_differences(own)


@pytest.fixture
def join_alone(monkeypatch):
    """Form the group as `start` does for one process; returns the backend's name. The group is gone after the test."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)

    def join():
        rendezvous.join("gloo", datetime.timedelta(seconds=60))
        return dist.get_backend()

    yield join
    if dist.is_initialized():
        dist.destroy_process_group()


def test_one_rank_needs_no_real_backend_from_torch_2_13_on(join_alone):
    assert join_alone() == ("fake" if Version(torch.__version__) >= Version("2.13") else "gloo")


@pytest.mark.parametrize(
    "call", ["all_gather_into_tensor", "reduce_scatter_tensor", "reduce_scatter", "all_to_all_single"]
)
def test_a_call_that_copies_nothing_is_not_trusted(join_alone, monkeypatch, call):
    real = getattr(dist, call)
    monkeypatch.setattr(dist, call, lambda *arguments, **options: None)
    assert join_alone() == "gloo"
    monkeypatch.setattr(dist, call, real)
    total = torch.ones(2)
    dist.all_reduce(total)
    assert total.tolist() == [1.0, 1.0]


ALL = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
SRUN = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1"}
BATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
STARTED_BY_SRUN = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"}
"""What mpirun's own daemon on the second node passes on."""
MEETING = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}


@pytest.fixture
def given(monkeypatch):
    """Complete an environment that has only these variables; returns rank, number of ranks and local rank."""

    def complete(variables):
        monkeypatch.setattr(os, "environ", dict(variables))
        complete_environment()
        return tuple(os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))

    return complete


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, ("0", "1", "0")),
        (ALL, ("1", "2", "1")),
        ({"RANK": "0", "WORLD_SIZE": "1"}, ("0", "1", None)),
        (SRUN | MEETING, ("3", "4", "1")),
        (BATCH, ("0", "1", "0")),  # the batch script itself, without srun
        ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "MASTER_ADDR": "node1"}, ("0", "1", "0")),  # and without --ntasks
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, ("0", "1", "0")),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, ("0", "1", "0")),
        (MPIRUN | MEETING, ("3", "4", "1")),
        (STARTED_BY_SRUN | MPIRUN | MEETING, ("3", "4", "1")),
    ],
)
def test_a_complete_environment(given, variables, expected):
    assert given(variables) == expected


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (SRUN, "srun started 4 processes, and each would run alone.* export MASTER_ADDR and MASTER_PORT"),
        (SRUN | {"MASTER_ADDR": "node1"}, "srun started 4 processes, .* export MASTER_ADDR and MASTER_PORT"),
        (SRUN | {"MASTER_PORT": "29500"}, "srun started 4 processes, .* export MASTER_ADDR and MASTER_PORT"),
        (BATCH | {"MASTER_ADDR": "node1"}, "the job has 4 tasks, but srun did not start this process"),
        (
            MPIRUN,
            "mpirun started 4 processes.* export MASTER_ADDR and MASTER_PORT before it .mpirun passes them on by -x",
        ),
        ({"PMI_SIZE": "2"}, "mpiexec started 2 processes"),
        ({"RANK": "0"}, "WORLD_SIZE is not set, but RANK is"),
        *((({k: v for k, v in ALL.items() if k != name}), f"{name} is not set") for name in list(ALL)[1:]),
        (ALL | {"MASTER_PORT": "abc"}, "MASTER_PORT is 'abc', not a number"),
        (ALL | {"RANK": "-1"}, "RANK is '-1', not a number"),
    ],
)
def test_processes_that_cannot_meet_are_refused(given, variables, message):
    refused(message, given, variables)


@pytest.fixture
def host(monkeypatch):
    """Return a function that sets the number of GPUs that torch sees, and the variables of the launcher."""

    def show(gpus, **variables):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "get_arch_list", list)
        monkeypatch.delenv("SLURM_LOCALID", raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return show


def test_each_rank_has_the_gpu_of_its_number_or_its_own_or_the_cpu(host):
    host(8, LOCAL_RANK="3", SLURM_LOCALID="3")
    assert own_device(3) == torch.device("cuda", 3)
    assert os.environ["LOCAL_RANK"] == "3"
    host(1, LOCAL_RANK="3", SLURM_LOCALID="3")
    assert own_device(3) == torch.device("cuda", 0)
    assert os.environ["LOCAL_RANK"] == "0"  # DeepSpeed takes its device from there
    host(0, LOCAL_RANK="2")
    assert own_device(2) == torch.device("cpu")


@pytest.mark.parametrize(
    ("gpus", "variables", "expected"),
    [
        (1, {}, "sees 1 GPU, and each rank needs its own: start at most 1 per host"),
        (1, {"SLURM_LOCALID": "0"}, "sees 1 GPU, "),  # torchrun, started once per host by srun
        (2, {"SLURM_LOCALID": "2"}, "sees 2 GPUs, .* at most 2 per host"),
    ],
)
def test_more_ranks_than_gpus_end_in_one_line(host, gpus, variables, expected):
    host(gpus, LOCAL_RANK="2", **variables)
    refused(f"^rank 2 of this host {expected}", own_device, 2)


def outcomes(*backends: str) -> list[UserError | None]:
    """Return the error of each rank, or None; all ranks share one store."""
    store = dist.HashStore()

    def meet(rank: int) -> UserError | None:
        try:
            refuse_other_devices(store, rank, len(backends), backends[rank])
        except UserError as error:
            return error
        return None

    with ThreadPoolExecutor(len(backends)) as pool:
        return list(pool.map(meet, range(len(backends))))


@pytest.mark.parametrize("backends", [("nccl", "gloo"), ("gloo", "nccl"), ("nccl", "gloo", "nccl")])
def test_ranks_on_other_devices_are_refused_on_every_rank(backends: tuple[str, ...]) -> None:
    for error in outcomes(*backends):
        assert error is not None and error.agreed
        assert f"a GPU on some ranks but none on {socket.gethostname()}, and" in str(error)


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_ranks_on_one_kind_of_device_meet(backend: str) -> None:
    assert outcomes(backend, backend) == [None, None]


@pytest.mark.parametrize("seed", [0, 1234, 2**63 - 1])
def test_draws_follow_the_seed_as_those_of_torch(seed: int) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        expected = torch.rand(9)
        seed_draws(seed, torch.device("cpu"))
        assert torch.equal(torch.rand(9), expected)
        assert not torch.equal(torch.rand(9), expected)


CPU = torch.device("cpu")


@pytest.fixture
def place(monkeypatch):
    """Return a function that places a rank of 12, with groups as their members; and the groups made by each rank."""
    made = []

    def placed(rank):
        made.append([])
        monkeypatch.setattr(dist, "get_rank", lambda: rank)
        monkeypatch.setattr(dist, "get_world_size", lambda: 12)
        monkeypatch.setattr(dist, "new_group", lambda row, **_: made[-1].append(row) or row)
        return place_in_grid(CPU, ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2))

    return placed, made


def test_a_rank_has_its_place_and_its_groups_on_each_axis(place):
    """Tensor-parallel ranks are neighbours, data-parallel ranks 2 apart, and stages of a pipeline 6 apart."""
    placed, made = place
    ranks = placed(9)
    places = ranks.pipeline_rank, ranks.pipeline_size, ranks.data_rank, ranks.data_size
    assert (*places, ranks.tensor_rank, ranks.tensor_size) == (1, 2, 1, 3, 1, 2)
    assert ranks.data_group == [7, 9, 11] and ranks.tensor_group == [8, 9]
    assert ranks.model_group == [2, 3, 8, 9] and ranks.pipeline_group == [3, 9]
    placed(2)
    assert made[0] == made[1], "all ranks create all groups in one order"


def test_rows_of_all_ranks_are_joined_without_padding(monkeypatch):
    """The longest part is neither the first nor the last."""
    parts = [torch.full((count, 2), float(rank)) for rank, count in enumerate((1, 3, 0, 2))]

    def gather(found, padded):
        assert padded.tolist() == [[3.0, 3.0]] * 2 + [[0.0, 0.0]]
        for place, own in zip(found, parts, strict=True):
            place.fill_(-1)
            place[: len(own)] = own

    monkeypatch.setattr(dist, "all_gather", gather)
    rows = torch.full((5, 2), 3.0)
    joined = gather_rows(rows, [1, 3, 0, 2], Ranks(3, 4, CPU))
    assert joined.tolist() == torch.cat(parts).tolist()


@pytest.mark.parametrize(("tensor_rank", "pipeline_rank", "counted"), [(0, 1, 7), (1, 1, 0), (0, 0, 0)])
def test_rows_of_a_sample_count_once(monkeypatch, tensor_rank, pipeline_rank, counted):
    monkeypatch.setattr(process_group, "sum_over_ranks", lambda counts: counts)
    own = {"tensor_rank": tensor_rank, "tensor_size": 2, "pipeline_rank": pipeline_rank, "pipeline_size": 2}
    assert row_counts(7, Ranks(1, 4, CPU, **own)).tolist() == [0, counted, 0, 0]


@pytest.mark.parametrize(("came", "absent"), [([0], "ranks 1, 2"), ([0, 2], "rank 1")])
def test_ranks_that_do_not_come_are_named(came, absent):
    store, patience = dist.HashStore(), datetime.timedelta(seconds=0.3)

    def wait(rank):
        refused(f"{absent} did not come within 0.005 minutes", rendezvous.wait_for_all, store, rank, 3, patience)

    with ThreadPoolExecutor(len(came)) as pool:
        list(pool.map(wait, came))
