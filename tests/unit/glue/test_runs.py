"""runs.jsonl: nothing is lost by a kill, nothing is repeated."""

from dataclasses import asdict, replace

import pytest

from megatron_ddrp.errors import UserError
from tasks.glue.runs import GRIDS, Point, Run, RunStore, grid

RUN = Run("RTE", 16, 1e-5, 4, 1, max_seq_length=128, encoder="aa", data="bb", micro_batch_size=8)


def test_the_paper_runs_480_a_checkpoint():
    assert len(grid(**GRIDS["paper"])) * 5 * 8 == 480
    assert grid(**GRIDS["quick"]) == (Point(32, 3e-5, 4),)


def test_finished_runs_are_found_again(tmp_path):
    store = RunStore(tmp_path / "out" / "runs.jsonl")
    assert RUN not in store
    store.append(asdict(RUN) | {"score": 0.5})
    for known in (store, RunStore(store.path)):
        assert RUN in known
        for other in (replace(RUN, seed=2), replace(RUN, lr=2e-5), replace(RUN, encoder="ab"), replace(RUN, data="c")):
            assert other not in known


def test_an_unfinished_last_line_is_cut_off(tmp_path):
    path = tmp_path / "runs.jsonl"
    RunStore(path).append(asdict(RUN))
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:20])
    store = RunStore(path)
    assert len(store.rows) == 1
    store.append(asdict(replace(RUN, seed=2)))
    assert [row["seed"] for row in RunStore(path)] == [1, 2]


def test_a_foreign_line_is_named_and_left_alone(tmp_path):
    path = tmp_path / "runs.jsonl"
    path.write_text('{"task": "RTE"}\n')
    with pytest.raises(UserError, match=r"runs\.jsonl, line 1: not a run"):
        RunStore(path)
    assert path.read_text() == '{"task": "RTE"}\n'
