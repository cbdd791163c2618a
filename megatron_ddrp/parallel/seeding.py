"""The seed of what torch draws between two seeds: dropout of a micro-batch, of a rank, of a step of fine-tuning."""

from __future__ import annotations

import torch


def seed_draws(seed: int, device: torch.device) -> None:
    """Make the draws on the CPU and on `device` those that follow `torch.manual_seed(seed)`.

    `torch.manual_seed` seeds every kind of device that torch knows, and for each that this machine lacks it keeps a
    stack trace: a millisecond in all, which a small layer would be computed in.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed_all(seed)
