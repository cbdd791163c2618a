"""Learning rates of each decay style, in units of the peak, against values worked out by hand."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ddrp.config import Config, OptimizerConfig
from megatron_ddrp.engine.optimizers import learning_rate
from megatron_ddrp.errors import UserError

STYLES = ("linear", "cosine", "constant", "inverse-square-root", "wsd")


def rows(style: str, total: int, warmup: float = 0.0, lr: float = 1.0, min_lr: float = 0.0) -> list[float]:
    """The rates of steps 1 … total."""
    config = OptimizerConfig(lr=lr, min_lr=min_lr, lr_decay_style=style, lr_warmup_fraction=warmup)
    return [learning_rate(step, total, config) for step in range(1, total + 1)]


def test_linear_falls_by_equal_steps_from_the_peak() -> None:
    assert rows("linear", 5) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])
    assert rows("linear", 6, warmup=1 / 3) == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25])


@pytest.mark.parametrize("fraction, steps, expected", [(0.07, 100, 7), (0.28, 25, 7), (0.05, 2048, 103), (1e-5, 10, 1)])
def test_a_share_that_is_a_whole_number_of_steps_takes_no_step_more(fraction: float, steps: int, expected: int) -> None:
    assert OptimizerConfig(lr_warmup_fraction=fraction).warmup_steps(steps) == expected


def test_cosine_is_half_a_wave() -> None:
    expected = [1.0, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2]
    assert rows("cosine", 4) == pytest.approx(expected)


def test_constant_stays() -> None:
    assert rows("constant", 4, warmup=0.5) == [0.5, 1.0, 1.0, 1.0]


def test_inverse_square_root_halves_at_four_times_the_warm_up() -> None:
    rates = rows("inverse-square-root", 100, warmup=0.1)
    assert rates[9] == rates[10] == pytest.approx(1.0)
    assert rates[40] == pytest.approx(0.5)  # step 41: 40 steps are behind it
    assert rates[90] == pytest.approx(1 / 3)


def test_wsd_holds_and_falls_over_the_last_tenth() -> None:
    rates = rows("wsd", 100)
    assert rates[:91] == pytest.approx([1.0] * 91)
    assert rates[90:] == pytest.approx([1 - tenth / 10 for tenth in range(10)])


def test_wsd_falls_over_the_last_steps_that_are_given() -> None:
    config = OptimizerConfig(lr=1.0, min_lr=0.2, lr_decay_style="wsd", lr_wsd_decay_iters=4, lr_warmup_iters=2)
    rates = [learning_rate(step, 10, config) for step in range(1, 11)]
    assert rates == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4])
    root = dataclasses.replace(config, lr_wsd_decay_style="minus_sqrt")
    slow = [0.2 + 0.8 * (1 - (done / 4) ** 0.5) for done in range(4)]
    assert [learning_rate(step, 10, root) for step in range(7, 11)] == pytest.approx(slow)


def test_a_decay_that_ends_before_the_run_keeps_the_lowest_rate() -> None:
    config = OptimizerConfig(lr=1.0, min_lr=0.2, lr_decay_iters=5, lr_warmup_fraction=0.2)
    rates = [learning_rate(step, 8, config) for step in range(1, 9)]
    assert rates == pytest.approx([1, 1, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])
    cosine = dataclasses.replace(config, lr_decay_style="cosine")
    assert learning_rate(4, 8, cosine) == pytest.approx(0.6)
    wsd = dataclasses.replace(config, lr_decay_style="wsd", lr_wsd_decay_iters=2)
    assert [learning_rate(step, 8, wsd) for step in range(3, 8)] == pytest.approx([1, 1, 0.6, 0.2, 0.2])
    constant = dataclasses.replace(config, lr_decay_style="constant")
    assert learning_rate(8, 8, constant) == 1.0
    root = dataclasses.replace(config, lr_decay_style="inverse-square-root", min_lr=0.0)
    assert [learning_rate(step, 8, root) for step in (5, 6, 7)] == pytest.approx([0.5, 0.2**0.5, 0.0])


@pytest.mark.parametrize("style", ["linear", "minus_sqrt"])
def test_a_branch_of_wsd_leaves_the_steps_before_it_alone(style: str) -> None:
    stable = OptimizerConfig(lr=1e-3, lr_decay_style="constant", lr_warmup_iters=5)
    branch = dataclasses.replace(
        stable, lr_decay_style="wsd", lr_wsd_decay_iters=10, lr_wsd_decay_style=style, min_lr=1e-5
    )
    for step in range(1, 32):  # the rate of step 31 is still the peak
        assert learning_rate(step, 40, branch) == learning_rate(step, 10**6, stable)
    assert learning_rate(32, 40, branch) < 1e-3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr_wsd_decay_iters": 5}, "--lr-wsd-decay-iters 5 with --lr-decay-style linear"),
        ({"lr_wsd_decay_style": "minus_sqrt"}, "--lr-wsd-decay-style minus_sqrt with --lr-decay-style linear"),
        ({"lr_decay_style": "wsd", "lr_wsd_decay_iters": 10, "lr_warmup_iters": 1}, "more than --train-iters 10"),
        ({"lr_decay_iters": 4, "lr_warmup_iters": 4}, "--lr-decay-iters 4: the warm-up alone has 4 steps"),
        (
            {"lr_decay_style": "wsd", "lr_wsd_decay_iters": 4, "lr_warmup_iters": 1, "lr_decay_iters": 4},
            "more than --lr-decay-iters 4",
        ),
    ],
)
def test_a_decay_that_does_not_fit_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as refused:
        Config().replace(optimizer=settings, training={"train_iters": 10})
    assert refused.value.exit_code == 2


@pytest.mark.parametrize("style", STYLES)
def test_warm_up_is_linear_and_reaches_the_peak(style: str) -> None:
    assert rows(style, 20, warmup=0.2, lr=3e-4)[:5] == pytest.approx([0.75e-4, 1.5e-4, 2.25e-4, 3e-4, 3e-4])


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("warmup", [0.0, 0.01, 0.5, 1.0])
def test_rates_stay_between_the_floor_and_the_peak(style: str, warmup: float) -> None:
    rates = rows(style, 60, warmup, lr=2.0, min_lr=0.5)
    begin = math.ceil(warmup * 60)
    assert all(0 < rate <= 2.0 for rate in rates[:begin])
    assert all(0.5 <= rate <= 2.0 for rate in rates[begin:])
    assert rates[begin:] == sorted(rates[begin:], reverse=True)


def test_the_floor_scales_what_decays() -> None:
    assert rows("linear", 4, lr=1.0, min_lr=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4])


def test_a_run_made_longer_decays_to_the_new_end() -> None:
    config = OptimizerConfig(lr=1.0, lr_warmup_fraction=0.0)
    assert learning_rate(6, 10, config) == pytest.approx(0.5)
    assert learning_rate(6, 20, config) == pytest.approx(0.75)


@pytest.mark.parametrize(
    "share",
    [0.5, np.float32(0.5), np.array(0.5), torch.tensor(0.5), "0.5", None, 10**400, -1, math.nan],
    ids=lambda share: repr(share)[:20],
)
def test_a_share_is_any_number_of_at_least_0(share: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a plug-in: of Python, numpy or torch; anything else is one line."""
    monkeypatch.setattr("megatron_ddrp.engine.optimizers.linear", lambda step, warmup, last, config: share)
    if isinstance(share, (str, int, type(None))) or math.isnan(share):
        with pytest.raises(UserError, match="--lr-decay-style linear gave .* for step 1: expected a share"):
            rows("linear", 2)
        return
    assert [(type(rate), rate) for rate in rows("linear", 2, lr=2.0)] == [(float, 1.0)] * 2
