"""Forget between tests what the process has found out about the machine."""

from collections.abc import Iterator

import pytest

from megatron_ddrp.model import fused


@pytest.fixture(autouse=True)
def unsearched_machine() -> Iterator[None]:
    """Search for what Triton needs anew before and after a test, which may hide it."""
    fused.missing_for_triton.cache_clear()
    yield
    fused.missing_for_triton.cache_clear()
