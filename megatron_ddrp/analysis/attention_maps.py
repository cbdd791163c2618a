"""Mean attention maps of one layer: of heads that look right, that look left, and of all (figure 4 of the paper).

Each sentence has its own division of the heads, as in Algorithm 1 (see `direction`). All sentences have one length, so
that the rows of a map sum to 1 and no pattern comes from lengths.

Algorithm 1 (appendix C of the paper): the share of sentences whose heads show the up-down triangle effect.

A sentence shows the effect in a layer if group 1's heads have on average at least `threshold` of their attention above
the diagonal, and group 2's heads at least as much below it (see `direction` for the groups). Two departures from the
printed algorithm: its loop never ends at a sentence without the effect, which here counts as a miss; and it divides by
64, the longest sentence, where we divide by the sentence's own length. The printed share is the last layer's.
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


@dataclass(frozen=True)
class LayerTriangles:
    """Share of sentences with the effect in one layer, and the mean attention of both groups."""

    share: float
    """Share of the sentences that show the effect, in [0, 1]."""
    group_1_up: float
    """Mean over sentences of the attention of group 1 above the diagonal."""
    group_2_down: float
    """Mean over sentences of the attention of group 2 below the diagonal."""


def triangle_parts(maps: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return group 1's attention above the diagonal and group 2's below it, `[batch]` each.

    They are Algorithm 1's amp1_up and amp2_down. `maps` is `[batch, heads, seq, seq]` with 0 for padding.
    """
    up, down = sides(maps, lengths)
    right, left = divide_heads(up, down)
    return up.gather(1, right).mean(1), down.gather(1, left).mean(1)


def measure_triangles(model: Encoder, batches: Iterable[Batch], threshold: float) -> list[LayerTriangles]:
    """Run Algorithm 1 for every layer of a model over batches of sentences on its device."""
    sums, count = torch.zeros(model.config.num_layers, 3, dtype=torch.float64), 0  # hits, group 1 up, group 2 down
    for batch in batches:
        lengths = batch.document_ids.sum(1)
        for number, maps in enumerate(layer_maps(model, batch)):
            up, down = triangle_parts(maps, lengths)
            hits = (up >= threshold) & (down >= threshold)
            sums[number] += torch.stack([hits.double().sum(), up.double().sum(), down.double().sum()]).cpu()
        count += len(batch.input_ids)
    return [LayerTriangles(*row) for row in (sums / count).tolist()]
