"""A checkpoint of one layout resumes in any other, with the same losses; recipes, notes and ELECTRA do so too.

Nothing in a checkpoint is unpickled or lost.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ddrp.checkpoint import (
    StoredTensors,
    load_model,
    mark_latest,
    newest,
    read_state,
    save_weights_only,
    write_state,
)
from megatron_ddrp.checkpoint.weights import read_notes
from megatron_ddrp.config import load_config
from megatron_ddrp.model import build_model
from megatron_ddrp.run.run_folder import sole_writer
from tests.endurance.kills import kill_and_compare
from tests.integration.conftest import Flags
from tests.integration.launch import start_ranks, training_rows
from tests.integration.training_runs import Rows, largest_differences, train_runs

SAVED, STEPS = 2, 5

TENSOR, PIPELINE = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1 rank (ZeRO 0, fp32)": (1, {"zero_stage": 0}),
    "2 ranks (ZeRO 3, fp32)": (2, {"zero_stage": 3}),
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
            after = tensors(path)
            assert after.keys() == before.keys()
            unequal = [key for key, tensor in before.items() if not torch.equal(after[key], tensor)]
            assert not unequal, f"{source} → {name}: {unequal[:3]}"
            assert read_state(path)["optimizer_step"] == count


CHAIN: dict[str, tuple[int, dict[str, Any]]] = {
    "1 rank (ZeRO 3, fp32)": (1, {"zero_stage": 3}),
    "2 ranks (ZeRO 1, fp32)": (2, {"zero_stage": 1}),
    "2 ranks (TP 2, ZeRO 1, fp32)": (2, {**TENSOR, "zero_stage": 1}),
    "2 ranks (ZeRO 2, fp32)": (2, {"zero_stage": 2}),
    "2 ranks (PP 2, ZeRO 0, fp32)": (2, {**PIPELINE, "zero_stage": 0}),
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
    damage: Callable[[Path], None], file: str, reason: str, run: Path, flags: Flags
) -> None:
    rows, wanted = training_rows(run), tensors(newest(run))
    damage(run / "iter_0000003" / file)
    said = start_ranks(flags(save=run, load=run, train_iters=3)).check().stdout[0]
    (line,) = [line for line in said.splitlines() if line.startswith("skipped")]
    assert "iter_0000003" in line and reason in line and file in line
    assert f"resumed from {run} at step 2" in said
    assert training_rows(run) == rows
    again = tensors(newest(run))
    assert all(torch.equal(again[name], tensor) for name, tensor in wanted.items())


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


def test_resuming_reads_the_state_it_says(run: Path, flags: Flags) -> None:
    """The optimizer's count of steps is its own: bias correction depends on it."""
    write_state(newest(run), read_state(newest(run)) | {"optimizer_step": 5})
    start_ranks(flags(save=run, load=run, train_iters=4)).check()
    assert read_state(newest(run))["optimizer_step"] == 6


RECIPE_STEPS = 6
MUON: dict[str, Any] = {"objective": "mlm", "optimizer": "muon", "zero_stage": 0}
RECIPE = MUON | {
    **{"position_encoding": "rope", "rope_theta": 1000.0, "seq_length_phases": "16:0.5:100"},
    **{"mask_prob": "0.4:0.2", "train_iters": RECIPE_STEPS},
}
STABLE = MUON | {"lr_warmup_iters": 1, "lr_warmup_fraction": None}
DECAY = {
    **{"lr_decay_style": "wsd", "lr_wsd_decay_iters": 3, "lr_wsd_decay_style": "minus_sqrt"},
    "train_iters": SAVED + 3,
}


@pytest.fixture(scope="module")
def runs(flags: Flags, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Rows]]:
    """The folder of checkpoints, and the rows of each run on one rank."""
    folder = tmp_path_factory.mktemp("recipes")
    stable, branch_point = folder / "stable", folder / "stable" / f"iter_{SAVED:07d}"
    commands = {
        "whole": flags(**RECIPE),
        "first": flags(**RECIPE, exit_interval=SAVED, save=folder / "first"),
        "rest": flags(**RECIPE, load=folder / "first"),
        "short rows": flags(
            **RECIPE | {"seq_length_phases": None, "seq_length": 16, "rope_theta": 100.0},
            exit_interval=RECIPE_STEPS // 2,
            save=folder / "short",
        ),
        "longer rows": flags(**RECIPE, load=folder / "short" / f"iter_{RECIPE_STEPS // 2:07d}"),
        "in one go": flags(**RECIPE, micro_batch_size=8),
        "stable": flags(
            **{**STABLE, "lr_decay_style": "constant", "train_iters": 90}, exit_interval=SAVED, save=stable
        ),
        "branch": flags(**STABLE | DECAY, load=branch_point),
        "planned": flags(**STABLE | DECAY),
    }
    return folder, dict(zip(commands, train_runs(1, list(commands.values())), strict=True))


@pytest.mark.parametrize(
    ("first", "then", "whole", "stop", "same"),
    [
        ("first", "rest", "whole", SAVED, SAVED - 1),
        ("short rows", "longer rows", "whole", RECIPE_STEPS // 2, 1),
        ("stable", "branch", "planned", SAVED, 1),
    ],
    ids=["across a phase", "longer rows after a checkpoint", "a branch off a checkpoint"],
)
def test_what_goes_on_is_the_run_planned_so(
    first: str, then: str, whole: str, stop: int, same: int, runs: tuple[Path, dict[str, Rows]]
) -> None:
    rows = runs[1]
    assert rows[first][:same] == rows[whole][:same]
    assert rows[then] == rows[whole][stop:]


def test_deepspeed_steps_both_optimizers(runs: tuple[Path, dict[str, Rows]]) -> None:
    stored = StoredTensors(runs[0] / "first" / f"iter_{SAVED:07d}", "optimizer")
    kinds = Counter(name.partition("/")[0] for name in stored.names)
    assert kinds["momentum_buffer"] == 12 and kinds["exp_avg"] == kinds["exp_avg_sq"] > 12
    assert all(stored[name].abs().max() > 0 for name in stored.names if "embedding" in name or "momentum" in name)


def test_accumulated_gradients_take_the_same_steps(runs: tuple[Path, dict[str, Rows]]) -> None:
    found = largest_differences(runs[1]["in one go"], runs[1]["whole"])
    assert max(found.values()) <= 2e-5, found


def test_other_layouts_go_on_alike(runs: tuple[Path, dict[str, Rows]], flags: Flags) -> None:
    folder, rows = runs
    layouts = ({}, TENSOR, PIPELINE)
    resumed = train_runs(2, [flags(**RECIPE, **layout, load=folder / "first") for layout in layouts])
    for layout, got in zip(layouts, resumed, strict=True):
        found = largest_differences(got, rows["whole"][SAVED:])
        assert max(found.values()) <= 2e-5, (layout, found)


NOTES = {"notes": True, "notes_min_count": 4, "notes_max_count": 30, "notes_window": 5, "zero_stage": 1}
COURSE = {**NOTES, "train_iters": 10, "global_batch_size": 16, "generator_size": 0.5}
TENSOR_2 = TENSOR | {"micro_batch_size": 8}
NOTES_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "data 2": (2, {}),
    "tensor 2": (2, TENSOR_2),
    "tensor 2 with sequence": (2, {**TENSOR_2, "sequence_parallel": True, "packing": True}),
    "pipeline 2": (2, PIPELINE),
    "data 4": (4, {"packing": True}),
    "tensor 2 x pipeline 2": (4, TENSOR | PIPELINE),
}


def dictionary(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    return read_notes(newest(folder))[1:]


@pytest.fixture(scope="module")
def one_process(flags: Flags, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for objective in ("mth", "electra"):
        folders[objective] = tmp_path_factory.mktemp(objective)
        start_ranks(flags(**COURSE, objective=objective, save=folders[objective])).check()
    return folders


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTES_LAYOUTS)
@pytest.mark.parametrize("objective", ["mth", "electra"])
def test_notes_and_electra_in_every_layout_follow_one_process(
    objective: str, name: str, one_process: dict[str, Path], flags: Flags, tmp_path: Path
) -> None:
    world_size, changes = NOTES_LAYOUTS[name]
    start_ranks(flags(**COURSE, objective=objective, save=tmp_path, **changes), world_size=world_size).check()
    rows, reference = training_rows(tmp_path), training_rows(one_process[objective])
    assert len(rows) == 10 and ("rtd_loss" in rows[0]) == (objective == "electra")
    for row, expected in zip(rows, reference, strict=True):
        assert row == {key: pytest.approx(value, rel=1e-5, abs=1e-5) for key, value in expected.items()}
    words, notes = dictionary(tmp_path)
    expected_words, expected_notes = dictionary(one_process[objective])
    assert len(words) > 50 and torch.equal(words, expected_words)
    torch.testing.assert_close(notes, expected_notes, rtol=1e-5, atol=1e-5)


def test_notes_act_and_lambda_0_is_plain_training(one_process: dict[str, Path], flags: Flags, tmp_path: Path) -> None:
    plain = {"train_iters": 10, "global_batch_size": 16, "zero_stage": 1}
    start_ranks(flags(**plain, save=tmp_path / "plain")).check()
    start_ranks(flags(**COURSE, notes_mix=0.0, save=tmp_path / "zero")).check()
    expected = training_rows(tmp_path / "plain")
    assert training_rows(tmp_path / "zero") == expected
    assert len(dictionary(tmp_path / "zero")[0]) > 50
    assert training_rows(one_process["mth"])[0] == expected[0], "there is nothing to read in the first step"
    assert training_rows(one_process["mth"])[-1]["lm_loss"] != expected[-1]["lm_loss"]


def test_a_resumed_run_has_its_notes_back(one_process: dict[str, Path], flags: Flags, tmp_path: Path) -> None:
    settings = {**COURSE, "save": tmp_path, "load": tmp_path}
    start_ranks(flags(**settings, exit_interval=5)).check()
    start_ranks(flags(**settings)).check()
    assert training_rows(tmp_path) == training_rows(one_process["mth"])
    for ours, theirs in zip(dictionary(tmp_path), dictionary(one_process["mth"]), strict=True):
        assert torch.equal(ours, theirs)


def test_notes_of_other_words_are_refused(one_process: dict[str, Path], flags: Flags) -> None:
    other = COURSE | {"notes_min_count": 5}
    result = start_ranks(flags(**other, save=one_process["mth"], load=one_process["mth"]))
    assert result.exit_codes == [1]
    assert "holds notes of" in result.stderr[0] and "--notes-min-count" in result.stderr[0]


def test_an_older_electra_goes_on_in_its_own_layout(flags: Flags, tmp_path: Path) -> None:
    """No flag says it: state.json lacks a key. A run from it, stopped and resumed, is the run never stopped."""
    start_ranks(
        flags(**COURSE, objective="electra", position_encoding="absolute", exit_interval=1, save=tmp_path / "now")
    ).check()
    config = load_config(tmp_path / "now").replace(objective={"generator_embeddings": "own"})
    torch.manual_seed(1)
    model = build_model(config.model, objective=config.objective)
    (tmp_path / "older").mkdir()
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    path = save_weights_only(weights, config, tmp_path / "older")
    state = read_state(path)
    del state["config"]["objective"]["generator_embeddings"]
    write_state(path, state)
    mark_latest(tmp_path / "older", path.name)
    settings = {**COURSE, "objective": "electra", "position_encoding": "absolute", "train_iters": 4}
    for name, load, changes in (
        ("whole", "older", {}),
        ("part", "older", {"exit_interval": 2}),
        ("part", "part", TENSOR | {"sequence_parallel": True, "checkpoint_activations": True}),
    ):
        size = changes.get("tensor_model_parallel_size", 1)
        folders = {"load": tmp_path / load, "save": tmp_path / name}
        start_ranks(flags(**settings | changes, **folders), world_size=size).check()
    rows, expected = training_rows(tmp_path / "part"), training_rows(tmp_path / "whole")
    assert len(rows) == 4 and rows[:2] == expected[:2]
    for row, other in zip(rows, expected, strict=True):
        assert row == {key: pytest.approx(value, rel=1e-5, abs=1e-5) for key, value in other.items()}
    _, _, resumed = load_model(tmp_path / "part")
    assert resumed.objective.generator_embeddings == "own"
