"""A `--save` folder that is damaged before a run or during it: the run resumes beside the damage, in one line each."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_ddrp.checkpoint import all_checkpoints, mark_latest, newest, read_state, write_state
from tests.integration.launch import Hold, Result, armed, lines, start_ranks, training_rows
from tests.integration.test_bad_input import assert_refused, contents

Flags = Callable[..., list[str]]


@pytest.fixture(scope="module")
def three_steps(flags: Flags, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of its steps 1, 2 and 3."""
    folder = tmp_path_factory.mktemp("three")
    start_ranks(flags(save=folder, train_iters=3, save_interval=1)).check()
    return folder


@pytest.fixture
def run(three_steps: Path, tmp_path: Path) -> Path:
    """A copy of that run to damage."""
    return Path(shutil.copytree(three_steps, tmp_path / "run"))


def told(stdout: str) -> list[str]:
    """The notices before the first step."""
    return [line for line in stdout.splitlines() if " latest" in line or "/latest" in line or "skipped" in line]


@pytest.mark.slow
@pytest.mark.parametrize("content", [b"", b"\xff\xfe\n", b"best\n"], ids=["empty", "not-utf8", "unknown"])
def test_a_damaged_latest_never_begins_afresh(content: bytes, run: Path, flags: Flags) -> None:
    (run / "latest").write_bytes(content)
    before = contents(run)
    assert_refused(start_ranks(flags(save=run, train_iters=4)), 1, "holds a run already")
    assert contents(run) == before
    rows = training_rows(run)
    result = start_ranks(flags(save=run, load=run, train_iters=4, keep_last=2), world_size=2).check()
    (line,) = told(result.stdout[0])
    assert "taking the newest whole checkpoint" in line
    assert f"resumed from {run} at step 3" in result.stdout[0]
    assert training_rows(run)[:3] == rows and len(training_rows(run)) == 4
    assert [path.name for path in all_checkpoints(run)] == ["iter_0000004", "iter_0000003"]


@pytest.mark.slow
def test_two_ranks_pass_a_damaged_state_over_together(run: Path, flags: Flags) -> None:
    path = run / "iter_0000003" / "state.json"
    state = json.loads(path.read_text(encoding="utf-8")) | {"consumed_samples": 5}
    path.write_text(json.dumps(state), encoding="utf-8")
    result = start_ranks(flags(save=run, load=run, train_iters=4), world_size=2).check()
    (line,) = told(result.stdout[0])
    assert line.startswith(f"skipped {run / 'iter_0000003'}: state.json is damaged (CRC-32 ")
    assert "at step 2" in result.stdout[0] and [lines(stderr) for stderr in result.stderr] == [[], []]


def test_a_damaged_row_does_not_take_the_others_with_it(run: Path, flags: Flags) -> None:
    file = run / "metrics.jsonl"
    first, *others = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(first + b"\xff\xfe{\n" + b"".join(others))
    rows = [json.loads(line) for line in (first, *others)]
    result = start_ranks(flags(save=run, load=run, train_iters=4)).check()
    assert "metrics.jsonl: moved 1 damaged line to metrics.jsonl.damaged\n" in result.stdout[0]
    assert [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()][:3] == rows
    assert (run / "metrics.jsonl.damaged").read_bytes() == b"\xff\xfe{\n"


def changed_at_step_three(words: list[str], ranks: int, change: Callable[[], object]) -> Result:
    """Run `pretrain_bert.py` and do something while rank 0 is held after its third step."""
    with tempfile.TemporaryDirectory() as folder:
        hold = Hold(Path(folder) / "pipe")

        def during(processes: list[Any]) -> None:
            hold.next_process(processes[0].sentinel)
            change()
            hold.release()

        return start_ranks(words, ranks, armed(f"step.logged={hold.action}@3", 0), during)


@pytest.mark.slow
def test_a_folder_deleted_on_the_way_gets_checkpoints_to_resume_from(flags: Flags, tmp_path: Path) -> None:
    """Its other files are back once the run resumes."""
    folder = tmp_path / "run"
    changed_at_step_three(flags(save=folder, save_interval=2), 1, lambda: shutil.rmtree(folder)).check()
    names = {path.name for path in folder.iterdir()}
    assert names == {"iter_0000004", "iter_0000005", "latest", "exit_code"}
    result = start_ranks(flags(save=folder, load=folder, train_iters=6)).check()
    assert "metrics.jsonl: the rows after step 0 up to step 5 are missing" in result.stdout[0]
    assert {"config.json", "tokenizer", "unigram.json"} < {path.name for path in folder.iterdir()}
    assert [row["iteration"] for row in training_rows(folder)] == [6]


@pytest.mark.slow
def test_a_folder_that_became_a_file_ends_the_run_with_a_line(flags: Flags, tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def replace_by_a_file() -> None:
        shutil.rmtree(folder)
        folder.touch()

    result = changed_at_step_three(flags(save=folder, save_interval=4), 2, replace_by_a_file)
    assert result.exit_codes == [1, 1]
    (line,) = (line for line in result.stdout[0].splitlines() if "not saved" in line)
    fault = f"{folder / 'iter_0000004.tmp'}: Not a directory"
    assert line == f"step 4 not saved: {fault}; the last checkpoint is none; training continues"
    (line,) = lines(result.stderr[0])
    assert f"step 5 not saved: {folder / 'iter_0000005.tmp'}: Not a directory" in line and lines(result.stderr[1]) == []


@pytest.mark.slow
def test_resuming_passes_step_ten_million(run: Path, flags: Flags) -> None:
    """`iter_10000000` comes after `iter_9999999`, though its text does not."""
    path = run / "iter_0000003"
    state = read_state(path)
    path.rename(run / "iter_9999999")
    write_state(run / "iter_9999999", state | {"iteration": 9_999_999})
    mark_latest(run, "iter_9999999")
    command = flags(save=run, load=run, train_iters=10_000_001, save_interval=1, keep_last=2, exit_interval=10_000_000)
    start_ranks(command).check()
    assert [path.name for path in all_checkpoints(run)] == ["iter_10000000", "iter_9999999"]
    assert newest(run) == run / "iter_10000000"
    start_ranks(flags(save=run, load=run, train_iters=10_000_001, keep_last=2)).check()
    assert [path.name for path in all_checkpoints(run)] == ["iter_10000001", "iter_10000000"]
