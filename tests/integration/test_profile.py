"""--profile on the real engine: which ranks and steps are profiled, what is written, and that no number changes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from megatron_ddrp.arguments import parse_arguments
from megatron_ddrp.errors import UserError
from tests.integration.launch import OF_THE_MACHINE, read_rows, start_ranks

STEPS = {"objective": "mlm", "train_iters": 6, "eval_interval": 0, "log_interval": 1}
WINDOW = {"profile": True, "profile_step_start": 2, "profile_step_end": 4}


def losses_in(trace: Path) -> int:
    """Return the number of cross-entropies in a trace: masked LM has one per step."""
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return sum(event["name"] == "aten::_log_softmax" for event in events if event.get("ph") == "X")


def results_of(folder: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key not in OF_THE_MACHINE} for row in read_rows(folder)]


def test_the_first_replica_profiles_the_steps_asked_for_and_no_number_changes(flags, tmp_path: Path) -> None:
    done = start_ranks(flags(save=tmp_path / "with", **STEPS, **WINDOW), world_size=2).check()
    start_ranks(flags(save=tmp_path / "without", **STEPS), world_size=2).check()
    assert results_of(tmp_path / "with") == results_of(tmp_path / "without")
    folder = tmp_path / "with" / "profile"
    assert sorted(path.name for path in folder.iterdir()) == ["steps-3-4-rank-0.json.gz", "steps-3-4-rank-0.txt"]
    table = (folder / "steps-3-4-rank-0.txt").read_text(encoding="utf-8").splitlines()
    assert sum("aten::" in line for line in table) > 100, "operations are left out"
    assert losses_in(folder / "steps-3-4-rank-0.json.gz") == 2
    (line,) = [line for line in done.stdout[0].splitlines() if line.startswith("profile of ")]
    assert line.startswith("profile of steps 3 to 4 on rank 0, ") and f"; {folder}/steps-3-4-rank-0.txt has all" in line
    before, after = (f"step {step}/6 |" for step in (4, 5))
    assert done.stdout[0].index(before) < done.stdout[0].index(line) < done.stdout[0].index(after)


def test_every_stage_of_a_pipeline_is_profiled(flags, tmp_path: Path) -> None:
    command = flags(save=tmp_path, pipeline_model_parallel_size=2, **STEPS, **WINDOW)
    lines = start_ranks(command, world_size=2).check().stdout[0]
    names = {path.name for path in (tmp_path / "profile").iterdir()}
    assert names == {f"steps-3-4-rank-{rank}.{kind}" for rank in (0, 1) for kind in ("txt", "json.gz")}
    assert [lines.count(f"profile of steps 3 to 4 on rank {rank}") for rank in (0, 1)] == [1, 1]


def test_without_numbers_it_profiles_two_steps_after_ten_of_the_run_that_resumes(flags, tmp_path: Path) -> None:
    command = [*flags(save=tmp_path, load=tmp_path, **STEPS | {"train_iters": 15}), "--profile"]
    first = start_ranks([*command, "--exit-interval", "3"]).check().stdout[0]
    assert "no profile: the run stopped after step 3, before step 12 (--profile-step-end)" in first
    start_ranks(command).check()
    assert [path.name for path in sorted((tmp_path / "profile").iterdir())][1] == "steps-14-15-rank-0.txt"


def test_a_profile_that_cannot_be_written_or_made_is_told_and_the_run_goes_on(flags, tmp_path: Path) -> None:
    (tmp_path / "profile").write_text("in the way")
    done = start_ranks(flags(save=tmp_path, **STEPS, **WINDOW)).check().stdout[0]
    assert "profile of rank 0 not written: [Errno 17] File exists: " in done and "saved" in done
    done = start_ranks(flags(save=tmp_path / "short", profile=True, **STEPS)).check().stdout[0]
    assert "no profile: steps 11 to 12 are not among those of this run, 1 to 6; set --profile-step-start" in done


def test_a_profile_needs_a_folder(flags) -> None:
    with pytest.raises(UserError, match="--profile writes into the --save folder: give --save DIR"):
        parse_arguments([*flags(**STEPS), "--profile"])
