"""A checkpoint of one layout resumes in any other, with the same losses; notes and ELECTRA do so too, and branches.

Nothing in a checkpoint is unpickled or lost.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ddrp.checkpoint import newest, read_state, write_state
from megatron_ddrp.checkpoint.weights import read_notes
from megatron_ddrp.errors import FAILURE
from megatron_ddrp.run.run_folder import sole_writer
from tests.integration.conftest import NOTES, PIPELINE, TENSOR, Flags, Told, Train
from tests.integration.launch import start_ranks, steps_of, training_rows
from tests.integration.test_bad_input import contents
from tests.integration.training_runs import assert_near, assert_same_bits, largest_differences, tensors, train_runs
from tests.refusals import refused

SAVED, STEPS = 2, 5

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1 rank (ZeRO 0, fp32)": (1, {"zero_stage": 0}),
    "2 ranks (ZeRO 3, fp32)": (2, {"zero_stage": 3}),
    "2 ranks (ZeRO 2, fp32)": (2, {"zero_stage": 2}),
    "2 ranks (TP 2, ZeRO 2, fp32)": (2, {**TENSOR, "zero_stage": 2}),
    "2 ranks (PP 2, ZeRO 1, fp32)": (2, {**PIPELINE, "zero_stage": 1}),
    "4 ranks (TP 2, PP 2, ZeRO 0, fp32)": (4, {**TENSOR, **PIPELINE, "zero_stage": 0}),
}
MODELS = {"ddrp": {"position_encoding": "ddrp"}, "deberta": {"position_encoding": "deberta", "micro_batch_size": 2}}
"""One whose tables all heads share, and one that tensor parallelism cuts by heads."""
PRECISE: dict[str, tuple[int, dict[str, Any]]] = {
    "1 rank (ZeRO 3, bf16)": (1, {"zero_stage": 3, "bf16": True}),
    "2 ranks (TP 2, ZeRO 1, bf16)": (2, {**TENSOR, "zero_stage": 1, "bf16": True}),
    "2 ranks (PP 2, ZeRO 1, bf16)": (2, {**PIPELINE, "zero_stage": 1, "bf16": True}),
    "4 ranks (TP 2, PP 2, ZeRO 0, bf16)": (4, {**TENSOR, **PIPELINE, "zero_stage": 0, "bf16": True}),
}
"""Layouts that keep fp32 weights beside those they compute with."""


def in_layouts(scenarios: list[tuple[str, list[str]]]) -> list[Any]:
    """The runs of (layout, command line), in their order. Those with as many ranks share a process group, where
    ZeRO 3, which changes torch for good, comes last."""
    layouts = LAYOUTS | PRECISE
    runs = dict[int, Any]()
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
    """From each of six layouts over all axes, tied weights on two pipeline stages included, to the next, and under
    tables cut by heads to the one before. Other pairs add nothing: below, every layout saves the bits that it loaded.
    """
    undisturbed = train_runs(1, [flags(**model, zero_stage=0, train_iters=STEPS) for model in MODELS.values()])
    expected = {kind: rows[SAVED:] for kind, rows in zip(MODELS, undisturbed, strict=True)}
    neighbours = list(zip(LAYOUTS, [*LAYOUTS][1:] + [*LAYOUTS][:1], strict=True))
    pairs = [("ddrp", one, other) for one, other in neighbours] + [("deberta", other, one) for one, other in neighbours]
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
        assert any(tensor.abs().max() > 0 for tensor in tensors(newest(load)).values())
        for name, folder in folders.items():
            assert_same_bits(folder, load, f"{source} → {name}")
            assert [read_state(newest(run))["optimizer_step"] for run in (load, folder)] == [SAVED] * 2


def test_a_checkpoint_is_numbers_and_json_and_tells_its_layout(told: Told, tmp_path: Path) -> None:
    told(save=tmp_path / "source", train_iters=2, bf16=True, zero_stage=2)
    path, before = newest(tmp_path / "source"), contents(tmp_path / "source")
    names = {"state.json", "weights-00-of-01.safetensors", "optimizer-00-of-01.safetensors"}
    state, layout = read_state(path), {"ranks": 1, "tensor": 1, "pipeline": 1, "zero_stage": 2, "precision": "bf16"}
    assert {file.name for file in path.iterdir()} == names and state["optimizer_step"] == state["iteration"] == 2
    assert state["layout"] == layout and all(tensor.dtype == torch.float32 for tensor in tensors(path).values())
    assert not list(path.parent.glob("*.tmp")) and not (path.parent / "lock").exists()
    assert (path.parent / "exit_code").read_text() == "0\n"
    said = told(save=tmp_path / "target", load=tmp_path / "source", train_iters=3, zero_stage=3)
    assert "checkpoint of 1 rank (ZeRO 2, bf16) → 1 rank (ZeRO 3, fp32)\n" in said
    assert [row["iteration"] for row in training_rows(tmp_path / "target")] == [3]
    assert contents(tmp_path / "source") == before


def test_one_run_a_folder_whose_lock_is_free_when_the_run_was_killed(
    train: Train, flags: Flags, tmp_path: Path
) -> None:
    with sole_writer(tmp_path):
        result = start_ranks(flags(save=tmp_path, train_iters=1))
    assert result.exit_codes == [1]
    (line,) = result.stderr[0].splitlines()
    assert f"--save {tmp_path} is being written by another run (host " in line
    (tmp_path / "lock").write_text("host elsewhere, process 1\n", encoding="utf-8")
    train(save=tmp_path, train_iters=1)


def test_resuming_reads_the_state_it_says(run: Path, train: Train) -> None:
    """The optimizer's count of steps is its own: bias correction depends on it."""
    write_state(newest(run), read_state(newest(run)) | {"optimizer_step": 5})
    train(save=run, load=run, train_iters=4)
    assert read_state(newest(run))["optimizer_step"] == 6


MUON: dict[str, Any] = {"objective": "mlm", "optimizer": "muon", "zero_stage": 0}
RECIPE = MUON | {"position_encoding": "rope", "rope_theta": 1000.0, "seq_length_phases": "16:0.5:100"}
RECIPE |= {"mask_prob": "0.4:0.2", "train_iters": 6}
SHORT = RECIPE | {"seq_length_phases": None, "seq_length": 16, "rope_theta": 100.0}
STABLE = MUON | {"lr_warmup_iters": 1, "lr_warmup_fraction": None}
DECAY = STABLE | {"lr_decay_style": "wsd", "lr_wsd_decay_iters": 3, "lr_wsd_decay_style": "minus_sqrt"}
DECAY |= {"train_iters": 5}
BRANCHES: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "longer rows": (SHORT, RECIPE, 3),
    "a decay": (STABLE | {"lr_decay_style": "constant", "train_iters": 90}, DECAY, 2),
}
"""Run, the run that goes on from one of its checkpoints, and the checkpoint's step."""


@pytest.mark.parametrize("branch", BRANCHES)
def test_a_branch_off_a_checkpoint_is_the_run_planned_so(branch: str, train: Train, tmp_path: Path) -> None:
    trunk, own, stop = BRANCHES[branch]
    begun = steps_of(train(**trunk, exit_interval=stop, save=tmp_path).rows)
    whole = steps_of(train(**own).rows)
    assert begun[0] == whole[0]
    assert steps_of(train(**own, load=tmp_path / f"iter_{stop:07d}").rows) == whole[stop:]


def test_a_recipe_goes_on_alike_in_other_layouts(flags: Flags, tmp_path: Path) -> None:
    whole, _ = train_runs(1, [flags(**RECIPE), flags(**RECIPE, exit_interval=SAVED, save=tmp_path)])
    layouts = ({}, TENSOR, PIPELINE)
    resumed = train_runs(2, [flags(**RECIPE, **layout, load=tmp_path) for layout in layouts])
    for layout, got in zip(layouts, resumed, strict=True):
        found = largest_differences(got, whole[SAVED:])
        assert max(found.values()) <= 2e-5, (layout, found)


COURSE = {**NOTES, "zero_stage": 1, "train_iters": 10, "global_batch_size": 16, "generator_size": 0.5}
TENSOR_2 = TENSOR | {"micro_batch_size": 8}
NOTES_LAYOUTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "data 2": (2, "electra", {}),
    "tensor 2": (2, "mth", TENSOR_2),
    "tensor 2 with sequence": (2, "electra", {**TENSOR_2, "sequence_parallel": True, "packing": True}),
    "pipeline 2": (2, "electra", PIPELINE),
    "data 4": (4, "mth", {"packing": True}),
    "tensor 2 x pipeline 2": (4, "mth", TENSOR | PIPELINE),
}
"""Ranks, objective and flags; tests/endurance/combinations.py draws other pairs of layout and objective."""


def dictionary(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    return read_notes(newest(folder))[1:]


@pytest.mark.slow
def test_notes_and_electra_in_every_layout_follow_one_process(flags: Flags, tmp_path: Path) -> None:
    objectives = ("mth", "electra")
    alone = train_runs(1, [flags(**COURSE, objective=each, save=tmp_path / each) for each in objectives])
    expected = dict(zip(objectives, alone, strict=True))
    for size in (2, 4):
        cases = {name: rest for name, (ranks, *rest) in NOTES_LAYOUTS.items() if ranks == size}
        lines = [flags(**COURSE | own, objective=each, save=tmp_path / name) for name, (each, own) in cases.items()]
        for (name, (each, _)), rows in zip(cases.items(), train_runs(size, lines), strict=True):
            assert len(rows) == 10 and ("rtd_loss" in rows[0]) == (each == "electra"), name
            assert_near(rows, expected[each], 1e-5, name)
            (pieces, notes), (as_many, others) = (dictionary(tmp_path / run) for run in (name, each))
            assert len(pieces) > 50 and torch.equal(pieces, as_many), name
            torch.testing.assert_close(notes, others, rtol=1e-5, atol=1e-5)


def test_notes_act_lambda_0_is_plain_training_and_a_resumed_run_has_them_back(train: Train, tmp_path: Path) -> None:
    noted, resumed = tmp_path / "noted", {**COURSE, "save": tmp_path / "parts", "load": tmp_path / "parts"}
    train(**COURSE, save=noted)
    expected = steps_of(train(train_iters=10, global_batch_size=16, zero_stage=1).rows)
    train(**COURSE, notes_mix=0.0, save=tmp_path / "zero")
    assert training_rows(tmp_path / "zero") == expected
    assert len(dictionary(tmp_path / "zero")[0]) > 50
    assert training_rows(noted)[0] == expected[0], "there is nothing to read in the first step"
    assert training_rows(noted)[-1]["lm_loss"] != expected[-1]["lm_loss"]
    train(**resumed, exit_interval=5)
    train(**resumed)
    assert training_rows(tmp_path / "parts") == training_rows(noted)
    assert all(map(torch.equal, dictionary(tmp_path / "parts"), dictionary(noted)))
    error = refused("holds notes of", train, **COURSE | {"notes_min_count": 5}, save=noted, load=noted)  # other words
    assert error.exit_code == FAILURE and "--notes-min-count" in str(error)
