"""Probe of attention: how well do the heads' logits tell the right-hand key from the left-hand one?

Token i of a sentence has text k places to its right and k places to its left. Each head gives one number,

    d[i,k] = A[i, i+k] − A[i, i−k],

A the attention logits. A linear readout without an intercept names the right-hand key if w·d > 0; w·d = 0 counts as
half. Its weights are Fisher's discriminant between d and −d ("The use of multiple measurements in taxonomic problems",
1936),

    w = (S + ridge)⁻¹ m,

from the mean m and the covariance S of d over every other sentence. The accuracy is counted on the remaining sentences.
Chance is 0.5. The normalisation of a row cancels in d, so log-probabilities would give the same d.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import itemgetter

import numpy as np
import torch
from torch import Tensor

from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.data.batches.samples import NUM_SPECIAL_TOKENS
from megatron_ddrp.errors import UserError
from megatron_ddrp.lab.analysis.attention_maps import layer_logits
from megatron_ddrp.model import Encoder as ModelEncoder

REACH = 8
"""Largest distance k in tokens."""
RIDGE = 1e-8
"""Ridge as a share of the sum of the heads' mean d²."""
PASSES = 2
"""Number of times that `measure_probe` reads the sentences."""


@dataclass(frozen=True)
class Probe:
    """Accuracies of the readouts, in [0, 1]. They are None where no pair of keys exists."""

    accuracy: float
    """Mean of `by_distance`."""
    error: float | None
    """Standard error of `accuracy` over the sentences, for fixed weights; None with one sentence."""
    by_layer: list[float | None]
    """Mean over k of the accuracy from the heads of one layer."""
    by_distance: list[float | None]
    """Accuracy from the heads of all layers for k = 1 … `REACH`."""


def measure_probe(model: ModelEncoder, batches: Callable[[], Iterable[Batch]]) -> Probe:
    """Fit the readouts on every other sentence and score them on the rest.

    `batches` is called twice and must give the same batches, of sentences `[CLS] text [SEP]` on the model's device.
    Raises `UserError` if the sentences are too few or too short.
    """
    readouts, fitted = _fit(model, _every_other(batches(), 0))
    hits, pairs = _score(model, _every_other(batches(), 1), readouts)
    scored = pairs.sum(0)  # [k]
    known = _attended(model) & (fitted > 0) & (scored > 0)  # [1 + layers, k]
    if not known.any():
        raise UserError(
            "the sentences are too few or too short to probe left and right: give a larger --sentences or --max-length"
        )
    accuracies = (hits.sum(0) / scored).masked_fill(~known, math.nan)
    by_distance, by_layer = accuracies[0], accuracies[1:].nanmean(1)
    error = _standard_error(((hits[:, 0] - by_distance * pairs) / scored)[:, known[0]].mean(1))
    return Probe(by_distance.nanmean().item(), error, _listed(by_layer), _listed(by_distance))


def shuffle_text(batches: Iterable[Batch], seed: int) -> Iterator[Batch]:
    """Yield the batches with the text of each sentence in a random order; [CLS], [SEP] and padding keep their places.

    The order depends on the seed, the sentence's number and its length, not on the batches.
    """
    number = 0
    for batch in batches:
        order = torch.arange(batch.input_ids.shape[1]).repeat(len(batch.input_ids), 1)  # [batch, seq]
        for row, length in zip(order, batch.document_ids.sum(1).tolist(), strict=True):
            drawn = np.random.default_rng([seed, number]).permutation(length - NUM_SPECIAL_TOKENS)
            row[1 : length - 1] = 1 + torch.from_numpy(drawn)
            number += 1
        yield batch._replace(input_ids=batch.input_ids.gather(1, order.to(batch.input_ids.device)))


def differences(logits: Tensor, window: int | None) -> Tensor:
    """Return d, float64 `[batch, heads, k, seq]`, of logits `[batch, heads, seq, seq]`.

    d is 0 for k beyond the window, and where i + k or i − k lies outside the row.
    """
    seq = logits.shape[-1]
    found = logits.new_zeros(*logits.shape[:2], REACH, seq, dtype=torch.float64)
    for k in range(1, 1 + min(REACH, window or REACH, (seq - 1) // 2)):
        right, left = logits.diagonal(k, -2, -1)[..., k:], logits.diagonal(-k, -2, -1)[..., : seq - 2 * k]
        found[:, :, k - 1, k : seq - k] = right.double() - left.double()
    return found


def text_on_both_sides(lengths: Tensor, seq: int) -> Tensor:
    """Mark the tokens i for which i + k and i − k are text: `lengths` `[batch]` → bool `[batch, k, seq]`.

    A length counts [CLS], the first token, and [SEP], the last one.
    """
    place, k = torch.arange(seq, device=lengths.device), torch.arange(1, 1 + REACH, device=lengths.device)[:, None]
    return (place - k >= 1) & (place + k < lengths[:, None, None] - 1)


def _fit(model: ModelEncoder, batches: Iterable[Batch]) -> tuple[Tensor, Tensor]:
    """Return the readouts w `[1 + layers, k, layers · heads]`, of all layers and of each, and the pairs per k `[k]`.

    w is 0 for heads of other layers. (M + ridge)⁻¹ m with M = S + m mᵀ has the direction of (S + ridge)⁻¹ m, and sums
    of d² do not cancel.
    """
    members = _members(model)  # [1 + layers, layers · heads]
    heads = members.shape[1]
    pairs, total, square = (torch.zeros(REACH, *sizes).double() for sizes in ((), (heads,), (heads, heads)))
    for d, counted in _measured(model, batches):
        flat = (d * counted[:, None]).permute(2, 1, 0, 3).flatten(2)  # [k, layers · heads, batch · seq]
        pairs += counted.sum((0, 2)).cpu()
        total += flat.sum(2).cpu()
        square += (flat @ flat.mT).cpu()
    mean = total / pairs.clamp_min(1)[:, None] * members[:, None]  # [1 + layers, k, layers · heads]
    square = square / pairs.clamp_min(1)[:, None, None] * members[:, None, :, None] * members[:, None, None]
    ridge = RIDGE * square.diagonal(dim1=-2, dim2=-1).sum(-1)  # [1 + layers, k]
    ridge = ridge.where(ridge > 0, 1.0)[..., None, None] * torch.eye(heads)
    return torch.linalg.solve(square + ridge, mean), pairs


def _score(model: ModelEncoder, batches: Iterable[Batch], readouts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the right answers `[sentences, 1 + layers, k]` and the number of pairs `[sentences, k]`."""
    hits, pairs = [readouts.new_zeros(0, *readouts.shape[:2])], [readouts.new_zeros(0, REACH)]
    for d, counted in _measured(model, batches):
        answers = torch.einsum("bhki,gkh->bgki", d, readouts.to(d.device)).sign()
        hits.append(((1 + answers) / 2 * counted[:, None]).sum(-1).cpu())
        pairs.append(counted.sum(-1).cpu())
    return torch.cat(hits), torch.cat(pairs)


def _measured(model: ModelEncoder, batches: Iterable[Batch]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield d of all layers `[batch, layers · heads, k, seq]` and the places that count, 0 or 1, `[batch, k, seq]`."""
    for batch in batches:
        d = torch.cat([differences(logits, window) for logits, window in layer_logits(model, batch)], 1)
        yield d, text_on_both_sides(batch.document_ids.sum(1), d.shape[-1]).to(d)


def _every_other(batches: Iterable[Batch], first: int) -> Iterator[Batch]:
    """Yield every other sentence, from sentence `first` on, 0 or 1."""
    for batch in batches:
        if len(batch.input_ids) > first:
            yield batch.map(itemgetter(slice(first, None, 2)))
        first = (first + len(batch.input_ids)) % 2


def _members(model: ModelEncoder) -> Tensor:
    """Mark the heads of all layers and of each layer by 1, float64 `[1 + layers, layers · heads]`."""
    sizes = model.config
    own = torch.eye(sizes.num_layers, dtype=torch.float64).repeat_interleave(sizes.num_attention_heads, 1)
    return torch.cat([torch.ones_like(own[:1]), own])


def _attended(model: ModelEncoder) -> Tensor:
    """Mark the distances within the window of any layer and of each layer, bool `[1 + layers, k]`."""
    windows = torch.tensor([model.config.window(layer) or REACH for layer in range(model.config.num_layers)])
    own = torch.arange(1, 1 + REACH) <= windows[:, None]  # [layers, k]
    return torch.cat([own.any(0, keepdim=True), own])


def _standard_error(parts: Tensor) -> float | None:
    """Return the standard error of a sum of independent parts `[sentences]` of mean 0; None for one part."""
    count = len(parts)
    return None if count < 2 else math.sqrt(parts.square().sum().item() * count / (count - 1))


def _listed(values: Tensor) -> list[float | None]:
    return [None if math.isnan(value) else value for value in values.tolist()]
