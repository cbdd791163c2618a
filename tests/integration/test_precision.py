"""Half precision follows fp32, loss scaling works, and the whole learns; what offloading keeps, what engines hold in
memory beside the dry run's bytes, and where a step waits for the device.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ddrp.arguments import parse_arguments
from megatron_ddrp.checkpoint import load_model
from megatron_ddrp.config import Config
from megatron_ddrp.data.preprocess.pipeline import preprocess
from megatron_ddrp.data.tokenizers.tokenizer import build_tokenizer
from megatron_ddrp.engine.layout import Setup, mark_invalid
from megatron_ddrp.memory import Memory, by_zero_stage
from megatron_ddrp.model import on_meta_device
from tests.conftest import TinyCorpus
from tests.datasets import wordpiece_job
from tests.integration.conftest import Flags
from tests.integration.inside_engines import Waits, allow_fp16_on_the_cpu, held_by, scaling, waits_of
from tests.integration.launch import start_ranks, training_rows
from tests.integration.test_faults import poisoned
from tests.integration.test_layout_changes import tensors
from tests.integration.training_runs import train_runs

STEPS = 20


def losses(folder: Path) -> list[float]:
    return [row["lm_loss"] for row in training_rows(folder)]


@pytest.fixture(scope="module")
def full_precision(flags: Flags, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Masked-LM losses of `STEPS` steps in fp32; they fall by more than half a nat."""
    folder = tmp_path_factory.mktemp("fp32")
    start_ranks(flags(train_iters=STEPS, lr=1e-2, save=folder)).check()
    rows = losses(folder)
    assert rows[-1] < rows[0] - 0.5
    return rows


@pytest.mark.parametrize(
    ("zero_stage", "ranks"), [*((stage, 1) for stage in range(4)), pytest.param(2, 2, marks=pytest.mark.slow)]
)
def test_bf16_falls_near_fp32(
    zero_stage: int, ranks: int, full_precision: list[float], flags: Flags, tmp_path: Path
) -> None:
    start_ranks(flags(train_iters=STEPS, lr=1e-2, zero_stage=zero_stage, bf16=True, save=tmp_path), ranks).check()
    rows = losses(tmp_path)
    assert rows != full_precision
    assert rows == pytest.approx(full_precision, abs=0.1)
    model, _, config = load_model(tmp_path)
    assert config.training.bf16
    weights = model.embeddings.token.weight
    assert not weights.equal(weights.bfloat16().float()), "the checkpoint holds rounded weights, not the master's"


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_bf16_resumes_exactly(zero_stage: int, flags: Flags, tmp_path: Path) -> None:
    settings = {"train_iters": 6, "bf16": True, "hidden_dropout": 0.1, "zero_stage": zero_stage}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    start_ranks(flags(save=whole, load=whole, **settings)).check()
    for _ in range(2):
        start_ranks(flags(save=parts, load=parts, exit_interval=3, **settings)).check()
    assert training_rows(parts) == training_rows(whole)


@pytest.mark.parametrize("zero_stage", [1, 2])
def test_fp16_falls_near_fp32(zero_stage: int, full_precision: list[float], flags: Flags, tmp_path: Path) -> None:
    settings = scaling(tmp_path / "scale.json", initial_scale_power=8)
    arguments = {"train_iters": STEPS, "lr": 1e-2, "zero_stage": zero_stage, "deepspeed_config": settings}
    start_ranks(flags(**arguments, fp16=True, save=tmp_path / "run"), before=allow_fp16_on_the_cpu).check()
    assert losses(tmp_path / "run") == pytest.approx(full_precision, abs=0.1)


def test_fp16_survives_a_scale_far_too_high(flags: Flags, tmp_path: Path) -> None:
    """Steps that overflow are skipped and halve the scale; the rows stay JSON."""
    settings = scaling(tmp_path / "scale.json", initial_scale_power=24, hysteresis=1)
    arguments = flags(train_iters=30, lr=1e-2, fp16=True, deepspeed_config=settings, save=tmp_path / "run")
    start_ranks(arguments, before=allow_fp16_on_the_cpu).check()
    for line in (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        json.loads(line, parse_constant=pytest.fail)
    norms = [row["grad_norm"] for row in training_rows(tmp_path / "run")]
    assert norms[0] is None and norms[-1] > 0
    rows = losses(tmp_path / "run")
    assert rows[-1] < rows[0] - 0.3


def test_fp16_resumes_with_the_scale_of_its_checkpoint(flags: Flags, tmp_path: Path) -> None:
    """Steps 1 to 8 halve the scale; a run that began again with the first one would skip steps again."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    settings = scaling(tmp_path / "scale.json", initial_scale_power=24, hysteresis=1)
    arguments: dict[str, Any] = {"train_iters": 12, "fp16": True, "deepspeed_config": settings}
    start_ranks(flags(save=whole, **arguments), before=allow_fp16_on_the_cpu).check()
    for _ in range(2):
        start_ranks(flags(save=parts, load=parts, exit_interval=8, **arguments), before=allow_fp16_on_the_cpu).check()
    assert training_rows(parts) == training_rows(whole)


@pytest.mark.parametrize(("position_encoding", "highest"), [("absolute", 3.2), ("ddrp", 4.3)])
def test_a_small_corpus_is_learnt_by_heart(
    position_encoding: str, highest: float, tiny_corpus: TinyCorpus, flags: Flags, tmp_path: Path
) -> None:
    text = tmp_path / "few.jsonl"
    lines = tiny_corpus.text_file.read_text(encoding="utf-8").splitlines(keepends=True)
    text.write_text("".join(lines[:2]), encoding="utf-8")
    config = wordpiece_job(tiny_corpus.vocab_file, tmp_path / "few", text)
    changes = {"data_path": preprocess(config).prefixes[0], "split": "1,0,0", "train_iters": 100, "lr": 1e-2}
    changes |= {"position_encoding": position_encoding, "global_batch_size": 16, "micro_batch_size": 16}
    start_ranks(flags(**changes, save=tmp_path / "run")).check()
    rows = losses(tmp_path / "run")
    assert rows[0] > 6
    assert sum(rows[-10:]) / 10 < highest


DROPOUT_RUN = {"train_iters": 4, "hidden_dropout": 0.1}
LOSSES = ("loss", "grad_norm")


def offload(folder: Path, *what: str) -> Path:
    path = folder / "offload.json"
    path.write_text(json.dumps({"zero_optimization": {name: {"device": "cpu"} for name in what}}), encoding="utf-8")
    return path


def losses_and_norms(folder: Path) -> list[float]:
    return [row[name] for row in training_rows(folder) for name in LOSSES]


@pytest.mark.parametrize(
    ("stage", "what", "settings"),
    [
        (1, ["offload_optimizer"], {"bf16": True}),
        (2, ["offload_optimizer"], {}),
        (3, ["offload_optimizer", "offload_param"], {}),
        pytest.param(1, ["offload_optimizer"], {}, marks=pytest.mark.slow),
        pytest.param(2, ["offload_optimizer"], {"bf16": True}, marks=pytest.mark.slow),
        pytest.param(3, ["offload_optimizer"], {"bf16": True}, marks=pytest.mark.slow),
    ],
)
def test_offload_changes_no_loss_and_resumes_exactly(
    stage: int, what: list[str], settings: dict[str, Any], flags: Flags, tmp_path: Path
) -> None:
    plain, whole, parts = (tmp_path / name for name in ("plain", "whole", "parts"))
    common = {**DROPOUT_RUN, **settings, "zero_stage": stage}
    start_ranks(flags(save=plain, **common)).check()
    common["deepspeed_config"] = offload(tmp_path, *what)
    start_ranks(flags(save=whole, **common)).check()
    for _ in range(2):
        start_ranks(flags(save=parts, load=parts, exit_interval=2, **common)).check()
    assert losses_and_norms(whole) == pytest.approx(losses_and_norms(plain), rel=1e-6)
    assert training_rows(parts) == training_rows(whole)
    expected, resumed, held = (tensors(folder / "iter_0000004") for folder in (whole, parts, plain))
    assert all(torch.equal(resumed[name], tensor) for name, tensor in expected.items())
    assert all(torch.allclose(held[name], tensor, atol=1e-5) for name, tensor in expected.items())


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "bf16"), [(1, False), (2, False), (2, True), (3, False)])
def test_offload_on_two_ranks_skips_what_is_not_finite(stage: int, bf16: bool, flags: Flags, tmp_path: Path) -> None:
    common = {**DROPOUT_RUN, "zero_stage": stage, "save_interval": 1, "bf16": bf16}
    spoiled = poisoned((3,), "output")
    start_ranks(flags(save=tmp_path / "plain", **common), 2, before=spoiled).check()
    common["deepspeed_config"] = offload(tmp_path, "offload_optimizer")
    start_ranks(flags(save=tmp_path / "offload", **common), 2, before=spoiled).check()
    rows = [[row["loss"] for row in training_rows(tmp_path / name)] for name in ("plain", "offload")]
    assert rows[0][2] is rows[1][2] is None
    assert rows[1][:2] + rows[1][3:] == pytest.approx(rows[0][:2] + rows[0][3:], rel=1e-6)
    before, after = (tensors(tmp_path / "offload" / f"iter_000000{step}") for step in (2, 3))
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_a_checkpoint_resumes_with_and_without_offload(stage: int, flags: Flags, tmp_path: Path) -> None:
    common, file = {**DROPOUT_RUN, "zero_stage": stage}, offload(tmp_path, "offload_optimizer")
    start_ranks(flags(save=tmp_path / "plain", **common)).check()
    expected = losses_and_norms(tmp_path / "plain")
    for first, second in ((None, file), (file, None)):
        run = tmp_path / f"from {'plain' if first is None else 'offload'}"
        for deepspeed_config in (first, second):
            settings = {**common, "exit_interval": 2, "deepspeed_config": deepspeed_config}
            start_ranks(flags(save=run, load=run, **settings)).check()
        assert losses_and_norms(run) == pytest.approx(expected, rel=1e-6)


LARGER = {"num_layers": 3, "hidden_size": 128, "ffn_hidden_size": 1024, "micro_batch_size": 2, "train_iters": 2}
"""1.1 million parameters, few of them padding; the feed-forward weights are large enough for ZeRO 3 to cut."""

BUFFERS = {"reduce_bucket_size": 200_000, "stage3_prefetch_bucket_size": 200_000}
"""Elements; as many as the model has itself, so that they do not hide the rest."""

MEMORY_LAYOUTS: dict[str, dict[str, Any]] = {
    "ZeRO 0": {"zero_stage": 0},
    "ZeRO 1": {"zero_stage": 1},
    "ZeRO 2": {"zero_stage": 2},
    "ZeRO 0, bf16": {"zero_stage": 0, "bf16": True},
    "ZeRO 1, bf16": {"zero_stage": 1, "bf16": True},
    "ZeRO 2, bf16": {"zero_stage": 2, "bf16": True},
    "tensor 2": {"zero_stage": 1, "tensor_model_parallel_size": 2, "bf16": True},
    "pipeline 2": {"zero_stage": 1, "pipeline_model_parallel_size": 2},
    "ZeRO 3": {"zero_stage": 3},
    "ZeRO 3, bf16": {"zero_stage": 3, "bf16": True},
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
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": BUFFERS}))
    given = LARGER | {"deepspeed_config": tmp_path / "ds.json"}
    command_lines = [flags(**given | layout) for layout in MEMORY_LAYOUTS.values()]
    for name, words, ranks in zip(MEMORY_LAYOUTS, command_lines, held_by(2, command_lines), strict=True):
        expected = estimates(parse_arguments(words).config, 2)
        for rank, (held, memory) in enumerate(zip(ranks, expected, strict=True)):
            for kind in ("weights", "gradients", "optimizer"):
                assert asdict(memory)[kind] == pytest.approx(held[kind], rel=0.1), (name, rank, kind)
            kept = memory.weights + memory.gradients + memory.optimizer
            assert 0.9 * kept < held["all"] < 1.1 * (kept + memory.buffers), (name, rank)


MICRO_BATCHES = 4
RUN = {
    **{"objective": "mth", "position_encoding": "ddrp", "seq_length": 16},
    **{"hidden_size": 16, "attention_backend": "sdpa", "micro_batch_size": 1},
}
BF16 = RUN | {"bf16": True}
TIMED = {"timers": {"throughput": {"enabled": True}}}
CHECKED = {"bf16": {"check_grad_overflow": True}}

OF_REDUCTION, OF_TIMER = "synchronize stage_1_and_2.py", "synchronize timer.py"
OF_CHECKS = {"read stage_1_and_2.py": 1, "read utils.py": 3}
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any] | None, Waits]] = {
    "fp32, ZeRO 0": (1, RUN | {"zero_stage": 0}, None, {}),
    "bf16, ZeRO 0": (1, BF16 | {"zero_stage": 0}, None, {}),
    "muon, ZeRO 0": (1, RUN | {"zero_stage": 0, "optimizer": "muon"}, None, {}),
    "bf16, ZeRO 1": (1, BF16 | {"zero_stage": 1}, None, {}),
    "bf16, ZeRO 2": (1, BF16 | {"zero_stage": 2}, None, {}),
    "bf16, ZeRO 1, the user's timer": (1, BF16 | {"zero_stage": 1}, TIMED, {OF_TIMER: 2 * MICRO_BATCHES}),
    "bf16, ZeRO 1, the user's check": (1, BF16 | {"zero_stage": 1}, CHECKED, OF_CHECKS),
    "fp16, ZeRO 1": (1, RUN | {"fp16": True, "zero_stage": 1}, None, OF_CHECKS),
    "bf16, ZeRO 1, two ranks": (2, BF16 | {"zero_stage": 1}, None, {OF_REDUCTION: 1}),
    "bf16, ZeRO 2, two ranks": (2, BF16 | {"zero_stage": 2}, None, {OF_REDUCTION: MICRO_BATCHES}),
}
"""Ranks, flags, file of `--deepspeed_config`, and the waits of one step of `MICRO_BATCHES` micro-batches."""
OFFLOADED = BF16 | {"zero_stage": 1, "offload_optimizer": "cpu"}


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_waits_of_a_step(world_size: int, flags: Flags, tmp_path: Path) -> None:
    cases = {name: case for name, case in CASES.items() if case[0] == world_size}
    command_lines = []
    for number, (_, settings, from_file, _) in enumerate(cases.values()):
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps(from_file))
        batch = {"global_batch_size": MICRO_BATCHES * world_size}
        command_lines.append(flags(**settings | batch, deepspeed_config=path if from_file else None))
    waits = dict(zip(cases, waits_of(world_size, command_lines), strict=True))
    assert waits == {name: case[3] for name, case in cases.items()}


@pytest.mark.slow
def test_offloaded_state_is_waited_for_by_deepspeed_alone(flags: Flags) -> None:
    (waits,) = waits_of(1, [flags(**OFFLOADED, global_batch_size=MICRO_BATCHES)])
    assert waits.keys() == {OF_REDUCTION, *OF_CHECKS}


@pytest.mark.slow
def test_clipping_on_the_device_is_deepspeeds_to_the_last_bit(flags: Flags, tmp_path: Path) -> None:
    checked = tmp_path / "checked.json"
    checked.write_text(json.dumps(CHECKED))
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
