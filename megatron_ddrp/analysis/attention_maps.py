"""Mean attention maps of one layer: of heads that look right, that look left, and of all (figure 4 of the paper).

Each sentence has its own division of the heads, as in Algorithm 1 (see `direction`). All sentences have one length, so
that the rows of a map sum to 1 and no pattern comes from lengths.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_ddrp.analysis.direction import divide_heads, layer_maps, sides
from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.model import Encoder

GROUPS = ("heads looking right", "heads looking left", "all heads")


@dataclass(frozen=True)
class AttentionMap:
    """A mean attention map and its shares to the right and to the left."""

    name: str
    map: NDArray[np.float64]
    """Mean probabilities `[seq, seq]`: query i, key j."""
    up: float
    """Share of the attention above the diagonal, the mean over sentences."""
    down: float
    """Share of the attention below the diagonal, the mean over sentences."""


def measure_maps(model: Encoder, batches: Iterable[Batch], layer: int, heads: Sequence[int] = ()) -> list[AttentionMap]:
    """Return the mean maps of `layer`: one per group of heads, or one per head if `heads` names some.

    Layers and heads are counted from 1. `batches` are on the model's device and hold sentences of one length.
    """
    names = [f"head {head}" for head in heads] or list(GROUPS)
    totals, sums, count = np.zeros(()), np.zeros((len(names), 2)), 0
    for batch in batches:
        maps = next(m for number, m in enumerate(layer_maps(model, batch), 1) if number == layer)
        panels, up, down = choose_panels(maps, batch.document_ids.sum(1), heads)
        totals = totals + panels.double().sum(0).cpu().numpy()  # [panels, seq, seq]
        sums += torch.stack([up, down], -1).double().sum(0).cpu().numpy()
        count += len(batch.input_ids)
    return [AttentionMap(*row) for row in zip(names, totals / count, *(sums / count).T.tolist(), strict=True)]


def choose_panels(maps: Tensor, lengths: Tensor, heads: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return one map per sentence and panel, and its attention above and below the diagonal.

    `maps` are a layer's, `[batch, heads, seq, seq]`; the result is `[batch, panels, seq, seq]`, `[batch, panels]` and
    `[batch, panels]`.
    """
    up, down = sides(maps, lengths)
    if heads:
        chosen = torch.tensor(heads, device=maps.device) - 1
        return maps[:, chosen], up[:, chosen], down[:, chosen]
    right, left = divide_heads(up, down)
    everyone = torch.arange(maps.shape[1], device=maps.device).expand(len(maps), -1)
    rows = torch.arange(len(maps), device=maps.device)[:, None]

    def means(values: Tensor) -> Tensor:
        return torch.stack([values[rows, group].mean(1) for group in (right, left, everyone)], 1)

    return means(maps), means(up), means(down)
