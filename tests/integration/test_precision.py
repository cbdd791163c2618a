"""Half precision follows fp32, which learns, and loss scaling works; what offloading keeps, what engines hold in
memory beside the dry run's bytes, and where a step waits for the device.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import torch

from megatron_ddrp.arguments import parse_arguments
from megatron_ddrp.checkpoint import load_model, newest, read_state
from megatron_ddrp.config import Config
from megatron_ddrp.data.tokenizers.tokenizer import build_tokenizer
from megatron_ddrp.engine.layout import Setup, mark_invalid
from megatron_ddrp.memory import Memory, by_zero_stage
from megatron_ddrp.model import on_meta_device
from tests.integration.conftest import Flags, Train
from tests.integration.inside_engines import Waits, allow_fp16_on_the_cpu, held_in_second_step, scaling, waits_of_step
from tests.integration.launch import json_file, steps_of, training_rows
from tests.integration.training_runs import of_each_run, tensors, train_runs
from tests.refusals import refused

STEPS = 20


def losses(rows: list[dict[str, Any]]) -> list[float]:
    return [row["lm_loss"] for row in rows if "lm_loss" in row]


@pytest.fixture(scope="module")
def full_precision(train: Train) -> list[float]:
    """Masked-LM losses of `STEPS` steps in fp32; they fall by more than half a nat."""
    rows = losses(train(train_iters=STEPS, lr=1e-2).rows)
    assert rows[-1] < rows[0] - 0.5
    return rows


@pytest.fixture
def fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    allow_fp16_on_the_cpu(monkeypatch.setattr)


@pytest.mark.parametrize("zero_stage", range(4))
def test_bf16_falls_near_fp32_and_resumes_exactly(
    zero_stage: int, full_precision: list[float], train: Train, tmp_path: Path
) -> None:
    run = {"train_iters": STEPS, "lr": 1e-2, "zero_stage": zero_stage, "bf16": True, "save": tmp_path / "whole"}
    rows = losses(train(**run).rows)
    assert rows != full_precision
    assert rows == pytest.approx(full_precision, abs=0.1)
    model, _, config = load_model(tmp_path / "whole")
    assert config.training.bf16
    weights = model.embeddings.token.weight
    assert not weights.equal(weights.bfloat16().float()), "the checkpoint holds rounded weights, not the master's"
    if zero_stage < 3:
        parts = {"train_iters": 6, "bf16": True, "hidden_dropout": 0.1, "zero_stage": zero_stage}
        assert_resumes_exactly(train, tmp_path / "parts", 3, **parts)


def assert_resumes_exactly(train: Train, folder: Path, stop: int, **run: Any) -> list[dict[str, Any]]:
    """The rows of a run that stopped and went on are those of the run never stopped, which are returned."""
    train(**run, save=folder / "whole")
    for _ in range(2):
        train(**run, save=folder / "parts", load=folder / "parts", exit_interval=stop)
    whole = training_rows(folder / "whole")
    assert training_rows(folder / "parts") == whole
    return whole


def test_fp16_survives_a_scale_far_too_high_and_resumes_with_it(fp16: None, train: Train, tmp_path: Path) -> None:
    """Steps that overflow are skipped and halve the scale; the rows stay JSON. Steps 1 to 8 halve the scale; a run that
    began again with the first one would skip steps again."""
    scale = scaling(tmp_path / "scale.json", initial_scale_power=24, hysteresis=1)
    run = {"fp16": True, "deepspeed_config": scale}
    train(**run, train_iters=30, lr=1e-2, save=tmp_path)
    for line in (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        json.loads(line, parse_constant=pytest.fail)
    rows = training_rows(tmp_path)
    assert rows[0]["grad_norm"] is None and rows[-1]["grad_norm"] > 0
    assert rows[-1]["lm_loss"] < rows[0]["lm_loss"] - 0.3
    assert_resumes_exactly(train, tmp_path / "resumed", 8, **run, train_iters=12)


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_a_loss_scale_that_grows_halves_no_gradient(zero_stage: int, fp16: None, train: Train, tmp_path: Path) -> None:
    """At rate 0 gradients do not depend on the scale, which doubles in two of the steps of one of the runs."""
    kept, scales = [], []
    for window, interval in ((2, None), (2, 2), (1000, None)):
        scale = scaling(tmp_path / f"{window}.json", initial_scale_power=8, loss_scale_window=window)
        run = {"fp16": True, "zero_stage": zero_stage, "lr": 0.0, "train_iters": 5, "clip_grad": 0.0}
        folder = tmp_path / f"{window} {interval}"
        rows = train(**run, deepspeed_config=scale, save=folder, replay_interval=interval).rows
        moments = tensors(newest(folder))["exp_avg/layers.0.attention.query.weight"]
        kept.append(([row["grad_norm"] for row in rows], moments))
        scales.append(read_state(newest(folder))["loss_scaler"]["cur_scale"])
    assert scales == [1024, 1024, 256]  # replays let it grow
    del kept[1]
    assert kept[0][0] == pytest.approx(kept[1][0], rel=0.02)
    torch.testing.assert_close(kept[0][1], kept[1][1], rtol=0.02, atol=1e-6)


def test_an_overflow_at_the_smallest_loss_scale_counts_as_not_finite(fp16: None, train: Train, tmp_path: Path) -> None:
    scale = scaling(tmp_path / "scale.json", initial_scale_power=1, hysteresis=1)
    run = {"fp16": True, "deepspeed_config": scale, "objective": "mth", "tcd_weight": 1e9, "max_skipped_steps": 2}
    refused("2 steps in a row .*resume from the last checkpoint", train, **run, train_iters=6, save=tmp_path / "run")


@pytest.mark.parametrize(
    ("stage", "what", "settings"),
    [
        (1, ["offload_optimizer"], {"bf16": True}),
        (2, ["offload_optimizer"], {}),
        (3, ["offload_optimizer", "offload_param"], {}),
        pytest.param(3, ["offload_optimizer"], {"bf16": True}, marks=pytest.mark.slow),
    ],
)
def test_offload_changes_no_loss_and_resumes_exactly(
    stage: int, what: list[str], settings: dict[str, Any], train: Train, tmp_path: Path
) -> None:
    common = {"train_iters": 4, "hidden_dropout": 0.1, "zero_stage": stage, **settings}
    plain = steps_of(train(save=tmp_path / "plain", **common).rows)
    offload = {"zero_optimization": {name: {"device": "cpu"} for name in what}}
    common["deepspeed_config"] = json_file(tmp_path / "offload.json", offload)
    whole = assert_resumes_exactly(train, tmp_path, 2, **common)
    ours, theirs = ([row[name] for row in rows for name in ("loss", "grad_norm")] for rows in (whole, plain))
    assert ours == pytest.approx(theirs, rel=1e-6)
    expected, resumed, held = (tensors(tmp_path / name / "iter_0000004") for name in ("whole", "parts", "plain"))
    assert all(torch.equal(resumed[name], tensor) for name, tensor in expected.items())
    assert all(torch.allclose(held[name], tensor, atol=1e-5) for name, tensor in expected.items())


LARGER = {"num_layers": 3, "hidden_size": 128, "ffn_hidden_size": 1024, "micro_batch_size": 2, "train_iters": 2}
"""1.1 million parameters, few of them padding; the feed-forward weights are large enough for ZeRO 3 to cut."""

BUFFERS = {"reduce_bucket_size": 200_000, "stage3_prefetch_bucket_size": 200_000}
"""Elements; as many as the model has itself, so that they do not hide the rest."""

MEMORY_LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor 2": {"zero_stage": 1, "tensor_model_parallel_size": 2, "bf16": True},
    "pipeline 2": {"zero_stage": 1, "pipeline_model_parallel_size": 2},
    **{f"ZeRO {n}, {kind}": {"zero_stage": n, "bf16": kind == "bf16"} for n in range(4) for kind in ("fp32", "bf16")},
}
"""Of two ranks; ZeRO 3, which changes torch for good, comes last."""


def estimates(config: Config, world_size: int) -> list[Memory]:
    """Of each rank."""
    tokenizer = build_tokenizer("BertWordPieceLowerCase", config.data.vocab_file, None)
    config = config.replace(model={"vocab_size": tokenizer.vocab_size})
    model = on_meta_device(config.model, config.objective)
    ranks = by_zero_stage(model, Setup.planned(config, world_size, "cpu"))[config.parallel.zero_stage]
    return [memory for memory in ranks for _ in range(config.parallel.tensor_model_parallel_size)]


@pytest.mark.slow
def test_estimates_are_within_a_tenth_of_what_engines_hold(flags: Flags, tmp_path: Path) -> None:
    given = LARGER | {"deepspeed_config": json_file(tmp_path / "ds.json", {"zero_optimization": BUFFERS})}
    command_lines = [flags(**given | layout) for layout in MEMORY_LAYOUTS.values()]
    held_by_ranks = of_each_run(2, command_lines, held_in_second_step)
    for name, words, ranks in zip(MEMORY_LAYOUTS, command_lines, held_by_ranks, strict=True):
        expected = estimates(parse_arguments(words).config, 2)
        for rank, (held, memory) in enumerate(zip(ranks, expected, strict=True)):
            for kind in ("weights", "gradients", "optimizer"):
                assert asdict(memory)[kind] == pytest.approx(held[kind], rel=0.1), (name, rank, kind)
            kept = memory.weights + memory.gradients + memory.optimizer
            assert 0.9 * kept < held["all"] < 1.1 * (kept + memory.buffers), (name, rank)


MICRO_BATCHES = 4
RUN = {"objective": "mth", "position_encoding": "ddrp", "seq_length": 16, "hidden_size": 16, "micro_batch_size": 1}
RUN |= {"attention_backend": "sdpa"}
BF16 = RUN | {"bf16": True}
TIMED = {"timers": {"throughput": {"enabled": True}}}
CHECKED = {"bf16": {"check_grad_overflow": True}}

OF_REDUCTION, OF_TIMER = "synchronize stage_1_and_2.py", "synchronize timer.py"
OF_CHECKS = {"read stage_1_and_2.py": 1, "read utils.py": 3}
OFFLOADED = dict.fromkeys((OF_REDUCTION, *OF_CHECKS), ANY)  # by DeepSpeed alone
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any] | None, Waits]] = {
    "fp32, ZeRO 0": (1, RUN | {"zero_stage": 0}, None, {}),
    "bf16, ZeRO 0": (1, BF16 | {"zero_stage": 0}, None, {}),
    "muon, ZeRO 0": (1, RUN | {"zero_stage": 0, "optimizer": "muon"}, None, {}),
    "bf16, ZeRO 1": (1, BF16 | {"zero_stage": 1}, None, {}),
    "bf16, ZeRO 2": (1, BF16 | {"zero_stage": 2}, None, {}),
    "bf16, ZeRO 1, offloaded": (1, BF16 | {"zero_stage": 1, "offload_optimizer": "cpu"}, None, OFFLOADED),
    "bf16, ZeRO 1, the user's timer": (1, BF16 | {"zero_stage": 1}, TIMED, {OF_TIMER: 2 * MICRO_BATCHES}),
    "bf16, ZeRO 1, the user's check": (1, BF16 | {"zero_stage": 1}, CHECKED, OF_CHECKS),
    "fp16, ZeRO 1": (1, RUN | {"fp16": True, "zero_stage": 1}, None, OF_CHECKS),
    "bf16, ZeRO 1, two ranks": (2, BF16 | {"zero_stage": 1}, None, {}),
    "bf16, ZeRO 1, no graphs": (2, BF16 | {"zero_stage": 1, "cuda_graphs": "off"}, None, {OF_REDUCTION: 1}),
    "bf16, ZeRO 2, two ranks": (2, BF16 | {"zero_stage": 2}, None, {OF_REDUCTION: MICRO_BATCHES}),
}
"""Ranks, flags, file of `--deepspeed_config`, and the waits of one step of `MICRO_BATCHES` micro-batches."""


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_waits_of_a_step(world_size: int, flags: Flags, tmp_path: Path) -> None:
    cases = {name: case for name, case in CASES.items() if case[0] == world_size}
    command_lines = []
    for number, (_, settings, from_file, _) in enumerate(cases.values()):
        file = json_file(tmp_path / f"{number}.json", from_file) if from_file else None
        command_lines.append(flags(**settings, global_batch_size=MICRO_BATCHES * world_size, deepspeed_config=file))
    waits = [of_ranks[0] for of_ranks in of_each_run(world_size, command_lines, waits_of_step)]
    assert dict(zip(cases, waits, strict=True)) == {name: case[3] for name, case in cases.items()}


@pytest.mark.slow
def test_clipping_on_the_device_is_deepspeeds_to_the_last_bit(flags: Flags, tmp_path: Path) -> None:
    checked = json_file(tmp_path / "checked.json", CHECKED)
    cases = [{"zero_stage": stage, "clip_grad": clip} for stage in (1, 2) for clip in (0.0, 0.5)]
    runs = [BF16 | case | {"global_batch_size": 4, "train_iters": 6} for case in cases]
    rows = train_runs(2, [flags(**run, deepspeed_config=file) for run in runs for file in (None, checked)])
    for case, ours, deepspeeds in zip(cases, rows[::2], rows[1::2], strict=True):
        assert ours == deepspeeds and min(row["grad_norm"] for row in ours) > 0.5, case


@pytest.mark.parametrize("number", [2.5, float("inf"), float("-inf"), float("nan")])
def test_an_invalid_norm_is_marked_as_deepspeed_marks_it(number: float) -> None:
    from deepspeed.runtime.utils import mask_nan_or_inf_with_val_inplace

    ours, theirs = torch.tensor(number), torch.tensor(number)
    mark_invalid(ours)
    mask_nan_or_inf_with_val_inplace(theirs)
    assert ours.item() == theirs.item() == (number if number == 2.5 else -1.0)
