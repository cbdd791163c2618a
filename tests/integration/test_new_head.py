"""A new head learns first: the encoder rests to the bit, in every layout, and then begins as at the start of a run."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_ddrp import convert, merge
from megatron_ddrp.checkpoint import NEW_HEAD, newest, read_state
from megatron_ddrp.model import ENCODER_PARTS
from tests.conftest import TinyCorpus
from tests.integration.conftest import PIPELINE, TENSOR, Flags, Told, Train
from tests.integration.training_runs import assert_same_bits, largest_differences, tensors, train_runs
from tests.refusals import wrong_arguments

MODEL = {"objective": "mlm", "position_encoding": "absolute", "relative_distance": None}
MUON = {"zero_stage": 0, "optimizer": "muon"}
HEAD_STEPS, STEPS = 2, 5


@pytest.fixture(scope="module")
def train(train: Train) -> Train:
    return partial(train, **MODEL, train_iters=STEPS, lr=5e-4)


@pytest.fixture(scope="module")
def start(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An import of a folder without a head, as those of sentence encoders."""
    folder = tmp_path_factory.mktemp("headless")
    train(train_iters=1, save=folder / "theirs")
    exported = convert(load=folder / "theirs", output=folder / "hf")
    weights = load_file(exported / "model.safetensors")
    save_file({n: t for n, t in weights.items() if not n.startswith("cls.")}, exported / "model.safetensors")
    for name in ("export_sums.json", "modules.json"):  # without modules it is no sentence encoder, which stays headless
        (exported / name).unlink()
    return convert(from_hf=exported, output=folder / "start")


def assert_only_the_head_learned(path: Path | None, start: Path) -> None:
    before, after = tensors(newest(start), "weights"), tensors(path, "weights")
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if not name.startswith(ENCODER_PARTS)}


@pytest.mark.parametrize("optimizer", [{"zero_stage": 2}, MUON], ids=["adamw", "muon"])
def test_the_encoder_rests_and_then_begins_as_at_a_start(
    optimizer: dict[str, Any], train: Train, start: Path, tmp_path: Path
) -> None:
    run = optimizer | {"new_head_iters": HEAD_STEPS, "save_interval": 1, "weight_decay": 0.1}
    rows = train(**run, load=start, save=tmp_path / "run").rows
    assert_only_the_head_learned(tmp_path / "run" / f"iter_{HEAD_STEPS:07d}", start)
    warmed_up = pytest.approx([1e-3, 1e-3, 5e-4, 5e-4, 2.5e-4])  # one step of warm-up of three
    assert [row["lr"] for row in rows] == warmed_up
    first = tmp_path / "run" / f"iter_{HEAD_STEPS + 1:07d}"
    moments = tensors(first, "optimizer")
    assert read_state(first)["optimizer_step"] == 1
    for name in [name for name in moments if name.startswith("exp_avg/")]:  # of one gradient: m = 0.1·g, v = 0.001·g²
        squares = moments[name.replace("avg", "avg_sq")]
        torch.testing.assert_close(squares, moments[name] ** 2 / 10, rtol=1e-4, atol=1e-20)
    before, after = tensors(newest(start), "weights"), tensors(first, "weights")
    moved = {name for name, weight in before.items() if not torch.equal(weight, after[name])}
    assert {"embeddings.token.weight", "layers.0.attention.query.weight", "head.dense.weight"} <= moved
    again = tmp_path / "again"
    train(**run, exit_interval=1, load=start, save=again)  # stopped in the phase
    train(**{**run, "new_head_iters": None}, load=again, save=again)  # the plain command, which knows where it was
    state, branch = read_state(newest(again)), tmp_path / "branch"  # type: ignore[arg-type]
    assert (state["started_from"], state["origin"]["name"]) == ("start/iter_0000000", "hf")
    train(**run, exit_interval=2, load=again / "iter_0000001", save=branch)
    assert read_state(newest(branch))["started_from"] == "again/iter_0000001"  # type: ignore[arg-type]
    assert_same_bits(again, tmp_path / "run")


def test_by_default_a_head_that_was_drawn_learns_first(
    train: Train, told: Told, tiny_corpus: TinyCorpus, start: Path, tmp_path: Path
) -> None:
    assert read_state(newest(start))[NEW_HEAD] is True  # type: ignore[arg-type]
    said = told(load=start, save=tmp_path / "run", save_interval=1)
    assert f"weights from {start / 'iter_0000000'}, optimizer fresh" in said
    assert f"steps 1 to {STEPS // 5} train the head alone" in said
    assert_only_the_head_learned(tmp_path / "run" / f"iter_{STEPS // 5:07d}", start)
    convert(load=tmp_path / "run", output=tmp_path / "hf")
    whole = convert(from_hf=tmp_path / "hf", output=tmp_path / "whole")
    mean = merge(load=[tmp_path / "run"] * 2, output=tmp_path / "mean", data_path=tiny_corpus.prefix)
    for more in ({"load": whole}, {"load": mean}, {"load": start, "new_head_iters": 0}):
        assert "train the head alone" not in told(train_iters=1, **more)
    starts = merge(load=[start, start], output=tmp_path / "starts")
    assert "steps 1 to 1 train the head alone" in told(train_iters=1, load=starts)
    new = {"save": tmp_path / "new", "load": tmp_path / "new"}
    ten = {"train_iters": 10, "load": start, "lr_warmup_fraction": None}
    wsd = ten | {"lr_decay_style": "wsd", "lr_wsd_decay_iters": 9, "lr_warmup_iters": 0}
    short = ten | {"lr_warmup_iters": 3, "lr_decay_iters": 4}
    after = "after --new-head-iters 2"  # the schedule begins after the head's steps
    for words, more in (
        ("it needs the encoder of --load", {"new_head_iters": 1}),
        ("at most the steps of --train-iters 5", {"new_head_iters": 6, "load": start}),
        ("holds no encoder that could rest", {"new_head_iters": 1, **new}),
        (f"--lr-warmup-iters 9 of 8 steps {after}: the peak is never reached", ten | {"lr_warmup_iters": 9}),
        (f"--lr-wsd-decay-iters 9 and 0 steps of warm-up are more than --train-iters 8 {after}: ", wsd),
        (f"--lr-decay-iters 4: the warm-up alone has 3 steps {after},", short),
    ):
        wrong_arguments(words, train, **more)


LAYOUTS: list[dict[str, Any]] = [
    *({"zero_stage": 1, "bf16": True}, TENSOR | {"zero_stage": 2}, PIPELINE | {"zero_stage": 1}, PIPELINE | MUON),
    {"zero_stage": 3},  # which changes torch for good
]


@pytest.mark.slow
def test_the_encoder_rests_in_every_layout(start: Path, flags: Flags, tmp_path: Path) -> None:
    run = {**MODEL, "load": start, "new_head_iters": HEAD_STEPS, "train_iters": STEPS}
    stops = [{**run, **each, "save": tmp_path / f"{n}", "exit_interval": HEAD_STEPS} for n, each in enumerate(LAYOUTS)]
    commands = [[flags(**stop), flags(**run, **each)] for stop, each in zip(stops, LAYOUTS, strict=True)]
    rows = train_runs(2, [words for pair in commands for words in pair])[1::2]
    for number in range(len(LAYOUTS)):
        assert_only_the_head_learned(newest(tmp_path / f"{number}"), start)
    one_rank = [{"zero_stage": 0, "optimizer": layout.get("optimizer", "adamw")} for layout in LAYOUTS]
    expected = train_runs(1, [flags(**run, **each) for each in one_rank])
    for layout, ours, theirs in zip(LAYOUTS, rows, expected, strict=True):
        found = largest_differences(ours, theirs)
        assert max(found.values()) <= (2e-2 if layout.get("bf16") else 2e-5), (layout, found)
