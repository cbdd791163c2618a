"""Work of one rank that takes longer than the others may wait in one collective call."""

import datetime
from pathlib import Path
from threading import Event

import pytest
import torch.distributed as dist

from megatron_ddrp.parallel import process_group as agreement
from tests.integration.training_runs import run_ranks

TIMEOUT, MEETINGS = 8.0, 6


@pytest.mark.slow
def test_ranks_outlast_the_timeout_while_one_reads() -> None:
    """The first rank's work ends when the ranks have met for longer than the timeout of one collective call."""
    assert run_ranks(2, _read_for_long, [], 120.0) == ["read", "waited"]


def _read_for_long(_: list[list[str]], __: Path) -> str:
    timeout = datetime.timedelta(seconds=TIMEOUT)
    dist.distributed_c10d._set_pg_timeout(timeout, None)
    dist.distributed_c10d.default_pg_timeout = timeout  # the ranks meet four times in it
    gather, met, enough = agreement.gather_objects, [], Event()

    def gather_and_count(item: object) -> list[object]:
        met.append(item)
        if len(met) == MEETINGS:
            enough.set()
        return gather(item)

    agreement.gather_objects = gather_and_count

    def read() -> str:
        assert enough.wait(100.0)
        return "read"

    return agreement.agree_on_long_work(read if dist.get_rank() == 0 else lambda: "waited")
