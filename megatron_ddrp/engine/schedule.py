"""The learning rate as a pure function of the step, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math

from megatron_ddrp.config import OptimizerConfig

WSD_DECAY_SHARE = 0.1
"""Share of the run over which warm-up–stable–decay decays."""


def learning_rate(step: int, total_steps: int, config: OptimizerConfig) -> float:
    """Rate of step 1, 2, …, `total_steps`: linear warm-up to `lr`, then the chosen decay to `min_lr`."""
    warmup = math.ceil(config.lr_warmup_fraction * total_steps)
    if step <= warmup:
        return config.lr * step / warmup
    done = min(1.0, (step - 1 - warmup) / max(1, total_steps - warmup))  # share of the decay behind us
    return config.min_lr + (config.lr - config.min_lr) * _remaining(step, warmup, done, config.lr_decay_style)


def _remaining(step: int, warmup: int, done: float, style: str) -> float:
    """What is left of the peak, 1 → 0."""
    if style == "linear":
        return 1 - done
    if style == "cosine":
        return 0.5 * (1 + math.cos(math.pi * done))
    if style == "inverse-square-root":
        return math.sqrt(max(1, warmup) / max(1, step - 1))
    if style == "wsd":
        return min(1.0, (1 - done) / WSD_DECAY_SHARE)
    assert style == "constant", style
    return 1.0
