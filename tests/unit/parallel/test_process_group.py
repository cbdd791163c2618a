"""Ranks and what they say to each other: launchers' variables, rendezvous, devices, places in a grid, agreement, the
parts of a pipeline and those of tensor-parallel maps; without a GPU torch's answers are set."""

import datetime
import os
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ddrp.config import ENCODINGS, ParallelConfig
from megatron_ddrp.errors import UserError
from megatron_ddrp.model import build_model
from megatron_ddrp.model.encoder import SelfAttention
from megatron_ddrp.model.stages import Inputs, NoteInputs, State
from megatron_ddrp.parallel import pipeline, process_group, rendezvous
from megatron_ddrp.parallel.pipeline import Courier, PipelinePart, column_maps, own_part, split_stages
from megatron_ddrp.parallel.process_group import Ranks, gather_rows, own_device, place_in_grid, row_counts
from megatron_ddrp.parallel.rendezvous import complete_environment, refuse_other_devices
from megatron_ddrp.parallel.tensor_parallel import PARALLEL, SelfAttentionOfRanks, own_randomness, specialise
from tests.refusals import refused, wrong_arguments
from tests.unit.model.tiny import some_draws, tiny_batch, tiny_config, tiny_model

CPU = torch.device("cpu")
SIZES = {"hidden_size": 16, "num_attention_heads": 4, "ffn_hidden_size": 24}
OF_ALL_HEADS = {name: {"relative"} for name in ("bert-r", "deberta")} | {"ddrp": {"direction", "distance"}}
OF_ALL_HEADS |= {"tupe-a": {"table"}, "tupe-r": {"table"}, "deberta-v2": {"relative", "norm.weight", "norm.bias"}}


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


def test_ranks_meet_while_one_of_them_works(meetings):
    answers, seen = meetings

    def work():
        while len(seen) < 4:
            time.sleep(0.001)
        return "read"

    assert process_group.agree_on_long_work(work) == "read"
    assert seen[:4] == [False] * 4 and seen[-2:] == [True, ("a", None)]
    seen.clear()
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


def test_of_several_errors_the_first_ranks_is_raised_and_one_of_all_hosts_names_none(monkeypatch):
    for told, words in (
        ([("a", ("no vocabulary", 2)), ("a", ("no vocabulary", 2))], "no vocabulary"),
        ([("a", ("no vocabulary", 2)), ("b", ("no vocabulary", 2))], "no vocabulary"),
        ([("a", None), ("a", ("of rank 1", 2)), ("a", ("of rank 2", 1))], "of rank 1"),
    ):
        monkeypatch.setattr(process_group, "gather_objects", lambda _, told=told: told)
        wrong_arguments(f"^{words}$", process_group.agree, lambda: None)


def test_ranks_with_other_settings_are_refused_on_every_rank(monkeypatch):
    own = {"--seed": "1", "--notes": "False"}
    for theirs, words in (
        ({"--seed": "2", "--notes": "False"}, "--seed is 2 on rank 2 (host b) and 1 on rank 0: start all"),
        ({"--seed": "1"}, "--notes is not given on rank 2 (host b) and False on rank 0: start all"),
        (own | {"dataset 2": "x"}, "dataset 2 is x on rank 2 (host b) and not given on"),
    ):
        told = [("a", own), ("a", own), ("b", theirs)]
        monkeypatch.setattr(process_group, "gather_objects", lambda _, told=told: told)
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
    with monkeypatch.context() as patch:
        patch.setattr(dist, call, lambda *arguments, **options: None)
        assert join_alone() == "gloo"
    total = torch.ones(2)
    dist.all_reduce(total)
    assert total.tolist() == [1.0, 1.0]


ALL = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
SRUN = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1"}
BATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
STARTED_BY_SRUN = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"}
MEETING = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
BEFORE = "export MASTER_ADDR and MASTER_PORT"


def test_the_environment_is_complete_or_processes_that_cannot_meet_are_refused(monkeypatch):
    for variables, expected in (  # rank, number of ranks and local rank
        ({}, ("0", "1", "0")),
        (ALL, ("1", "2", "1")),
        ({"RANK": "0", "WORLD_SIZE": "1"}, ("0", "1", None)),
        (SRUN | MEETING, ("3", "4", "1")),
        (BATCH, ("0", "1", "0")),  # the batch script itself, without srun
        ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "MASTER_ADDR": "node1"}, ("0", "1", "0")),  # and without --ntasks
        (MPIRUN | MEETING, ("3", "4", "1")),
        (STARTED_BY_SRUN | MPIRUN | MEETING, ("3", "4", "1")),  # by mpirun's own daemon on the second node
    ):
        monkeypatch.setattr(os, "environ", dict(variables))
        complete_environment()
        got = tuple(os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        assert got == expected, variables
    for variables, message in (
        (SRUN, f"srun started 4 processes, and each would run alone.* {BEFORE}"),
        (SRUN | {"MASTER_ADDR": "node1"}, f"srun started 4 processes, .* {BEFORE}"),
        (BATCH | {"MASTER_ADDR": "node1"}, "the job has 4 tasks, but srun did not start this process"),
        (MPIRUN, f"mpirun started 4 processes.* {BEFORE} before it .mpirun passes them on by -x"),
        ({"PMI_SIZE": "2"}, "mpiexec started 2 processes"),
        ({"RANK": "0"}, "WORLD_SIZE is not set, but RANK is"),
        *((({k: v for k, v in ALL.items() if k != name}), f"{name} is not set") for name in list(ALL)[1:]),
        (ALL | {"MASTER_PORT": "abc"}, "MASTER_PORT is 'abc', not a number"),
    ):
        monkeypatch.setattr(os, "environ", dict(variables))
        refused(message, complete_environment)


def test_each_rank_has_the_gpu_of_its_number_or_its_own_or_the_cpu_and_more_ranks_than_gpus_end_in_one_line(
    monkeypatch,
):
    def device_of(rank, gpus, **variables):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "get_arch_list", list)
        monkeypatch.delenv("SLURM_LOCALID", raising=False)
        for name, value in {"LOCAL_RANK": str(rank), **variables}.items():
            monkeypatch.setenv(name, value)
        return str(own_device(rank))

    for gpus, device, local_rank in ((8, "cuda:3", "3"), (1, "cuda:0", "0"), (0, "cpu", "3")):
        assert (device_of(3, gpus, SLURM_LOCALID="3"), os.environ["LOCAL_RANK"]) == (device, local_rank)
    for gpus, variables, expected in (
        (1, {}, "sees 1 GPU, and each rank needs its own: start at most 1 per host"),
        (1, {"SLURM_LOCALID": "0"}, "sees 1 GPU, "),  # torchrun, started once per host by srun
        (2, {"SLURM_LOCALID": "2"}, "sees 2 GPUs, .* at most 2 per host"),
    ):
        refused(f"^rank 2 of this host {expected}", device_of, 2, gpus, **variables)


@pytest.mark.parametrize("backends", [("nccl", "gloo"), ("gloo", "nccl"), ("nccl", "gloo", "nccl"), ("gloo", "gloo")])
def test_ranks_on_one_kind_of_device_meet_and_on_others_each_is_refused(backends: tuple[str, ...]) -> None:
    store, count = dist.HashStore(), len(backends)
    with ThreadPoolExecutor(count) as pool:
        calls = [pool.submit(refuse_other_devices, store, rank, count, own) for rank, own in enumerate(backends)]
    errors = [call.exception() for call in calls]
    if len({*backends}) == 1:
        assert errors == [None] * count
        return
    for error in errors:
        assert isinstance(error, UserError) and error.agreed
        assert f"a GPU on some ranks but none on {socket.gethostname()}, and" in str(error)


def test_draws_follow_the_seed_as_those_of_torch() -> None:
    for seed in (0, 1234, 2**63 - 1):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            expected = torch.rand(9)
            pipeline.seed_draws(seed, CPU)
            assert torch.equal(torch.rand(9), expected) and not torch.equal(torch.rand(9), expected)


def test_a_rank_has_its_place_and_its_groups_on_each_axis(monkeypatch):
    """Tensor-parallel ranks are neighbours, data-parallel ranks 2 apart, and stages of a pipeline 6 apart."""

    def place(rank):
        made = []
        process_group._group.cache_clear()
        monkeypatch.setattr(dist, "get_rank", lambda: rank)
        monkeypatch.setattr(dist, "get_world_size", lambda: 12)
        monkeypatch.setattr(dist, "new_group", lambda row, **_: made.append(row) or row)
        sizes = ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
        return place_in_grid(CPU, sizes), made

    ranks, made = place(9)
    places = ranks.pipeline_rank, ranks.pipeline_size, ranks.data_rank, ranks.data_size
    assert (*places, ranks.tensor_rank, ranks.tensor_size) == (1, 2, 1, 3, 1, 2)
    assert ranks.data_group == [7, 9, 11] and ranks.tensor_group == [8, 9]
    assert ranks.model_group == [2, 3, 8, 9] and ranks.pipeline_group == [3, 9]
    assert place(2)[1] == made, "all ranks create all groups in one order"


def test_rows_of_all_ranks_are_joined_without_padding_and_those_of_a_sample_count_once(monkeypatch):
    """The longest part is neither the first nor the last."""
    parts = [torch.full((count, 2), float(rank)) for rank, count in enumerate((1, 3, 0, 2))]

    def gather(found, padded):
        assert padded.tolist() == [[3.0, 3.0]] * 2 + [[0.0, 0.0]]
        for place, own in zip(found, parts, strict=True):
            place.fill_(-1)
            place[: len(own)] = own

    monkeypatch.setattr(dist, "all_gather", gather)
    joined = gather_rows(torch.full((5, 2), 3.0), [1, 3, 0, 2], Ranks(3, 4, CPU))
    assert joined.tolist() == torch.cat(parts).tolist()
    monkeypatch.setattr(process_group, "sum_over_ranks", lambda counts: counts)
    for tensor_rank, pipeline_rank, counted in ((0, 1, 7), (1, 1, 0), (0, 0, 0)):
        own = {"tensor_rank": tensor_rank, "tensor_size": 2, "pipeline_rank": pipeline_rank, "pipeline_size": 2}
        assert row_counts(7, Ranks(1, 4, CPU, **own)).tolist() == [0, counted, 0, 0]


def test_ranks_that_do_not_come_are_named():
    patience = datetime.timedelta(seconds=0.3)
    for came, absent in (([0], "ranks 1, 2"), ([0, 2], "rank 1")):
        words, store = f"{absent} did not come within 0.005 minutes", dist.HashStore()
        with ThreadPoolExecutor(len(came)) as pool:
            calls = [pool.submit(refused, words, rendezvous.wait_for_all, store, rank, 3, patience) for rank in came]
            assert all(call.result() for call in calls)


class Left(NamedTuple):
    """Results that an objective leaves for its last stage."""

    sums: torch.Tensor
    count: torch.Tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_arrive_as_they_were(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    batch = tiny_batch()
    notes = NoteInputs(torch.tensor([3, 4]), torch.randn(2, 5), torch.tensor([[0, 4]]))
    inputs = Inputs.of(batch, some_draws(batch)._replace(heads=torch.empty(2, 0, dtype=torch.long)), notes)
    shapes = ((3, 7, 5), (1, 9, 4), (), (2,))
    hidden, table, cosine, sums = (torch.randn(shape, requires_grad=True) for shape in shapes)
    hidden = hidden.detach().to(dtype).requires_grad_()
    counted = torch.ones(len(batch.input_ids), 2)
    state = State(inputs, hidden, (table,), inputs.draws.heads, counted, cosine, Left(sums, torch.tensor(7)))
    courier = Courier((Left,))
    floats, rest = courier.send(state)
    assert floats.dim() == rest.dim() == 1 and floats.dtype == dtype and rest.dtype == torch.uint8
    arrived = courier.receive(floats, rest)
    torch.testing.assert_close(arrived, state, rtol=0, atol=0)
    weights = torch.randn_like(hidden)
    ((arrived.hidden * weights).sum() + 2 * arrived.head_cosine + 3 * arrived.own.sums.sum()).backward()
    assert torch.equal(hidden.grad, weights) and cosine.grad == 2 and torch.equal(sums.grad, torch.full((2,), 3.0))
    assert torch.equal(table.grad, torch.zeros_like(table)), "a tensor that is not read has a gradient too"


def test_what_enters_the_first_part_travels_the_same_way_and_a_header_has_an_end() -> None:
    batch = tiny_batch()
    notes = NoteInputs(torch.tensor([3]), torch.randn(1, 5), torch.tensor([[0, 4]]))
    inputs = Inputs.of(batch, some_draws(batch), notes)
    courier = Courier()
    floats, rest = courier.send(inputs)
    assert floats.shape == (0,), "a note receives no gradient"
    torch.testing.assert_close(courier.receive(floats, rest), inputs, rtol=0, atol=0)
    many, inputs = tuple(torch.zeros(1) for _ in range(pipeline.HEADER)), Inputs.of(batch, some_draws(batch))
    state = State(inputs, torch.randn(3, 7, 5), many, inputs.draws.heads, torch.ones(2, 2), torch.zeros(()), None)
    refused(f"header of [0-9]+ numbers, at most {pipeline.HEADER} are allowed: .* fewer tensors", Courier().send, state)


@pytest.mark.parametrize("encoding", ["absolute", "tupe-r", "deberta", "ddrp"])
@pytest.mark.parametrize("num_parts", [2, 3])
def test_parts_in_a_row_are_the_model(encoding: str, num_parts: int) -> None:
    model, batch, courier = tiny_model(position_encoding=encoding, num_layers=3), tiny_batch(), Courier()
    draws = some_draws(batch, heads=((0, 2), (1, 2), (0, 1)))
    sent = courier.send(Inputs.of(batch, draws))
    for number, stages in enumerate(split_stages(model.stages(), num_parts)):
        sent = PipelinePart(stages, number == num_parts - 1, recompute=False, courier=courier)(sent)
    torch.testing.assert_close(sent.sums, model(batch, draws).sums)


def test_layers_are_shared_out_evenly_and_in_order_and_inner_parts_take_one_more() -> None:
    many = [3, 3, 3, 3], [3, 4, 3, 3], [3, 4, 4, 3], [4, 4, 4, 3], [1] * 5
    for expected in ([1, 1], [2, 1], [1, 2, 1], [2, 2, 1], *many):
        model = build_model(tiny_config(num_layers=sum(expected), position_encoding="absolute"))
        parts = split_stages(model.stages(), len(expected))
        assert [stage for part in parts for stage in part] == model.stages()
        assert [sum(stage in list(model.layers) for stage in part) for part in parts] == expected
        assert parts[0][0] is model.embeddings and parts[-1][-1] is model.head


def test_each_micro_batch_is_seeded_by_its_number() -> None:
    seen, batch, courier = list[int](), tiny_batch(), Courier()
    part = PipelinePart([torch.nn.Identity()], last=True, recompute=False, courier=courier)
    inputs = Inputs.of(batch, some_draws(batch))
    for _ in range(2):
        part.begin_step(seen.append)
        part(courier.send(inputs))
        part(courier.send(inputs))
    part.eval()(courier.send(inputs))
    assert seen == [0, 1, 0, 1]


class Order(TorchDispatchMode):
    """Notes matrix products, and what is noted by hand."""

    def __init__(self):
        super().__init__()
        self.events = []

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        name = function.overloadpacket.__name__
        if name in ("mm", "addmm_", "addmm"):
            self.events.append(name)
        return function(*arguments, **(named or {}))


def noting(events):
    """An entrance of one rank, whose exchange doubles the gradient at the end."""

    def back(gradient):
        events.append("start")

        def wait():
            events.append("wait")
            return gradient * 2

        return wait

    return pipeline.Entrance(lambda x: x.view_as(x), back)


def some_maps(count, *shape):
    """Return linear maps, one of them without a bias, and their input."""
    torch.manual_seed(0)
    maps = [nn.Linear(5, out, bias=out != 4).double() for out in range(3, 3 + count)]
    return maps, torch.randn(*shape, 5, dtype=torch.double, requires_grad=True)


def test_gradients_are_those_of_linear_maps_and_the_inputs_passes_one_exchange_while_those_of_weights_are_computed():
    maps, x = some_maps(3, 2, 4)
    parameters = [parameter for each in maps for parameter in each.parameters()]
    targets = [torch.randn(2, 4, each.out_features, dtype=torch.double) for each in maps]

    def gradients(outputs):
        loss = sum((output * target).sum() for output, target in zip(outputs, targets, strict=True))
        return torch.autograd.grad(loss, [x, *parameters])

    of_input, *expected = gradients([each(x) for each in maps])
    exchanged, *own = gradients(column_maps(x, noting([]), maps))
    torch.testing.assert_close(exchanged, 2 * of_input)
    torch.testing.assert_close(own, expected)
    (maps, x), order = some_maps(3, 4), Order()
    loss = sum(output.sum() for output in column_maps(x, noting(order.events), maps))
    with order:
        loss.backward()
    assert order.events == ["mm", "addmm_", "addmm_", "start", "mm", "mm", "mm", "wait"]


def test_maps_without_a_reader_or_a_bias_and_those_of_zero_3():
    maps, x = some_maps(2, 4)
    column_maps(x, noting([]), maps)[1].sum().backward()
    torch.testing.assert_close(x.grad, 2 * maps[1].weight.sum(0).expand(4, 5).detach())
    assert not maps[0].weight.grad.any()
    torch.testing.assert_close(pipeline.column_map(x, noting([]), maps[0].weight, None), x @ maps[0].weight.T)
    (maps, x), called = some_maps(2, 4), []
    for each in maps:
        each.weight.ds_id = 0
        each.register_forward_hook(lambda *_: called.append(1))
    sum(output.sum() for output in column_maps(x, noting([]), maps)).backward()
    assert len(called) == 2
    torch.testing.assert_close(x.grad, 2 * sum(each.weight.sum(0) for each in maps).expand(4, 5).detach())


def rank_of(tensor_rank: int, tensor_size: int) -> Ranks:
    return Ranks(tensor_rank, tensor_size, CPU, tensor_rank=tensor_rank, tensor_size=tensor_size)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("relative_table", ["shared", "per-layer"])
def test_parts_make_up_the_whole_and_what_all_heads_share_is_not_cut(encoding: str, relative_table: str) -> None:
    config, whole = tiny_config(position_encoding=encoding, relative_table=relative_table, **SIZES), set()
    for name, parameter in build_model(config).named_parameters():
        parts = [own_part(name, parameter, config.encoding, rank_of(rank, 4)) for rank in range(4)]
        dimension = pipeline.split_dimension(name, config.encoding)
        if dimension is None:
            whole.add(name)
            assert all(part is parameter for part in parts), name
        else:
            assert len({part.shape for part in parts}) == 1, name
            assert torch.equal(torch.cat(parts, dimension), parameter), name
    assert not [n for n in whole if n.startswith("layers.") and n.endswith("weight") and "norm" not in n]
    assert "embeddings.token.weight" not in whole
    assert {"layers.0.attention.output.bias", "layers.1.feed_forward.output.bias", "head.dense.weight"} <= whole
    place = "embeddings" if relative_table == "shared" else "layers.1"
    assert {f"{place}.position.{name}" for name in OF_ALL_HEADS.get(encoding, ())} <= whole
    assert (f"{place}.position.relative" in whole) == (encoding in ("bert-r", "deberta", "deberta-v2"))


def test_names_of_the_whole_model_survive_cutting_it_and_a_rank_alone_holds_everything() -> None:
    model = build_model(tiny_config(position_encoding="ddrp"))
    pipeline.name_parameters(model)
    stage = torch.nn.ModuleList(model.stages()[2:])
    names = pipeline.local_parameters(stage)
    assert "layers.1.attention.query.weight" in names and "layers.0.attention.query.weight" not in names
    assert names["embeddings.token.weight"] is model.embeddings.token.weight, "the head's tied matrix"
    assert pipeline.local_parameters(build_model(tiny_config())).keys() == dict(model.named_parameters()).keys()
    weight = torch.ones(4, 4)
    assert own_part("layers.0.attention.query.weight", weight, tiny_config().encoding, rank_of(0, 1)) is weight


def test_draws_inside_differ_by_rank_and_those_outside_do_not() -> None:
    def draws(rank: int) -> list[float]:
        torch.manual_seed(3)
        before = torch.rand(())
        with own_randomness(rank_of(rank, 2)):
            inside = torch.rand(())
        return torch.stack((before, inside, torch.rand(()))).tolist()

    (before, inside, after), other = draws(0), draws(1)
    assert [before, after] == other[::2] and inside not in (other[1], after)
    assert draws(1) == other, "recomputing a layer draws the same again"


def test_a_models_own_subclass_meets_the_other_ranks_too() -> None:
    class Mine(SelfAttention):
        factor = 3

    model = build_model(tiny_config())
    model.layers[0].attention.__class__ = Mine
    specialise(model, PARALLEL, ranks="ranks")
    first, second = (layer.attention for layer in model.layers)
    assert isinstance(first, SelfAttentionOfRanks) and isinstance(first, Mine) and first.factor == 3
    assert type(second) is SelfAttentionOfRanks and second.ranks == "ranks"
