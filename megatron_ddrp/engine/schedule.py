"""The learning rate as a pure function of the step, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math

from megatron_ddrp.config import OptimizerConfig

WSD_DECAY_SHARE = 0.1
"""Share of the steps after the warm-up in which warm-up–stable–decay decays, unless a number of steps is given."""


def learning_rate(step: int, total_steps: int, config: OptimizerConfig) -> float:
    """Return the learning rate of step 1, 2, …, `total_steps`: linear warm-up to `lr`, then decay to `min_lr`.

    Once `decay_steps` steps are done, the rate stays at `min_lr`, unless it is constant.
    """
    warmup, decay = config.warmup_steps(total_steps), config.decay_steps(total_steps)
    if step <= warmup:
        return config.lr * step / warmup
    if step - 1 > decay and config.lr_decay_style != "constant":
        return config.min_lr
    return config.min_lr + (config.lr - config.min_lr) * _remaining(step, warmup, decay, config)


def _remaining(step: int, warmup: int, total_steps: int, config: OptimizerConfig) -> float:
    """Return the remaining share of the peak's height above `min_lr`, from 1 to 0."""
    style, done = config.lr_decay_style, min(1.0, (step - 1 - warmup) / max(1, total_steps - warmup))
    if style == "linear":
        return 1 - done
    if style == "cosine":
        return 0.5 * (1 + math.cos(math.pi * done))
    if style == "inverse-square-root":
        return math.sqrt(max(1, warmup) / max(1, step - 1))
    if style == "wsd":
        left = (1 - done) / WSD_DECAY_SHARE
        if config.lr_wsd_decay_iters is not None:
            left = max(0, total_steps + 1 - step) / config.lr_wsd_decay_iters
        left = min(1.0, left)
        return 1 - math.sqrt(1 - left) if config.lr_wsd_decay_style == "minus_sqrt" else left
    assert style == "constant", style
    return 1.0
