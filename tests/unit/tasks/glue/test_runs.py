"""runs.jsonl: nothing is lost by a kill, nothing is repeated."""

import json
from dataclasses import replace

import pytest

from megatron_ddrp.errors import UserError
from megatron_ddrp.tasks.finetune.options import Search
from megatron_ddrp.tasks.finetune.runs import Point, RunStore, TuningRun
from megatron_ddrp.tasks.glue import TASKS
from tests.unit.tasks.glue.conftest import finished

RUN = TuningRun("RTE", 16, 1e-5, 4, 1, max_seq_length=128, encoder="aa", data="bb", micro_batch_size=8)


def test_the_paper_runs_480_a_checkpoint():
    assert len(Search().points) * Search().seeds * 8 == 480
    assert Search(grid="quick").points == (Point(32, 3e-5, 4),)


def test_finished_runs_are_found_again(tmp_path):
    store = RunStore(tmp_path / "out" / "runs.jsonl")
    assert RUN.name not in store
    store.append(finished(RUN))
    for known in (store, RunStore(store.path)):
        assert RUN.name in known
        for other in (replace(RUN, seed=2), replace(RUN, lr=2e-5), replace(RUN, encoder="ab"), replace(RUN, data="c")):
            assert other.name not in known


def test_an_unfinished_last_line_is_cut_off(tmp_path):
    path = tmp_path / "runs.jsonl"
    RunStore(path).append(finished(RUN))
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:20])
    store = RunStore(path)
    assert len(store.rows) == 1
    store.append(finished(replace(RUN, seed=2)))
    assert [row["seed"] for row in RunStore(path)] == [1, 2]


def test_a_foreign_line_is_named_and_left_alone(tmp_path):
    path = tmp_path / "runs.jsonl"
    path.write_text('{"task": "RTE"}\n')
    with pytest.raises(UserError, match=r"runs\.jsonl, line 1: not a run"):
        RunStore(path, tasks=TASKS)
    assert path.read_text() == '{"task": "RTE"}\n'


def test_lines_of_earlier_versions_count_an_undefined_score_as_0(tmp_path):
    """They had null for it, left it out of the best epoch, and carried no sum."""
    path = tmp_path / "runs.jsonl"
    old = finished(RUN) | {"score": None, "best_epoch_score": None, "best_epoch": None, "epoch_scores": [None, None]}
    del old["undefined"]
    other = finished(replace(RUN, seed=2)) | {"score": -0.1, "best_epoch_score": -0.1, "epoch_scores": [-0.1, None]}
    other |= {"other_scores": {"dev_mismatched": None}}
    path.write_text("".join(json.dumps(row) + "\n" for row in (old, other)))
    first, second = RunStore(path)
    assert (first["score"], first["undefined"], first["best_epoch_score"]) == (0.0, True, 0.0)
    assert (second["score"], second["undefined"], second["best_epoch_score"]) == (-0.1, False, 0.0)
    assert (second["other_scores"], second["other_undefined"]) == ({"dev_mismatched": 0.0}, ["dev_mismatched"])
    assert RUN.name in RunStore(path)


DAMAGES = {
    "a changed score": lambda line: line.replace(b'"score": 0.5', b'"score": 0.9'),
    "a changed name": lambda line: line.replace(b'"load": "e"', b'"load": "f"'),
    "a list": lambda line: b"[]\n",
    "deep": lambda line: b"[" * 100_000 + b"\n",
    "not UTF-8": lambda line: line.replace(b"RTE", b"R\xffE"),
    "a list for a number": lambda line: _without_sum(line).replace(b'"lr": 1e-05', b'"lr": []'),
    "an unknown task": lambda line: _without_sum(line).replace(b'"RTE"', b'"RTF"'),
    "a score that is no number": lambda line: _without_sum(line).replace(b'"score": 0.5', b'"score": NaN'),
    "no scores": lambda line: _without_sum(line).replace(b'"epoch_scores": [0.5]', b'"epoch_scores": []'),
    "blank": lambda line: b"\n",
}


def _without_sum(line):
    return line[: line.index(b', "crc32"')] + b"}\n"


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_line_is_named(tmp_path, damage):
    path = tmp_path / "runs.jsonl"
    store = RunStore(path)
    for seed in (1, 2, 3):
        store.append(finished(replace(RUN, seed=seed)))
    lines = path.read_bytes().splitlines(keepends=True)
    assert damage(lines[1]) != lines[1]
    path.write_bytes(b"".join([lines[0], damage(lines[1]), lines[2]]))
    with pytest.raises(UserError, match=r"runs\.jsonl, line 2: "):
        RunStore(path, tasks=TASKS)
    told = []
    assert [row["seed"] for row in RunStore(path, told.append, TASKS)] == [1, 3]
    assert len(told) == 1 and "line 2: " in told[0]
