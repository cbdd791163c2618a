"""Settings without effect are named, with the reason, and those that act are not."""

from __future__ import annotations

import pytest

from megatron_ddrp.arguments import parse_arguments
from megatron_ddrp.config.run import changed_model

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
