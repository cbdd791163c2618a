"""Algorithm 1 (appendix C of the paper): the share of sentences whose heads show the up-down triangle effect.

A sentence shows it in a layer if, averaged over the heads of group 1, at least `threshold` of the attention lies above
the diagonal, and averaged over those of group 2 as much lies below it (see `direction`). As printed, the algorithm
never gets past a sentence that does not; here such a sentence counts as a miss. It divides by 64, the longest sentence;
here each sum is divided by the sentence's own length. The headline is the last layer.
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
    """One layer's share of sentences with the effect, and the mean attention behind it."""

    share: float
    """Share of the sentences that show the effect, in [0, 1]."""
    group_1_up: float
    """Mean over sentences of the attention of group 1 above the diagonal."""
    group_2_down: float
    """Mean over sentences of the attention of group 2 below the diagonal."""


def triangle_parts(maps: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return (amp1_up, amp2_down), `[batch]` each, from maps `[batch, heads, seq, seq]` with padding 0."""
    up, down = sides(maps, lengths)
    right, left = divide_heads(up, down)
    return up.gather(1, right).mean(1), down.gather(1, left).mean(1)


def measure_triangles(model: Encoder, batches: Iterable[Batch], threshold: float) -> list[LayerTriangles]:
    """Return Algorithm 1's shares for every layer of a model over batches of sentences on its device."""
    sums, count = torch.zeros(model.config.num_layers, 3, dtype=torch.float64), 0  # hits, group 1 up, group 2 down
    for batch in batches:
        lengths = batch.document_ids.sum(1)
        for number, maps in enumerate(layer_maps(model, batch)):
            up, down = triangle_parts(maps, lengths)
            hits = (up >= threshold) & (down >= threshold)
            sums[number] += torch.stack([hits.double().sum(), up.double().sum(), down.double().sum()]).cpu()
        count += len(batch.input_ids)
    return [LayerTriangles(*row) for row in (sums / count).tolist()]
