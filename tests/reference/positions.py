"""Slow twins of the position encodings' attention logits ("Better Pre-Training by Reducing Representation Confusion").

Eq. 2:  A[i,j] = Q_i · K_j / sqrt(d)                                   (absolute: positions live in the input alone)
Eq. 4:  A[i,j] = Q_i · (K_j + K^r_{sigma(i,j)}) / sqrt(d)              (BERT-R, Shaw et al.)
Eq. 5:  sigma(i,j) = clip(i - j) + r_s, with clip's bounds -r_s .. r_s - 1, so that K^r has exactly 2·r_s rows
Eq. 9:  A[i,j] = Q_i · (K_j + K^d_{delta(i,j)}) / sqrt(d)              (DDRP)
Eq. 10: K^d_{delta(i,j)} = D_{rho(i,j)} * K^rd_{delta(i,j)}            (element by element)
Eq. 11: rho(i,j) = 1 if i - j < 0, 0 if i - j = 0, 2 if i - j > 0
Eq. 12: delta(i,j) = |clip(i - j)|

i = query, j = key. The paper leaves DDRP's bounds open; its count of r_s + 3 vectors closes them: -(r_s - 1) ..
r_s - 1, so that K^rd has exactly r_s rows. i and j are the tokens' position numbers (they restart in a packed row), not
their indices.
Everything is torch.float64 and differentiable.
"""

import math

import torch
from torch import Tensor


def dot(left: Tensor, right: Tensor) -> Tensor:
    """Sum over x of left[x] · right[x]; both `[d]`, the result a scalar."""
    assert left.shape == right.shape and left.dim() == 1
    return (left * right).sum()


def clip(difference: int, low: int, high: int) -> int:
    """`difference` held within `low .. high`, both ends included."""
    if difference < low:
        return low
    if difference > high:
        return high
    return difference


def bert_r_scores(query: Tensor, key: Tensor, relative: Tensor, positions: list[int]) -> Tensor:
    """BERT-R logits, eq. 4, before any padding mask: `[heads, S, S]`.

    query, key: `[heads, S, d]`. relative: K^r `[2 · r_s, d]`, shared by the heads. positions: as for DDRP.
    """
    heads, _, head_dim = query.shape
    relative_distance = relative.shape[0] // 2
    scores = []
    for head in range(heads):
        for a, i in enumerate(positions):
            for b, j in enumerate(positions):
                sigma = clip(i - j, -relative_distance, relative_distance - 1) + relative_distance
                scores.append(dot(query[head, a], key[head, b] + relative[sigma]) / math.sqrt(head_dim))
    return torch.stack(scores).reshape(heads, len(positions), len(positions))


def ddrp_row(direction: Tensor, distance: Tensor, i: int, j: int) -> Tensor:
    """K^d of eq. 10 for query position i and key position j: `[d]`.

    direction: D `[3, d]`, rows 0 same place, 1 key to the right (i < j), 2 key to the left (i > j).
    distance: K^rd `[r_s, d]`.
    """
    relative_distance = distance.shape[0]
    if i - j < 0:
        rho = 1
    elif i - j == 0:
        rho = 0
    else:
        rho = 2
    delta = abs(clip(i - j, -(relative_distance - 1), relative_distance - 1))
    return direction[rho] * distance[delta]  # [d]


def ddrp_scores(query: Tensor, key: Tensor, direction: Tensor, distance: Tensor, positions: list[int]) -> Tensor:
    """DDRP logits, eq. 9, before any padding mask: `[heads, S, S]`.

    query, key: `[heads, S, d]`. direction `[3, d]` and distance `[r_s, d]` are shared by the heads.
    positions: the S position numbers; token a sits at position `positions[a]`.
    """
    heads, _, head_dim = query.shape
    scores = []
    for head in range(heads):
        for a, i in enumerate(positions):
            for b, j in enumerate(positions):
                placed_key = key[head, b] + ddrp_row(direction, distance, i, j)  # [d]
                scores.append(dot(query[head, a], placed_key) / math.sqrt(head_dim))
    return torch.stack(scores).reshape(heads, len(positions), len(positions))


def absolute_scores(query: Tensor, key: Tensor) -> Tensor:
    """BERT's logits, eq. 2, before any padding mask: query, key `[heads, S, d]` to `[heads, S, S]`."""
    heads, seq, head_dim = query.shape
    scores = []
    for head in range(heads):
        for i in range(seq):
            for j in range(seq):
                scores.append(dot(query[head, i], key[head, j]) / math.sqrt(head_dim))
    return torch.stack(scores).reshape(heads, seq, seq)
