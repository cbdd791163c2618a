"""A checkpoint of one layout goes on in any other, with the same losses; nothing in it is unpickled or lost."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ddrp.checkpoint import StoredTensors, newest, read_state, write_state
from megatron_ddrp.run.run_folder import sole_writer
from tests.endurance.kills import kill_and_compare
from tests.integration.launch import start_ranks, training_rows
from tests.integration.training_runs import Rows, largest_differences, train_runs

Flags = Callable[..., list[str]]
SAVED, STEPS = 2, 5

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1 rank (ZeRO 0, fp32)": (1, {"zero_stage": 0}),
    "2 ranks (ZeRO 3, fp32)": (2, {"zero_stage": 3}),
    "2 ranks (TP 2, ZeRO 2, fp32)": (2, {"tensor_model_parallel_size": 2, "zero_stage": 2}),
    "2 ranks (PP 2, ZeRO 1, fp32)": (2, {"pipeline_model_parallel_size": 2, "zero_stage": 1}),
    "4 ranks (TP 2, PP 2, ZeRO 0, fp32)": (
        4,
        {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "zero_stage": 0},
    ),
}
MODELS = {"ddrp": {"position_encoding": "ddrp"}, "deberta": {"position_encoding": "deberta", "micro_batch_size": 2}}
"""One whose tables all heads share, and one that tensor parallelism cuts by heads."""
PRECISE: dict[str, tuple[int, dict[str, Any]]] = {
    "1 rank (ZeRO 3, bf16)": (1, {"zero_stage": 3, "bf16": True}),
    "2 ranks (TP 2, ZeRO 1, bf16)": (2, {"tensor_model_parallel_size": 2, "zero_stage": 1, "bf16": True}),
    "2 ranks (PP 2, ZeRO 1, bf16)": (2, {"pipeline_model_parallel_size": 2, "zero_stage": 1, "bf16": True}),
    "4 ranks (TP 2, PP 2, ZeRO 0, bf16)": (
        4,
        {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "zero_stage": 0, "bf16": True},
    ),
}
"""Layouts that keep fp32 weights beside those they compute with."""


def in_layouts(scenarios: list[tuple[str, list[str]]]) -> list[Rows]:
    """The runs of (layout, command line), in their order. Those with as many ranks share a process group, where
    ZeRO 3, which changes torch for good, comes last."""
    layouts = LAYOUTS | PRECISE
    runs: dict[int, Rows] = {}
    for size in sorted({layouts[name][0] for name, _ in scenarios}):
        own = [number for number, (name, _) in enumerate(scenarios) if layouts[name][0] == size]
        own.sort(key=lambda number: layouts[scenarios[number][0]][1]["zero_stage"] == 3)
        runs |= zip(own, train_runs(size, [scenarios[number][1] for number in own]), strict=True)
    return [runs[number] for number in range(len(scenarios))]


@pytest.fixture(scope="module")
def saved(flags: Flags, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each model saved after some steps in each layout, as DIR/MODEL/LAYOUT."""
    folder = tmp_path_factory.mktemp("saved")
    scenarios = [
        (name, flags(**model, **settings, save=folder / kind / name, exit_interval=SAVED, train_iters=STEPS))
        for kind, model in MODELS.items()
        for name, (_, settings) in (LAYOUTS | (PRECISE if kind == "deberta" else {})).items()
    ]
    in_layouts(scenarios)
    return folder


@pytest.mark.slow
def test_every_layout_goes_on_from_every_other(saved: Path, flags: Flags) -> None:
    """All ordered pairs of five layouts over all axes, tied weights on two pipeline stages included; neighbours alone
    under tables cut by heads."""
    undisturbed = train_runs(1, [flags(**model, zero_stage=0, train_iters=STEPS) for model in MODELS.values()])
    expected = {kind: rows[SAVED:] for kind, rows in zip(MODELS, undisturbed, strict=True)}
    names = list(LAYOUTS)
    pairs = [("ddrp", source, target) for source in names for target in names]
    for source, target in zip(names, names[1:] + names[:1], strict=True):
        pairs += [("deberta", source, target), ("deberta", target, source)]
    runs = in_layouts(
        [
            (target, flags(**MODELS[kind], **LAYOUTS[target][1], load=saved / kind / source, train_iters=STEPS))
            for kind, source, target in pairs
        ]
    )
    for (kind, source, target), rows in zip(pairs, runs, strict=True):
        differences = largest_differences(rows, expected[kind])
        assert max(differences.values()) <= 5e-6, f"{kind}: {source} → {target}: {differences}"


@pytest.mark.slow
def test_every_layout_saves_the_bits_that_it_loaded(saved: Path, flags: Flags, tmp_path: Path) -> None:
    """No step in between: weights, moments and Adam's count, over all axes and precisions."""
    model, targets = MODELS["deberta"], LAYOUTS | PRECISE
    for number, source in enumerate(("4 ranks (TP 2, PP 2, ZeRO 0, fp32)", "2 ranks (PP 2, ZeRO 1, bf16)")):
        load = saved / "deberta" / source
        folders = {name: tmp_path / f"{number}" / name for name in targets}
        in_layouts(
            [
                (name, flags(**model, **settings, load=load, save=folders[name], train_iters=SAVED))
                for name, (_, settings) in targets.items()
            ]
        )
        before, count = tensors(newest(load)), read_state(newest(load))["optimizer_step"]  # type: ignore[arg-type]
        assert count == SAVED and any(tensor.abs().max() > 0 for tensor in before.values())
        for name, folder in folders.items():
            path = newest(folder)
            assert path
            after = tensors(path)
            assert after.keys() == before.keys()
            unequal = [key for key, tensor in before.items() if not torch.equal(after[key], tensor)]
            assert not unequal, f"{source} → {name}: {unequal[:3]}"
            assert read_state(path)["optimizer_step"] == count


CHAIN: dict[str, tuple[int, dict[str, Any]]] = {
    "1 rank (ZeRO 3, fp32)": (1, {"zero_stage": 3}),
    "2 ranks (ZeRO 1, fp32)": (2, {"zero_stage": 1}),
    "2 ranks (TP 2, ZeRO 1, fp32)": (2, {"zero_stage": 1, "tensor_model_parallel_size": 2}),
    "2 ranks (ZeRO 2, fp32)": (2, {"zero_stage": 2}),
    "2 ranks (PP 2, ZeRO 0, fp32)": (2, {"zero_stage": 0, "pipeline_model_parallel_size": 2}),
    "2 ranks (ZeRO 3, fp32)": (2, {"zero_stage": 3}),
    "1 rank (ZeRO 0, fp32)": (1, {"zero_stage": 0}),
}


@pytest.mark.slow
def test_one_run_passes_through_many_layouts(flags: Flags, tmp_path: Path) -> None:
    """The script itself, two steps a layout, each saying from what it goes on."""
    steps = {"train_iters": 2 * len(CHAIN), "lr_warmup_fraction": 0.5}
    before = None
    for name, (ranks, settings) in CHAIN.items():
        folder = tmp_path / "chain"
        arguments = flags(save=folder, load=folder, exit_interval=2, **steps, **settings)
        said = start_ranks(arguments, ranks).check().stdout[0]
        assert before is None or f"checkpoint of {before} → {name}\n" in said
        before = name
    start_ranks(flags(save=tmp_path / "whole", zero_stage=0, **steps)).check()
    chain, whole = ([row["loss"] for row in training_rows(tmp_path / name)] for name in ("chain", "whole"))
    assert chain == pytest.approx(whole, rel=1e-5)


def tensors(path: Path | None) -> dict[str, torch.Tensor]:
    """All that a checkpoint holds."""
    assert path
    kinds = [StoredTensors(path, kind) for kind in ("weights", "optimizer")]
    return {name: stored[name].clone() for stored in kinds for name in stored.names}


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ({"zero_stage": 0}, {"bf16": True, "zero_stage": 1}),
        ({"bf16": True, "zero_stage": 2}, {"zero_stage": 3}),
        ({"bf16": True, "zero_stage": 3}, {"zero_stage": 0}),
    ],
    ids=["fp32-bf16", "bf16-fp32", "bf16-fp32-zero0"],
)
def test_weights_and_moments_pass_between_precisions_unrounded(
    source: dict[str, Any], target: dict[str, Any], flags: Flags, tmp_path: Path
) -> None:
    """A rate of 0 and no decay of moments: what is saved again is what was read."""
    still = {"lr": 0.0, "adam_beta1": 0.5, "adam_beta2": 0.5}
    start_ranks(flags(save=tmp_path / "source", train_iters=2, **source)).check()
    said = start_ranks(flags(save=tmp_path / "target", load=tmp_path / "source", train_iters=3, **still, **target))
    assert "→ 1 rank" in said.check().stdout[0]
    before, after = tensors(newest(tmp_path / "source")), tensors(newest(tmp_path / "target"))
    assert all(tensor.dtype == torch.float32 for tensor in before.values())
    for name, tensor in before.items():
        if "/" not in name:
            assert torch.equal(after[name], tensor), name
    # the second moment was halved and gained half a square: it cannot be below half of what it was
    moments = [name for name in before if name.startswith("exp_avg_sq/")]
    assert all((after[name] >= 0.4999 * before[name]).all() for name in moments)
    assert any(before[name].max() > 0 for name in moments)
    rows = training_rows(tmp_path / "target")
    assert rows[0]["iteration"] == 3


def test_a_checkpoint_is_numbers_and_json(flags: Flags, tmp_path: Path) -> None:
    start_ranks(flags(save=tmp_path, train_iters=2)).check()
    path = newest(tmp_path)
    assert path
    names = {file.name for file in path.iterdir()}
    assert names == {"state.json", "weights-00-of-01.safetensors", "optimizer-00-of-01.safetensors"}
    state = read_state(path)
    assert state["optimizer_step"] == state["iteration"] == 2
    assert state["layout"] == {"ranks": 1, "tensor": 1, "pipeline": 1, "zero_stage": 1, "precision": "fp32"}
    assert not list(tmp_path.glob("*.tmp")) and not (tmp_path / "lock").exists()
    assert (tmp_path / "exit_code").read_text() == "0\n"


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def change_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-50] ^= 1
    path.write_bytes(bytes(data))


@pytest.fixture(scope="module")
def three_checkpoints(flags: Flags, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("three")
    start_ranks(flags(save=folder, train_iters=6, save_interval=2)).check()
    return folder


@pytest.mark.parametrize(
    ("damage", "file", "reason"),
    [
        (truncate, "weights-00-of-01.safetensors", "bytes instead of"),
        (change_a_byte, "optimizer-00-of-01.safetensors", "CRC-32"),
        (Path.unlink, "weights-00-of-01.safetensors", "is missing"),
        (truncate, "state.json", "damaged"),
    ],
    ids=["truncated", "changed", "missing", "state"],
)
def test_a_damaged_checkpoint_is_passed_over(
    damage: Callable[[Path], None], file: str, reason: str, three_checkpoints: Path, flags: Flags, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(three_checkpoints, tmp_path / "run"))
    rows, wanted = training_rows(folder), tensors(newest(folder))
    damage(folder / "iter_0000006" / file)
    said = start_ranks(flags(save=folder, load=folder, train_iters=6, save_interval=2)).check().stdout[0]
    (line,) = [line for line in said.splitlines() if line.startswith("skipped")]
    assert "iter_0000006" in line and reason in line and file in line
    assert f"resumed from {folder} at step 4" in said
    assert training_rows(folder) == rows
    again = tensors(newest(folder))
    assert all(torch.equal(again[name], tensor) for name, tensor in wanted.items())


def test_without_latest_the_newest_whole_checkpoint_counts(three_checkpoints: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(three_checkpoints, tmp_path / "run"))
    (folder / "latest").unlink()
    assert newest(folder) == folder / "iter_0000006"
    truncate(folder / "iter_0000006" / "weights-00-of-01.safetensors")
    assert newest(folder) == folder / "iter_0000004"


def test_milestones_stay(flags: Flags, tmp_path: Path) -> None:
    start_ranks(flags(save=tmp_path, train_iters=7, save_interval=1, keep_last=2, milestone_interval=3)).check()
    assert [int(path.name[5:]) for path in sorted(tmp_path.glob("iter_*"))] == [3, 6, 7]


def test_one_run_a_folder(flags: Flags, tmp_path: Path) -> None:
    with sole_writer(tmp_path):
        result = start_ranks(flags(save=tmp_path, train_iters=1))
    assert result.exit_codes == [1]
    (line,) = result.stderr[0].splitlines()
    assert f"--save {tmp_path} is being written by another run (host " in line
    start_ranks(flags(save=tmp_path, train_iters=1)).check()


def test_the_lock_of_a_killed_run_is_free(flags: Flags, tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("host elsewhere, process 1\n", encoding="utf-8")
    start_ranks(flags(save=tmp_path, train_iters=1)).check()


def test_random_kills_leave_no_trace(flags: Flags, tmp_path: Path) -> None:
    """Named points, as in test_resume.py, prove only the places that somebody thought of."""
    arguments = flags(hidden_dropout=0.1, attention_dropout=0.1, train_iters=None)
    seen = kill_and_compare(2, arguments, tmp_path, seed=1)
    assert seen["kills"] == 2


def test_resuming_reads_the_state_it_says(flags: Flags, tmp_path: Path) -> None:
    """The optimizer's count of steps is its own: bias correction depends on it."""
    start_ranks(flags(save=tmp_path, train_iters=2)).check()
    path = newest(tmp_path)
    assert path
    state = read_state(path)
    write_state(path, state | {"optimizer_step": 5})
    start_ranks(flags(save=tmp_path, load=tmp_path, train_iters=3)).check()
    again = newest(tmp_path)
    assert again and read_state(again)["optimizer_step"] == 6
