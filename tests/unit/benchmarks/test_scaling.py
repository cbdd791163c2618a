"""The tables of docs/scaling.md are those that the script computes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def scaling(benchmark_module: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark_module("scaling")


@pytest.mark.parametrize("name", ["rates", "check", "base", "corpus"])
def test_the_page_has_the_computed_tables(scaling: ModuleType, name: str) -> None:
    written = sys.modules["pages"].written_table(scaling.DOCUMENT, name)
    assert written == scaling.BLOCKS[name](), "run python benchmarks/scaling.py"


def test_no_layout_that_fits_is_faster(scaling: ModuleType) -> None:
    layouts = sys.modules["layouts"]
    device, most = scaling.DEVICES["v100"], layouts.USABLE * 32 * layouts.GIB
    choice = layouts.best("base", "v100", 8)
    assert choice.memory <= most
    for config in layouts.candidates("base", 8, device):
        seconds = layouts.estimate_step(config, layouts.parameters("base"), 8, device).seconds
        assert seconds >= choice.estimate.seconds or layouts.memory("base", config, 8) > most, config.parallel
