"""Place of this process among the ranks, sums over ranks, and their agreement on errors, settings and data."""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from threading import Thread
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ddrp.config import ParallelConfig
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError, is_of_others, print_error, shared_error
from megatron_ddrp.model.fused import usable
from megatron_ddrp.parallel.rendezvous import NOT_CONNECTED, complete_environment, connecting, join

T = TypeVar("T")

PAUSE = 5.0
"""Most seconds between two collective calls of ranks of which one still works."""


def gather_objects(item: T) -> list[T]:
    """Return every rank's `item`, in the order of ranks; for small Python objects."""
    items: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(items, item)
    return items


def agree(action: Callable[[], T]) -> T:
    """Run `action` on every rank; if any rank raises a `UserError`, raise one on all of them, the same if one failed.

    The error names the host if other hosts do not fail. Without this, a rank that stops alone leaves the others waiting
    in their next collective call until the timeout.
    """
    result, own, message = None, None, None
    try:
        result = action()
    except UserError as error:
        own, message = error, (str(error), error.exit_code)
        own.agreed = True
    gathered = gather_objects((socket.gethostname(), message))
    failures = [(host, *failure) for host, failure in gathered if failure is not None]
    if failures:
        host, text, code = failures[0]
        if {host for host, _ in gathered} - {host for host, *_ in failures}:
            raise shared_error(f"{text} (on host {host})", code)
        raise own or shared_error(text, code)
    return result  # type: ignore[return-value]


def agree_on_long_work(action: Callable[[], T]) -> T:
    """Do as `agree` does where `action` may take longer, on some ranks or all, than a collective call may wait.

    A thread runs it, and until every rank is done all of them meet again and again, so that none waits long.
    """
    work: Future[T] = Future()

    def run() -> None:
        try:
            work.set_result(action())
        except BaseException as error:  # for the thread that waits, which raises it
            work.set_exception(error)

    Thread(target=run, daemon=True).start()
    pause = min(PAUSE, dist.distributed_c10d.default_pg_timeout.total_seconds() / 4)
    while not all(gather_objects(bool(wait([work], pause).done))):
        pass
    return agree(work.result)


def refuse_differences(own: Mapping[str, str]) -> None:
    """Raise a `UserError` on all ranks if a rank has another value under some name than rank 0; a collective call.

    Each node may be given its own command; with other settings or text, what the ranks train together has no meaning.
    """
    (_, first), *others = gather_objects((socket.gethostname(), dict(own)))
    for rank, (host, theirs) in enumerate(others, 1):
        for name in first | theirs:
            ours, other = first.get(name, "not given"), theirs.get(name, "not given")
            if ours != other:
                raise UserError(
                    f"{name} is {other} on rank {rank} (host {host}) and {ours} on rank 0: start all ranks with the "
                    "same code, settings and data",
                    WRONG_ARGUMENTS,
                )


DEFAULTS = dist.distributed_c10d
"""Module with torch's timeouts of new process groups, `default_pg_timeout` and `default_pg_nccl_timeout`."""


class Ranks(NamedTuple):
    """Place of this process in the run, and the groups that it communicates with (None in a run of one rank).

    The grid has three axes. Tensor-parallel ranks share every layer, pipeline ranks pass layers' outputs on, and
    data-parallel ranks hold the same weights and see other samples. Ranks count along tensor first, then data, then
    pipeline, like DeepSpeed's `PipeModelDataParallelTopology`: ranks that exchange most have neighbouring numbers.
    """

    rank: int
    world_size: int
    device: torch.device
    data_rank: int = 0
    """Number of this rank's share of the samples; equal along the tensor and pipeline axes."""
    data_size: int = 1
    tensor_rank: int = 0
    """Number of this rank's part of every layer's weights."""
    tensor_size: int = 1
    pipeline_rank: int = 0
    """Number of this rank's pipeline stage; 0 holds the embeddings and the first layers."""
    pipeline_size: int = 1
    data_group: Any = None
    """Ranks with the same weights."""
    tensor_group: Any = None
    """Ranks with the same samples and the same layers."""
    model_group: Any = None
    """Ranks that together hold one whole model: the tensor and pipeline axes."""
    pipeline_group: Any = None
    """Ranks of this pipeline, for messages through host memory (gloo); None without a pipeline."""
    first_on_host: bool = True
    """True if this rank does the work that is needed once per host, such as reading local files."""

    @property
    def reports_losses(self) -> bool:
        """True if this rank computes losses and no tensor-parallel rank before it computes the same ones."""
        return self.pipeline_rank == self.pipeline_size - 1 and self.tensor_rank == 0


def start(config: ParallelConfig, settings: Mapping[str, str] | None = None) -> Ranks:
    """Join the other ranks (nccl on GPUs, gloo on CPUs). Works under `deepspeed`, `torchrun`, `srun` and `python`.

    Raise `UserError` if the layout does not divide the ranks, before this rank waits for another, and on all ranks if
    one has other `settings` (name → value) than rank 0.
    """
    complete_environment()
    config.data_parallel_size(int(os.environ["WORLD_SIZE"]))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = own_device(local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = datetime.timedelta(minutes=config.distributed_timeout_minutes)
    # DeepSpeed sets no timeout for its own groups, so they would wait torch's half hour for a host that is gone.
    DEFAULTS.default_pg_timeout = DEFAULTS.default_pg_nccl_timeout = timeout
    if not dist.is_initialized():
        join("nccl" if device.type == "cuda" else "gloo", timeout)
    if settings:
        refuse_differences(settings)
    with connecting(timeout):
        return place_in_grid(device, config)._replace(first_on_host=local_rank == 0)


def own_device(local_rank: int) -> torch.device:
    """Return this rank's GPU, or the CPU where torch sees no GPU; `local_rank` counts the ranks of this host.

    Slurm's `--gpus-per-task` shows every rank one GPU, its own, as number 0. LOCAL_RANK becomes 0 then, because
    DeepSpeed takes it for the number of the GPU.

    Raises:
        UserError: the host has more ranks than GPUs, or torch has no code for this GPU.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    if gpus == 1 and os.environ.get("SLURM_LOCALID") == str(local_rank):  # srun started this rank, nothing between
        os.environ["LOCAL_RANK"] = "0"
        return usable(torch.device("cuda", 0))
    if local_rank >= gpus:
        raise UserError(
            f"rank {local_rank} of this host sees {gpus} GPU{'s' * (gpus > 1)}, and each rank needs its own: start at "
            f"most {gpus} per host, or let CUDA_VISIBLE_DEVICES show more"
        )
    return usable(torch.device("cuda", local_rank))


def place_in_grid(device: torch.device, config: ParallelConfig) -> Ranks:
    """Find this rank's place on each axis and create its groups."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tensor_size, pipeline_size = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
    data_size = config.data_parallel_size(world_size)
    timeout = datetime.timedelta(minutes=config.distributed_timeout_minutes)
    grid = torch.arange(world_size).view(pipeline_size, data_size, tensor_size)
    pipeline_rank, data_rank, tensor_rank = (int(place) for place in (grid == rank).nonzero()[0])
    place = (rank, world_size, device, data_rank, data_size, tensor_rank, tensor_size, pipeline_rank, pipeline_size)
    return Ranks(
        *place,
        data_group=_own_group(grid.transpose(1, 2).reshape(-1, data_size), rank, timeout),
        tensor_group=_own_group(grid.reshape(-1, tensor_size), rank, timeout),
        model_group=_own_group(grid.transpose(0, 1).reshape(data_size, -1), rank, timeout),
        pipeline_group=_own_group(grid.flatten(1).T, rank, timeout, "gloo") if pipeline_size > 1 else None,
    )


def _own_group(members: Tensor, rank: int, timeout: datetime.timedelta, backend: str | None = None) -> Any:
    """Return the group of this rank's row of `members` `[groups, size]`; None in a run of one rank.

    Every rank creates every group, in one order. Groups that only their members create are named by the number of
    groups that each member has, and that number differs once a pipeline has its own.
    """
    if members.numel() == 1:
        return None
    groups = {row: _group(dist.group.WORLD, row, timeout, backend) for row in map(tuple, members.tolist())}
    return next(group for row, group in groups.items() if rank in row)


@functools.cache
def _group(world: Any, members: tuple[int, ...], timeout: datetime.timedelta, backend: str | None) -> Any:
    """Return the group of some ranks of a world; all runs of a process share it."""
    return dist.new_group(list(members), timeout=timeout, backend=backend)


@contextlib.contextmanager
def lost_rank_in_one_line() -> Iterator[None]:
    """Raise the death or silence of another rank in a collective call as a `UserError`; other errors pass unchanged."""
    try:
        yield
    except RuntimeError as error:
        of_ranks = isinstance(error, dist.DistError) or re.search(r"gloo|NCCL", str(error))
        if not of_ranks or is_of_others(error):
            raise
        cause = re.sub(r"^\[.*?\] |\[/\S+\] ", "", str(error)).split(". ")[0].splitlines()[0]
        rank = os.environ.get("RANK", 0)
        if not dist.is_initialized():
            raise UserError(f"rank {rank} cannot meet the other ranks: {cause}; {NOT_CONNECTED}") from error
        raise UserError(
            f"rank {rank} lost another rank: {cause}; that rank's own output says why; start the same command again to "
            "resume from the last checkpoint"
        ) from error


@contextlib.contextmanager
def print_shared_errors_once(program: str | None = None) -> Iterator[None]:
    """Let rank 0 print an error that all ranks raise. All exit together: launchers kill the others after one exit."""
    try:
        yield
    except UserError as error:
        if not error.agreed or not dist.is_initialized():
            raise
        if dist.get_rank() == 0:
            print_error(str(error), program)
        with contextlib.suppress(RuntimeError):  # a rank may be gone already
            dist.barrier()
        raise SystemExit(error.exit_code) from error


def stop() -> None:
    """Wait for all ranks, then leave the process group; without the barrier a fast rank's exit can abort a slow one."""
    if dist.is_initialized():
        dist.barrier()
    leave()


def is_joined() -> bool:
    """Return whether this process has a process group, its own or that of another library."""
    return dist.is_initialized()


def leave() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def copy_from_data_rank(owner: int, tensor: Tensor, ranks: Ranks) -> None:
    """Overwrite a tensor by that of the data-parallel rank `owner`; a collective call of all data-parallel ranks."""
    if ranks.data_size > 1:
        dist.broadcast(tensor, dist.get_global_rank(ranks.data_group, owner), ranks.data_group)


def sum_over_ranks(tensor: Tensor, group: Any = None) -> Tensor:
    """Sum `tensor` over all ranks, or over those of a group, in place, and return it."""
    dist.all_reduce(tensor, group=group)
    return tensor


def row_counts(number: int, ranks: Ranks) -> Tensor:
    """Return the number of rows that each rank contributes to `gather_rows`, int64 `[ranks]`; a collective call.

    `number` is this rank's. Tensor-parallel ranks hold equal rows, and only last pipeline stages have any, so each
    sample counts once. A GPU may still be computing the result.
    """
    if ranks.world_size == 1:
        return torch.tensor([number])
    counts = torch.zeros(ranks.world_size, dtype=torch.int64, device=ranks.device)
    counts[ranks.rank] = number * ranks.reports_losses
    return sum_over_ranks(counts)


def gather_rows(rows: Tensor, counts: list[int], ranks: Ranks) -> Tensor:
    """Return the first `counts` rows `[n, width]` of each rank, joined: `[all, width]`; a collective call."""
    if ranks.world_size == 1:
        return rows
    own = counts[ranks.rank]
    padded = rows.new_zeros(max(counts), rows.shape[1])
    padded[:own] = rows[:own]
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def largest_on_device(number: int, device: torch.device) -> Tensor:
    """Return the largest number of any rank, an int64 scalar that a GPU may still be computing."""
    if dist.get_world_size() == 1:
        return torch.tensor(number)
    largest = torch.full((), number, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest


def largest_over_ranks(number: int, device: torch.device) -> int:
    """Return the largest number of any rank."""
    return int(largest_on_device(number, device))
