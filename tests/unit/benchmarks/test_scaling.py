"""The tables of docs/scaling.md are those that the script computes."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def scaling() -> ModuleType:
    folder = str(Path(__file__).resolve().parents[3] / "benchmarks")
    sys.path.insert(0, folder)
    try:
        return importlib.import_module("scaling")
    finally:
        sys.path.remove(folder)


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
