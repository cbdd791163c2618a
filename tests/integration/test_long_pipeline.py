"""A rank of a pipeline keeps no more headers and times after many steps than after few; ranks outlast long work."""

import datetime
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_ddrp.arguments import parse_arguments
from megatron_ddrp.config import ParallelConfig
from megatron_ddrp.parallel.pipeline import HEADER, IN_FLIGHT, MailOfRanks
from megatron_ddrp.parallel.process_group import agree_on_long_work, gather_objects, place_in_grid
from tests.integration import training_runs
from tests.integration.conftest import Flags
from tests.integration.launch import TIMEOUT
from tests.integration.training_runs import run_ranks

HEADERS, SHORT_TIMEOUT = 200, 4.0


@pytest.mark.slow
def test_a_rank_keeps_few_headers() -> None:
    first, second = run_ranks(2, _post_and_take, [], TIMEOUT)
    assert first == [IN_FLIGHT, []] and second == [0, list(range(HEADERS))]


def _post_and_take(_: list[Any]) -> list[Any]:
    ranks = place_in_grid(torch.device("cpu"), ParallelConfig(pipeline_model_parallel_size=2))
    mail, is_last = MailOfRanks(ranks), ranks.pipeline_rank == ranks.pipeline_size - 1
    for number in range(0 if is_last else HEADERS):
        mail.post(torch.full((HEADER,), number), is_first=False)
    taken = [int(mail.take()[0]) for _ in range(HEADERS if is_last else 0)]
    gather_objects(None)  # the mail has to live until its last header is taken
    return [len(mail._under_way), taken]


@pytest.mark.slow
def test_a_rank_keeps_no_times_of_past_steps(flags: Flags) -> None:
    run = flags(pipeline_model_parallel_size=2, zero_stage=0, micro_batch_size=2, global_batch_size=4, train_iters=5)
    assert run_ranks(2, _times_kept, [run], TIMEOUT) == [0, 0]


def _times_kept(command_lines: list[list[str]]) -> int:
    with mock.patch.object(training_runs, "forget_layout") as forget:
        training_runs.train_run(parse_arguments(command_lines[0]).config)
    return len(forget.call_args.args[0].timers("train_batch").event_timers)


@pytest.mark.slow
def test_ranks_outlast_the_timeout_while_one_reads() -> None:
    """The first rank's work takes longer than one collective call may; the ranks meet four times in that time."""
    assert run_ranks(2, _read_for_long, [], 120.0) == ["read", "waited"]


def _read_for_long(_: list[Any]) -> str:
    timeout = datetime.timedelta(seconds=SHORT_TIMEOUT)
    dist.distributed_c10d._set_pg_timeout(timeout, None)
    dist.distributed_c10d.default_pg_timeout = timeout

    def read() -> str:
        time.sleep(1.5 * SHORT_TIMEOUT)
        return "read"

    return agree_on_long_work(read if dist.get_rank() == 0 else lambda: "waited")
