"""Learning rates of each decay style, in units of the peak, against values worked out by hand."""

from __future__ import annotations

import math

import pytest

from megatron_ddrp.config import OptimizerConfig
from megatron_ddrp.engine.schedule import learning_rate

STYLES = ("linear", "cosine", "constant", "inverse-square-root", "wsd")


def rows(style: str, total: int, warmup: float = 0.0, lr: float = 1.0, min_lr: float = 0.0) -> list[float]:
    """The rates of steps 1 … total."""
    config = OptimizerConfig(lr=lr, min_lr=min_lr, lr_decay_style=style, lr_warmup_fraction=warmup)
    return [learning_rate(step, total, config) for step in range(1, total + 1)]


def test_linear_falls_by_equal_steps_from_the_peak() -> None:
    assert rows("linear", 5) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])
    assert rows("linear", 6, warmup=1 / 3) == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25])


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
