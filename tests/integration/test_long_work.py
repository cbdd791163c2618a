"""Work of one rank that takes longer than the others may wait in one collective call."""

import datetime
from pathlib import Path
from threading import Event

import pytest
import torch.distributed as dist

from megatron_ddrp.parallel import process_group
from tests.integration.training_runs import run_ranks

TIMEOUT, MEETINGS, PAUSE = 4.0, 12, 0.5


@pytest.mark.slow
def test_ranks_outlast_the_timeout_while_one_reads() -> None:
    """The first rank's work ends when the ranks have met for longer than the timeout of one collective call."""
    assert MEETINGS * PAUSE > TIMEOUT + 1
    assert run_ranks(2, _read_for_long, [], 120.0) == ["read", "waited"]


def _read_for_long(_: list[list[str]], __: Path) -> str:
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=TIMEOUT), None)
    gather, met, enough = process_group.gather_objects, [], Event()

    def gather_and_count(item: object) -> list[object]:
        met.append(item)
        if len(met) == MEETINGS:
            enough.set()
        return gather(item)

    process_group.gather_objects, process_group.PAUSE = gather_and_count, PAUSE

    def read() -> str:
        assert enough.wait(100.0)
        return "read"

    return process_group.agree_on_long_work(read if dist.get_rank() == 0 else lambda: "waited")
