"""What a launcher (`deepspeed`, `torchrun`, `srun`) told this process about itself; read without importing torch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


def launched_world_size() -> int:
    """Ranks that the launcher announced; 1 without one."""
    return int(os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_NTASKS") or 1)


def launched_rank() -> int:
    """Our rank as the launcher announced it; 0 without one."""
    return int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0)


@contextlib.contextmanager
def first_rank_speaks() -> Iterator[None]:
    """Let rank 0 alone print what every rank finds out alike, such as a wrong argument."""
    if launched_rank() == 0:
        yield
        return
    with (
        open(os.devnull, "w", encoding="utf-8") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        yield
