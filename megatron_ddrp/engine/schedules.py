"""The learning rate as a pure function of the step, so that a resumed run needs no scheduler state.

A schedule is a function `(step, warmup, last, config) -> share` of a step after the `warmup` steps: the remaining share
of the peak's height above `--min-lr`, usually from 1 to 0 at step `last`.
"""

from __future__ import annotations

import math

from megatron_ddrp.config import OptimizerConfig
from megatron_ddrp.config.option import as_number
from megatron_ddrp.config.registry import SCHEDULES
from megatron_ddrp.errors import shared_error

WSD_DECAY_SHARE = 0.1
"""Share of the steps after the warm-up in which warm-up–stable–decay decays, unless a number of steps is given."""


def learning_rate(step: int, total_steps: int, config: OptimizerConfig) -> float:
    """Return the learning rate of step 1, 2, …, `total_steps`: linear warm-up to `lr`, then decay to `min_lr`.

    After step `decay_steps` + 1 the rate stays at `min_lr`, as in Megatron-LM, unless it is constant.
    """
    warmup, last = config.warmup_steps(total_steps), config.decay_steps(total_steps)
    if step <= warmup:
        return config.lr * step / warmup
    if step - 1 > last and config.lr_decay_style != "constant":
        return config.min_lr
    given = SCHEDULES.find(config.lr_decay_style)(step, warmup, last, config)
    share = as_number(given)
    if share is None or not 0 <= share < math.inf:
        raise shared_error(
            f"--lr-decay-style {config.lr_decay_style} gave {given!r:.60} for step {step}: expected a share of at "
            "least 0"
        )
    return config.min_lr + (config.lr - config.min_lr) * share


def finished_share(step: int, warmup: int, last: int) -> float:
    """Return the share of the steps after the warm-up that are done before a step."""
    return min(1.0, (step - 1 - warmup) / max(1, last - warmup))


def linear(step: int, warmup: int, last: int, config: OptimizerConfig) -> float:
    return 1 - finished_share(step, warmup, last)


def cosine(step: int, warmup: int, last: int, config: OptimizerConfig) -> float:
    return 0.5 * (1 + math.cos(math.pi * finished_share(step, warmup, last)))


def constant(step: int, warmup: int, last: int, config: OptimizerConfig) -> float:
    return 1.0


def inverse_square_root(step: int, warmup: int, last: int, config: OptimizerConfig) -> float:
    return math.sqrt(max(1, warmup) / max(1, step - 1))


def wsd(step: int, warmup: int, last: int, config: OptimizerConfig) -> float:
    left = (1 - finished_share(step, warmup, last)) / WSD_DECAY_SHARE
    if config.lr_wsd_decay_iters is not None:
        left = max(0, last + 1 - step) / config.lr_wsd_decay_iters
    left = min(1.0, left)
    return 1 - math.sqrt(1 - left) if config.lr_wsd_decay_style == "minus_sqrt" else left
