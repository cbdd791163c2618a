"""The machine as pages and rows describe it."""

from __future__ import annotations

import pytest
import torch

from megatron_ddrp.pages import markdown as machine


@pytest.mark.parametrize(("found", "end"), [("AVX2", "Some CPU with AVX2"), ("DEFAULT", "Some CPU")])
def test_the_hardware_has_the_vector_instructions_of_a_cpu(found, end, monkeypatch):
    monkeypatch.setattr(machine, "_cpu_name", lambda: "Some CPU")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: found)
    assert machine.hardware.__wrapped__().endswith(end)
