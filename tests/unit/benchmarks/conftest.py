"""Benchmarks as modules."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def benchmark_module() -> Callable[[str], ModuleType]:
    """Name of a script of benchmarks/ → its module."""

    def load(name: str) -> ModuleType:
        folder = str(Path(__file__).resolve().parents[3] / "benchmarks")
        sys.path.insert(0, folder)
        try:
            return importlib.import_module(name)
        finally:
            sys.path.remove(folder)

    return load
