"""`megatron-ddrp plan`: order of shapes, batch, fit into memory, and the commands that it prints."""

from __future__ import annotations

import dataclasses
import itertools
import re
import shlex
from typing import Any

import pytest

from megatron_ddrp.arguments import parse_arguments
from megatron_ddrp.commands import planning as speed
from megatron_ddrp.commands.options import (
    EPOCHS,
    SHAPES,
    Plan,
    Shape,
    best_shape,
    recipe,
    recipe_for_text,
    rows_per_rank,
    training_command,
)
from megatron_ddrp.commands.plan import main
from megatron_ddrp.commands.planning import FULL, PresentDevice
from megatron_ddrp.config.run import config_of
from megatron_ddrp.engine.layout import Setup
from megatron_ddrp.errors import UserError
from megatron_ddrp.memory import estimated_needs
from megatron_ddrp.run.devices import DEVICES, why_not, with_chosen_backend


def planned(capsys: pytest.CaptureFixture[str], line: str) -> tuple[Plan, str]:
    """The plan for a command line, and what it prints."""
    plan = main(line.split())
    return plan, capsys.readouterr().out


def test_more_text_suggests_no_smaller_shape_and_a_tie_the_smaller_one() -> None:
    sizes = [recipe_for_text(tokens)["hidden_size"] for tokens in map(int, (1e5, 1e6, 17e6, 50e6, 200e6, 1e9))]
    assert sizes == sorted(sizes) and sizes[2:5] == [384, 512, 768]
    many = dict.fromkeys(SHAPES, 40 * 50e6)
    assert best_shape(many, 50e6) == Shape(8, 512, 8), "12 x 768 is better by less than a tie"
    assert best_shape(dict.fromkeys(SHAPES, 40 * 4000000000.0), 4e9) == SHAPES[-1]


def test_repeated_tokens_are_worth_less_than_new_ones() -> None:
    """With few steps for the larger shape it loses, however many epochs the smaller one takes beyond the first few."""
    small, large = SHAPES[1], SHAPES[4]
    assert best_shape({small: 1e9, large: 1e7}, 50e6) == small
    assert best_shape({small: 4e9, large: 1e9}, 50e6) == large


@pytest.mark.parametrize(
    ("seen", "ranks", "rows"), [(1e6, 1, 16), (1e9, 1, 256), (1e12, 1, 4096), (1e12, 8, 512), (1e6, 64, 1)]
)
def test_the_batch_is_a_power_of_two_that_makes_many_steps(seen: float, ranks: int, rows: int) -> None:
    assert rows_per_rank(seen, 128, ranks) == rows


@pytest.mark.parametrize(("width", "rate"), [(128, 1e-3), (512, 1e-3), (768, 5e-4), (1024, 5e-4)])
def test_wide_models_get_half_the_rate(width: int, rate: float) -> None:
    assert recipe(Shape(2, width, 2), 1e6, 128, 16, 16)["lr"] == rate


def test_the_largest_micro_batch_fits_and_the_next_one_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    plan, _ = planned(capsys, "--tokens 50M --vocab-size 32000 --device rtx-3060 --max-layers 4")
    for row in plan.rows:
        words = shlex.split(f"--num-layers {row['num_layers']} --hidden-size {row['hidden_size']} --bf16")
        words += shlex.split(f"--num-attention-heads {row['num_attention_heads']} --seq-length 128 --dry-run")
        words += ["--vocab-size", "32000", "--attention-backend", "triton", "--layernorm-position", "pre"]

        def needs(rows: int, words: list[str] = words) -> float:
            batch = ["--micro-batch-size", str(rows), "--global-batch-size", str(rows)]
            return estimated_needs(Setup.planned(parse_arguments([*words, *batch]).config, 1, "cuda"))[1].total / 2**30

        assert needs(row["largest_micro_batch"]) <= FULL * 12 < needs(2 * row["largest_micro_batch"])
        assert needs(row["micro_batch_size"]) == pytest.approx(row["memory_gib"])


@pytest.mark.parametrize("device", ["rtx-3060", "t4"])
def test_the_printed_commands_are_pretrains_and_end_in_time(capsys: pytest.CaptureFixture[str], device: str) -> None:
    plan, text = planned(capsys, f"--tokens 50M --vocab-size 32000 --device {device} --hours 3 --max-layers 6")
    command = shlex.split(text.splitlines()[-1])
    config = parse_arguments(command[2:]).config
    assert command[:2] == ["megatron-ddrp", "pretrain"] and why_not(config, DEVICES[device]) is None
    assert config.training.precision == ("bf16" if DEVICES[device].is_recent else "fp16")
    assert config.training.train_iters == plan.settings["train_iters"]
    trial = re.search(r"for lr in (\S+) (\S+) (\S+); do (.*); done", text)
    assert trial and [float(trial[n]) for n in (1, 2, 3)] == [config.optimizer.lr * f for f in (0.5, 1, 2)]
    assert parse_arguments(shlex.split(trial[4].replace("$lr", "1e-3"))[2:]).config.training.train_iters >= 200
    assert all(0 < row["seconds"] <= 3 * 3600 and row["epochs"] <= EPOCHS for row in plan.rows)
    assert all(row["seconds"] > 2.9 * 3600 or row["epochs"] > EPOCHS - 1 for row in plan.rows)
    assert "loss" not in text.replace("lowest validation loss", "")
    assert "0.000 s" not in text and not re.search(r"\b0s|\b0 hours|unknown", text)


def test_ranks_share_the_batch_and_the_launcher_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    one, eight, many = (
        planned(capsys, f"--tokens 2B --device a100 --world-size {ranks} --hours 1 --max-layers 4")
        for ranks in (1, 8, 16)
    )
    assert eight[1].splitlines()[-1].split()[:5] == ["deepspeed", "--num_gpus", "8", "--module", "megatron_ddrp"]
    assert many[1].splitlines()[-1].split()[:3] == ["deepspeed", "--hostfile", "hosts"]
    small = [plan.rows[1] for plan, _ in (one, eight)]
    assert small[1]["epochs"] > 4 * small[0]["epochs"]


def test_shapes_that_do_not_fit_are_counted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DEVICES, "l4", dataclasses.replace(DEVICES["l4"], memory=1.0))
    plan, text = planned(capsys, "--tokens 50M --device l4")
    assert [row["hidden_size"] for row in plan.rows] == [128, 256, 384, 512][: len(plan.rows)]
    assert f"{5 - len(plan.rows)} larger shapes do not fit" in text


@pytest.mark.parametrize(("share", "fits"), [(FULL - 0.01, True), (FULL + 0.01, False)])
def test_a_shape_leaves_a_part_of_the_memory_free(
    share: float, fits: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`share` of the memory is what one row per micro-batch of the second shape needs."""
    line = "--tokens 50M --vocab-size 32000 --device l4 --max-layers 4"
    row = planned(capsys, line)[0].rows[1]
    config = config_of(recipe(SHAPES[1], 1, 128, row["global_batch_size"], 1) | {"bf16": True}).with_vocabulary(32000)
    needed = estimated_needs(Setup.planned(with_chosen_backend(config, DEVICES["l4"]), 1, "cuda"))[1].total / 2**30
    monkeypatch.setitem(DEVICES, "l4", dataclasses.replace(DEVICES["l4"], memory=needed / share))
    assert len(planned(capsys, line)[0].rows) == 1 + fits


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--device l4", "--tokens"),
        ("--tokens many --device l4", "a number such as 50M"),
        ("--tokens 2,5M --device l4", "a number such as 50M"),
        ("--tokens 0 --device l4", "--tokens is 0.0"),
        ("--tokens 50M --device rtx-306", "rtx-3060"),
        ("--tokens 50M --world-size 2", "--world-size needs --device"),
        ("--tokens 50M --device l4 --hours 0", "--hours is 0"),
    ],
)
def test_a_mistake_is_one_line(line: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)) as error:
        main(line.split())
    assert error.value.exit_code == 2


def test_too_little_time_is_an_error_that_says_so() -> None:
    with pytest.raises(UserError, match="200 steps on T4 in 1e-05 hours.*more --hours"):
        main(["--tokens", "50M", "--device", "t4", "--hours", "0.00001"])


def test_what_is_here_is_measured_and_the_rest_has_its_speed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One real measurement of a tiny shape; a larger one would take longer than the patience."""
    tiny, small = Shape(1, 16, 2), Shape(2, 32, 2)
    monkeypatch.setattr("megatron_ddrp.commands.planning.SHAPES", (tiny, small))
    monkeypatch.setattr(speed, "PATIENCE", 0.0)
    monkeypatch.setattr(speed, "DOCUMENTS", 20)
    plan, text = planned(capsys, "--tokens 5M --vocab-size 200 --hours 1 --seq-length 16")
    assert [row["measured"] for row in plan.rows] == [True, False]
    assert "measured here, three steps per shape; ~: at the last measured shape's FLOP/s" in text
    assert all(row["step_seconds"] > 0 for row in plan.rows)


def test_the_median_of_the_steps_after_the_first_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.accumulate((5.0, 1.0, 9.0, 2.0))

    def run(config: Any, callbacks: Any) -> Any:
        for _ in range(config.training.train_iters):
            callbacks[0].on_step({})
        return type("Trained", (), {"code": 0})

    monkeypatch.setattr(speed, "train", run)
    monkeypatch.setattr(PresentDevice, "_random_text", "nowhere")
    device = PresentDevice(200, lambda: next(ticks))
    config = parse_arguments(["--seq-length", "16", "--global-batch-size", "4", "--dry-run"]).config
    assert device.fastest(config, 1) == (1, 4 * 2.0, True)


def test_the_command_behind_a_dataset_fits_its_tokens(tiny_corpus: Any) -> None:
    words = shlex.split(training_command(str(tiny_corpus.prefix), 17_000_000))
    config = parse_arguments(words[2:]).config
    assert (config.model.num_layers, config.model.hidden_size) == (6, 384)
    assert config.data.packing and config.model.layernorm_position == "pre"
    tokens = config.training.train_iters * config.training.global_batch_size * 128
    assert tokens == pytest.approx(EPOCHS * 17e6, rel=0.01)
    assert recipe(SHAPES[0], 10, 128, 16, 16)["train_iters"] == 1
