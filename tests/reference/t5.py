"""Slow twin of T5's relative bias (Raffel et al., arXiv:1910.10683, section 2.1), its buckets by exact fractions.

A[i,j] = Q_i · K_j / sqrt(d) + beta[bucket(j - i), h]

32 buckets: 0 .. 15 for keys at or left of the query, 16 .. 31 for keys right of it (16 itself is never used). Distances
0 .. 7 have a bucket each. The logarithms of the distances from 8 to the largest one are cut into 8 equal parts, and the
last bucket also takes all that is farther:

    bucket 8 + n begins where ln(a / 8) = n / 8 · ln(largest / 8), that is, where (a / 8)^8 = (largest / 8)^n

i = query, j = key: position numbers. T5 itself has no 1 / sqrt(d). Everything is torch.float64 and differentiable.
"""

import math
from collections.abc import Callable
from fractions import Fraction

import torch
from torch import Tensor, nn

from tests.reference.positions import dot

HALF = 16
EXACT = 8


def bucket(offset: int, largest: int) -> int:
    """Row of the table for a key at `offset` = j - i."""
    side = HALF if offset > 0 else 0
    distance = abs(offset)
    if distance >= largest:
        return side + HALF - 1
    if distance < EXACT:
        return side + distance
    number = 0
    while Fraction(distance, EXACT) ** EXACT >= Fraction(largest, EXACT) ** (number + 1):
        number += 1
    return side + EXACT + number


def t5_scores(query: Tensor, key: Tensor, table: Tensor, positions: list[int], largest: int) -> Tensor:
    """T5's logits before any padding mask: query, key `[heads, S, d]`, table `[32, heads]` to `[heads, S, S]`."""
    heads, _, head_dim = query.shape
    scores = []
    for head in range(heads):
        for a, i in enumerate(positions):
            for b, j in enumerate(positions):
                content = dot(query[head, a], key[head, b]) / math.sqrt(head_dim)
                scores.append(content + table[bucket(j - i, largest), head])
    return torch.stack(scores).reshape(heads, len(positions), len(positions))


def twin(encoding: nn.Module, _layer_part: nn.Module, positions: list[int]) -> Callable[[Tensor, Tensor], Tensor]:
    """The logits as a function of query and key."""
    return lambda query, key: t5_scores(query, key, encoding.relative, positions, encoding.largest_distance)
