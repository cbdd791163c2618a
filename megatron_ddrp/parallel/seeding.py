"""Seeds of torch's random draws: dropout of a micro-batch, of a rank, of a fine-tuning step."""

from __future__ import annotations

import torch


def seed_draws(seed: int, device: torch.device) -> None:
    """Seed torch's draws on the CPU and on `device`, as `torch.manual_seed(seed)` does.

    `torch.manual_seed` seeds every kind of device that torch knows, and keeps a stack trace for each kind that this
    machine lacks. That takes a millisecond, enough time to compute a small layer.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed_all(seed)
