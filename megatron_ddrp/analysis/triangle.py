"""Algorithm 1 (appendix C of the paper): the share of sentences whose heads show the up-down triangle effect.

A sentence shows the effect in a layer if group 1's heads have on average at least `threshold` of their attention above
the diagonal, and group 2's heads at least as much below it (see `direction` for the groups). Two departures from the
printed algorithm: its loop never ends at a sentence without the effect, which here counts as a miss; and it divides by
64, the longest sentence, where we divide by the sentence's own length. The printed share is the last layer's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ddrp.analysis.direction import divide_heads, layer_maps, sides
from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.model import Encoder


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
