"""Direction of attention: maps, and probabilities above the diagonal (to the right) and below it (to the left).

The heads are divided evenly (section 5.3 and appendix C of the paper): for each sentence and layer, the half that looks
most to the right is group 1, the half that looks most to the left group 2. With an odd number of heads, the middle one
belongs to neither. The triangles exclude the diagonal; [CLS] and [SEP] count like other tokens.

Mean attention maps of one layer: of heads that look right, that look left, and of all (figure 4 of the paper).

Each sentence has its own division of the heads, as in Algorithm 1. All sentences have one length, so that the rows of a
map sum to 1 and no pattern comes from lengths.

Algorithm 1 (appendix C of the paper): the share of sentences whose heads show the up-down triangle effect.

A sentence shows the effect in a layer if group 1's heads have on average at least `threshold` of their attention above
the diagonal, and group 2's heads at least as much below it. Two departures from the printed algorithm: its loop never
ends at a sentence without the effect, which here counts as a miss; and it divides by 64, the longest sentence, where we
divide by the sentence's own length. The printed share is the last layer's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.errors import UserError
from megatron_ddrp.model import Encoder
from megatron_ddrp.model.attention.backends import probabilities
from megatron_ddrp.model.attention.logits import allowed_pairs
from megatron_ddrp.model.encoder import EncoderLayer
from megatron_ddrp.model.stages import Draws, Inputs


def layer_maps(model: Encoder, batch: Batch) -> Iterator[Tensor]:
    """Yield the attention probabilities of each layer, `[batch, heads, seq, seq]`.

    They are 0 in the rows and columns of padding, and outside the window of a local layer.
    """
    for logits, window in layer_logits(model, batch):
        allowed = allowed_pairs(batch.document_ids, window)
        yield probabilities(logits, allowed, dropout=0.0).masked_fill(~allowed, 0.0)


@torch.no_grad()
def layer_logits(model: Encoder, batch: Batch) -> Iterator[tuple[Tensor, int | None]]:
    """Yield the attention logits of each layer, `[batch, heads, seq, seq]`, and its window in tokens.

    The logits have values at padding and outside the window too; the window of a layer without one is None.
    """
    nothing = Draws.none(len(batch.input_ids), model.config.num_layers, batch.document_ids.device)
    state = model.embeddings(Inputs.of(batch, nothing))
    for layer in model.layers:
        assert isinstance(layer, EncoderLayer)
        yield layer.logits(state), layer.attention.window
        state = layer(state)


def sides(maps: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums above and below the diagonal, divided by the sentence's length, `[batch, heads]` each.

    `maps` is `[batch, heads, seq, seq]` with 0 for padding, `lengths` `[batch]`.
    """
    n = lengths[:, None].to(maps.dtype)
    return maps.triu(1).sum((-2, -1)) / n, maps.tril(-1).sum((-2, -1)) / n


def divide_heads(up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers of the heads of group 1 and of group 2, int64 `[batch, heads // 2]` each.

    `up` and `down` are those of `sides`. Raises `UserError` for a model with one head.
    """
    num_heads = up.shape[-1]
    if num_heads < 2:
        raise UserError("heads are divided into two groups, but this model has one head: use a model with two or more")
    order = (up - down).argsort(dim=-1, descending=True, stable=True)
    return order[:, : num_heads // 2], order[:, num_heads - num_heads // 2 :]


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
