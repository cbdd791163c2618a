"""Slow twins of the MTH regularisers ("Better Pre-Training by Reducing Representation Confusion", eq. 17-18).

Eq. 17: L_TCD = 2 / (n'(n'-1))    sum_{i<j} cos(h_i, h_j)             over n' sampled tokens' last hidden states
Eq. 18: L_HCD = 2 / (L m'(m'-1))  sum_l sum_{i<j} cos(a^l_i, a^l_j)   over m' sampled heads of each of L layers

"Attention weights" a are the pre-softmax logits (the paper's footnote): scaled, with their position terms, before the
padding mask; a head flattened is the vector of its valid×valid entries. With all tokens and heads taken these are
eq. 15 and 16. Over a batch: the sum over sequences with at least 2 valid tokens ÷ their count. Valid = not padding;
specials are valid. For a packed row, `valid` marks the sequence in question, so that each packed one counts as its own.
Samples are given, not drawn. A zero vector has no cosine: the twins then return nan.
Everything is torch.float64 and differentiable.
"""

import torch
from torch import Tensor

from tests.reference.positions import dot


def cosine(left: Tensor, right: Tensor) -> Tensor:
    """left · right / (|left| |right|), both `[n]`; a scalar."""
    return dot(left, right) / (torch.sqrt(dot(left, left)) * torch.sqrt(dot(right, right)))


def mean_pairwise_cosine(vectors: list[Tensor], power: int = 1) -> Tensor:
    """The mean cosine, to a power, over the n(n-1)/2 unordered pairs of n >= 2 vectors; a scalar."""
    n = len(vectors)
    assert n >= 2, f"a pair needs two vectors, got {n}"
    total = torch.zeros((), dtype=torch.float64)
    for i in range(n - 1):
        for j in range(i + 1, n):
            total = total + cosine(vectors[i], vectors[j]) ** power
    return 2.0 / (n * (n - 1)) * total


def tcd(hidden: Tensor, tokens: list[int], power: int = 1) -> Tensor:
    """Eq. 17 for one sequence: hidden `[S, D]`, the last hidden states; tokens, the sampled indices (at least 2).

    With power 2, ours: the mean squared cosine.
    """
    return mean_pairwise_cosine([hidden[token] for token in tokens], power)


def flatten_head(scores: Tensor, valid: list[bool], window: int | None = None) -> Tensor:
    """The valid×valid entries of one head's logits `[S, S]`, row by row: `[n·n]` for n valid tokens.

    With a window only those that the head attends to, |i − j| <= window.
    """
    kept = [index for index, is_valid in enumerate(valid) if is_valid]
    return torch.stack([scores[i, j] for i in kept for j in kept if window is None or abs(i - j) <= window])


def hcd(
    scores_per_layer: list[Tensor],
    heads_per_layer: list[list[int]],
    valid: list[bool],
    windows: list[int | None] | None = None,
) -> Tensor:
    """Eq. 18 for one sequence, the mean over its layers; a scalar.

    scores_per_layer: L logits `[heads, S, S]`. heads_per_layer: each layer's own sample, at least 2 heads.
    valid: S flags, False for padding. windows: each layer's window, None for a layer without.
    """
    windows = [None] * len(scores_per_layer) if windows is None else windows
    total = torch.zeros((), dtype=torch.float64)
    for scores, heads, window in zip(scores_per_layer, heads_per_layer, windows, strict=True):
        total = total + mean_pairwise_cosine([flatten_head(scores[head], valid, window) for head in heads])
    return total / len(scores_per_layer)


def mean_over_sequences(losses: list[Tensor]) -> Tensor:
    """The mean of the losses of the sequences that count; 0 where none does."""
    total = torch.zeros((), dtype=torch.float64)
    for loss in losses:
        total = total + loss
    return total / max(len(losses), 1)


def tcd_batch(hidden: list[Tensor], tokens: list[list[int]], valid: list[list[bool]]) -> Tensor:
    """TCD of a batch: the mean over its sequences with at least 2 valid tokens.

    One item a sequence: hidden `[S, D]`, its sampled tokens (all of them valid), its S validity flags.
    """
    losses = []
    for states, sample, flags in zip(hidden, tokens, valid, strict=True):
        assert all(flags[token] for token in sample), "a padded token was sampled"
        if sum(flags) >= 2:
            losses.append(tcd(states, sample))
    return mean_over_sequences(losses)


def hcd_batch(
    scores_per_layer: list[list[Tensor]], heads_per_layer: list[list[int]], valid: list[list[bool]]
) -> Tensor:
    """HCD of a batch: the mean over layers and over its sequences with at least 2 valid tokens.

    scores_per_layer: for each sequence its L logits `[heads, S, S]`. heads_per_layer: the step's sample, the same for
    all sequences. valid: S flags a sequence.
    """
    losses = []
    for scores, flags in zip(scores_per_layer, valid, strict=True):
        if sum(flags) >= 2:
            losses.append(hcd(scores, heads_per_layer, flags))
    return mean_over_sequences(losses)
