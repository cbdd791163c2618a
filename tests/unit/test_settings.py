"""Settings that change by step, such as masking rates and row lengths, and settings without effect, which are named."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ddrp.arguments import parse_arguments
from megatron_ddrp.checkpoint import read_config, write_state
from megatron_ddrp.commands.dry_run import hours_of
from megatron_ddrp.config import Config, changed_settings
from megatron_ddrp.config.run import changed_model
from megatron_ddrp.config.training import MaskRates, parse_phases, phase_at
from megatron_ddrp.engine.layout import Setup
from megatron_ddrp.parallel.process_group import Ranks
from megatron_ddrp.run.devices import DEVICES
from tests.refusals import refused

ROPE = {"position_encoding": "rope", "relative_distance": None, "seq_length": 64, "rope_theta": 160_000.0}


def test_a_rate_goes_from_its_start_by_equal_steps_and_one_stays_to_the_last_bit() -> None:
    rates = MaskRates.parse("0.3:0.15")
    assert [rates.at(done, 3) for done in range(4)] == pytest.approx([0.3, 0.25, 0.2, 0.15])
    assert rates.at(9, 3) == rates.end and rates.mean == pytest.approx(0.225)
    for rate in (0.15, 0.1 + 0.2):
        assert {MaskRates.parse(rate).at(done, 7) for done in range(8)} == {rate}
    before, after = Config().to_dict(), Config().replace(objective={"mask_prob": "0.3:0.15"})
    assert changed_settings(before, after) == ["--mask-prob: 0.15 → 0.3:0.15"]


@pytest.mark.parametrize("value, stored", [(0.4, 0.4), ("0.4", 0.4), ("0.3:0.15", "0.3:0.15"), ("0.20:.2", 0.2)])
def test_rates_are_stored_in_one_way(value: Any, stored: Any, tmp_path: Path) -> None:
    assert parse_arguments(["--mask-prob", str(value)]).config.objective.mask_prob == stored
    (tmp_path / "f.yaml").write_text(f"mask-prob: {value}\n")
    config = parse_arguments(["--config", str(tmp_path / "f.yaml")]).config
    assert config.objective.mask_prob == stored
    assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize("value", ["0.3:1.5", "0:0.1", "0.3:", "many", "0.1:0.2:0.3", True, None, [0.3]])
def test_what_is_no_rate_is_refused(value: Any) -> None:
    assert refused("--mask-prob is ", Config().replace, objective={"mask_prob": value}).exit_code == 2


def test_each_step_has_its_phase_and_one_may_be_the_whole_run() -> None:
    phases = parse_phases(("128:0.7", "256:0.9"), 512)
    lengths = [phase_at(phases, done, 10).seq_length for done in range(11)]
    assert lengths == [128] * 7 + [256] * 2 + [512] * 2
    assert [phase_at(phases, done, 1).seq_length for done in (0, 1)] == [128, 512]
    assert phase_at(parse_phases((), 512), 0, 10).seq_length == 512
    config = Config().replace(training={"seq_length_phases": ("128:1",), "train_iters": 7})
    assert [phase_at(config.phases, done, 7).seq_length for done in range(7)] == [128] * 7
    assert config.mean_seq_length == 128 and config.model.seq_length == 512


def test_a_causal_phase_comes_from_the_command_line_and_from_yaml_and_ends_at_its_share(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text("objective-phases: clm:0.7\n")
    for words in (["--objective-phases", "clm:0.7"], ["--config", str(tmp_path / "f.yaml")]):
        config = parse_arguments([*words, "--train-iters", "10"]).config
        assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config
        setup = Setup(config, Ranks(0, 1, torch.device("cpu")))
        assert [setup.at(step).causal for step in range(1, 11)] == [True] * 7 + [False] * 3
        assert [setup.at(step).objective.labels["clm_loss"] for step in (1, 7)] == ["clm", "clm"]
        assert setup.at(8) is setup and "clm_loss" not in setup.objective.labels
    assert changed_settings(Config().to_dict(), config)[0] == "--objective-phases: none → clm:0.7"
    refused(
        "invalid choice: 'clm'.*; clm comes before another .* by --objective-phases clm:1",
        parse_arguments,
        ["--objective", "clm"],
    )


def test_theta_switches_with_the_phase_also_in_a_checkpoint(tmp_path: Path) -> None:
    training = {"seq_length_phases": ("16:0.5:10000", "32:0.75"), "train_iters": 8}
    config = Config().replace(model=ROPE, training=training)
    assert [config.rope_theta_at(done) for done in range(8)] == [10_000.0] * 4 + [160_000.0] * 4
    assert config.mean_seq_length == 16 / 2 + 32 / 4 + 64 / 4
    for iteration, theta in ((0, 10_000.0), (4, 10_000.0), (5, 160_000.0)):
        write_state(tmp_path, {"iteration": iteration, "config": config.to_dict()})
        assert read_config(tmp_path).model.rope_theta == theta


@pytest.mark.parametrize(
    "words, message",
    [
        (("128",), "expected LENGTH:END"),
        (("128:x",), "expected LENGTH:END"),
        (("128:0.9:1:1",), "expected LENGTH:END"),
        (("2:0.9",), "it must be at least 3 and below 2\\^31"),
        (("128:1.1",), "it must lie in"),
        (("128:1", "256:1"), "growing ends, at most 1"),
        (("128:0.9:0.5",), "it must be at least 1"),
        (("512:0.9",), "of growing lengths below --seq-length 512"),
        (("128:0.9", "256:0.7"), "growing ends"),
        (("128:0.9:10000",), "--position-encoding ddrp, which has none"),
        (("128:0.1",), "128:0.1 has no step: it begins after step 0 and ends with step 0 of --train-iters 4; give"),
        (("128:0.5", "256:0.6"), "256:0.6 has no step: it begins after step 2 and ends with step 2 of --train-iters 4"),
    ],
)
def test_impossible_phases_are_refused(words: tuple[str, ...], message: str) -> None:
    training = {"seq_length_phases": words, "train_iters": 4}
    refusal = refused(f"^--seq-length-phases.*{message}", Config().replace, training=training)
    assert refusal.exit_code == 2


def test_phases_come_from_the_command_line_and_from_yaml(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text('seq-length-phases: ["128:0.7", "256:0.9"]\n')
    for words in (["--seq-length-phases", "128:0.7", "256:0.9"], ["--config", str(tmp_path / "f.yaml")]):
        config = parse_arguments(words).config
        assert config.training.seq_length_phases == ("128:0.7", "256:0.9")
        assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    (tmp_path / "f.yaml").write_text("seq-length-phases: 128:0.9\n")  # a time to YAML
    refused("quote it in YAML", parse_arguments, ["--config", str(tmp_path / "f.yaml")])


def test_a_dry_run_adds_up_the_hours_of_the_phases() -> None:
    sizes = {"position_encoding": "absolute", "relative_distance": None, "num_layers": 1}
    a100, config = DEVICES["a100"], Config().replace(model=sizes, training={"train_iters": 10})
    hours = {length: hours_of(config.replace(model={"seq_length": length}), 8, a100) for length in (128, 512)}
    phased = config.replace(training={"seq_length_phases": ("128:0.9",)})
    assert hours_of(phased, 8, a100) == pytest.approx(0.9 * hours[128] + 0.1 * hours[512])


BASE = "--data-path x --train-iters 10"


def remarks(words: str) -> tuple[str, ...]:
    return parse_arguments(f"{BASE} {words}".split()).remarks


@pytest.mark.parametrize(
    ("words", "remark"),
    [
        ("--global-every 2", "--global-every 2 (without --local-attention)"),
        ("--rope-theta 5000", "--rope-theta 5000.0 (with --position-encoding ddrp)"),
        ("--position-encoding t5 --direction-init free", "--direction-init free (with --position-encoding t5)"),
        ("--position-encoding rope --relative-table per-layer", "per-layer (with --position-encoding rope)"),
        ("--generator-size 0.5", "--generator-size 0.5 (with --objective mth)"),
        ("--objective rtd --generator-size 0.5", "--generator-size 0.5 (with --objective rtd)"),
        ("--objective mlm --tcd-tokens 20", "--tcd-tokens 20 (without TCD (--tcd-weight 0))"),
        ("--hcd-weight 0 --hcd-heads 4", "--hcd-heads 4 (without HCD (--hcd-weight 0))"),
        ("--notes-window 8", "--notes-window 8 (without --notes)"),
        ("--index-cache-dir counts", "--index-cache-dir counts (without --notes)"),
        ("--lr-decay-style constant --min-lr 1e-5", "--min-lr 1e-05 (with --lr-decay-style constant)"),
        ("--eval-interval 0 --other-data-path P", "--other-data-path P (without validation (--eval-interval 0))"),
        ("--profile-step-start 3", "--profile-step-start 3 (without --profile)"),
    ],
)
def test_a_setting_without_effect_is_named(words, remark):
    (line,) = remarks(words)
    assert line.startswith("without effect: ") and line.endswith(remark)


@pytest.mark.parametrize(
    "words",
    [
        "--local-attention 64 --global-every 2",
        "--position-encoding rope --rope-theta 5000",
        "--direction-init free --relative-table per-layer",
        "--objective electra --generator-size 0.5 --rtd-weight 10",
        "--tcd-tokens 20 --hcd-heads 4",
        "--objective mlm --tcd-weight 0.5 --tcd-tokens 20",
        "--notes --notes-window 8",
        "--profile --save out --profile-step-start 3",
        "--global-every 3 --rope-theta 10000 --objective mlm --tcd-tokens 50",  # the defaults
    ],
)
def test_a_setting_that_acts_or_is_the_default_is_not(words):
    assert remarks(words) == ()


def test_a_warm_up_that_outlasts_the_run_is_named():
    (line,) = remarks("--lr-decay-iters 2000 --lr-warmup-fraction 0.01")
    assert line == (
        "--lr-warmup-fraction 0.01 of --lr-decay-iters 2000 is 20 steps, more than --train-iters 10: the peak of the "
        "learning rate is never reached"
    )
    assert remarks("--lr-decay-iters 1000 --lr-warmup-fraction 0.01") == ()


@pytest.mark.parametrize(("encoding", "changed"), [("t5", []), ("rope", ["rope_theta"])])
def test_a_setting_without_effect_is_no_change_of_the_model(encoding, changed):
    words = [*BASE.split(), "--position-encoding", encoding]
    first, second = (parse_arguments(words + more).config for more in ([], ["--rope-theta", "500"]))
    assert changed_model(first, second) == changed
