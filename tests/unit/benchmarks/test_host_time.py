"""The host's time of a layer with CUDA graphs is small, here and on the page."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType

import pytest

from megatron_ddrp.model import graphs

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@pytest.fixture(scope="module")
def host_time(benchmark_module: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark_module("host_time")


def test_a_layer_with_graphs_takes_a_fraction_of_a_plain_layers_time(
    host_time: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    replays: list[int] = []
    replay = graphs.Captured.replay
    monkeypatch.setattr(graphs.Captured, "replay", lambda *a: (replays.append(1), replay(*a))[1])
    (kind,) = [k for k in host_time.kinds(["off"]) if k[:2] == ("mth", "bf16") and k.graphs == "on"]
    with host_time.triton_without_gpu():
        seconds = host_time.layer_seconds([kind], rounds=12)
    assert 0 < seconds[kind] <= host_time.BOUNDS["on"] * seconds["bf16"]
    assert len(replays) == 2 * (12 + host_time.WARM_UP - 1), "a shape is captured at its second micro-batch"


def test_the_bound_of_graphs_is_met_on_the_page(host_time: ModuleType) -> None:
    table = sys.modules["pages"].written_table(host_time.DOCUMENT, host_time.LAYERS_TABLE)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    bounds = [row[-1] for row in rows if row[4] == "on" and row[-1]]
    assert bounds == ["0.4 met", "0.4 met"] and len(rows) == len(host_time.kinds(["off", "on"])) + 2
