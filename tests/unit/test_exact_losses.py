"""`python -m tests.endurance.exact_losses` sees the smallest difference there is."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.endurance.exact_losses import RUNS, first_difference


def write_run(folder: Path, losses: list[float], weight: float = 1.0, **more: Any) -> Path:
    """Write what a run leaves: rows of metrics, and a checkpoint with one tensor."""
    (folder / "iter_0000005").mkdir(parents=True)
    rows = [{"iteration": step, "loss": loss, "step_time": id(folder), **more} for step, loss in enumerate(losses, 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    save_file({"w": np.array([weight])}, folder / "iter_0000005" / "weights-00-of-01.safetensors")
    return folder


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_run(tmp_path / "base" / "run0", LOSSES)


LOSSES = [1 / step for step in range(1, 61)]
NEXT = math.nextafter(LOSSES[40], 2.0)


@pytest.mark.parametrize(
    ("losses", "changes", "expected"),
    [
        (LOSSES, {}, None),
        (LOSSES, {"new_metric": 3.0}, None),
        ([*LOSSES[:40], NEXT, *LOSSES[41:]], {}, f"step 41: loss was {LOSSES[40].hex()}, is {NEXT.hex()}"),
        (LOSSES[:59], {}, "step 60: iteration was 60, is missing"),
        (LOSSES, {"weight": math.nextafter(1.0, 2.0)}, "weights-00-of-01.safetensors: w was "),
    ],
)
def test_the_first_difference_is_named(
    losses: list[float], changes: dict[str, Any], expected: str | None, base: Path, tmp_path: Path
) -> None:
    found = first_difference(base, write_run(tmp_path / "head" / "run0", losses, **changes))
    assert found == expected if expected is None else found is not None and found.startswith(expected)


def test_a_run_that_failed_is_a_difference(base: Path, tmp_path: Path) -> None:
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "run0.stderr").write_text("Traceback\nValueError: x\n", encoding="utf-8")
    assert first_difference(base, tmp_path / "head" / "run0") == "head failed: ValueError: x"


def test_the_runs_are_27_of_different_names() -> None:
    assert len({run.name for run in RUNS}) == 27 and {run.ranks for run in RUNS} == {1, 2}
