"""Mean attention maps of one layer: the heads that look to the right, those that look to the left, all (figure 4).

Heads are divided anew for each sentence, as in Algorithm 1 (see `direction`). The sentences are all of one length, so
that a map's rows sum to 1 and no pattern comes from lengths.
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
    """A mean map and how much of it looks where."""

    name: str
    map: NDArray[np.float64]
    """`[seq, seq]`: query i, key j."""
    up: float
    """Mean over sentences of the attention above the diagonal (÷ the sentence's length)."""
    down: float
    """The same below it."""


def measure_maps(model: Encoder, batches: Iterable[Batch], layer: int, heads: Sequence[int] = ()) -> list[AttentionMap]:
    """Return the maps of `layer` (counted from 1) of a model: of the groups, or of each of `heads` (from 1).

    `batches` are on the model's device and hold sentences of one length.
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


def choose_panels(maps: Tensor, lengths: Tensor, heads: Sequence[int] = ()) -> tuple[Tensor, Tensor, Tensor]:
    """Return one map per sentence and panel, and the attention above and below the diagonal.

    From the maps `[batch, heads, seq, seq]` of a layer to `[batch, panels, seq, seq]`, `[batch, panels]`,
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
