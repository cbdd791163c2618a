"""Slow twin of rotary positions (Su et al., RoFormer, arXiv:2104.09864), two numbers at a time.

Eq. 34: the pair number t of a vector of d numbers, at position p, is turned by the angle p · theta^(-2t/d), where
theta is 10000:

    (a, b) becomes (a cos - b sin, b cos + a sin)

and A[i,j] is the product of the turned query at i and the turned key at j, over sqrt(d). The paper's pair t are the
numbers 2t and 2t + 1; ours t and t + d/2, in which only the order of the numbers differs. i = query, j = key: position
numbers. Everything is torch.float64 and differentiable.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.reference.positions import dot

THETA = 10000.0


def turned(vector: Tensor, place: int, theta: float = THETA) -> Tensor:
    """A query or key `[d]` turned to its place, pairs being t and t + d/2."""
    size = len(vector)
    half = size // 2
    numbers = list(vector)
    for t in range(half):
        angle = place / theta ** (2 * t / size)
        a, b = vector[t], vector[t + half]
        numbers[t] = a * math.cos(angle) - b * math.sin(angle)
        numbers[t + half] = b * math.cos(angle) + a * math.sin(angle)
    return torch.stack(numbers)


def rope_scores(query: Tensor, key: Tensor, positions: list[int], theta: float = THETA) -> Tensor:
    """RoFormer's logits before any padding mask: query, key `[heads, S, d]` to `[heads, S, S]`."""
    heads, _, head_dim = query.shape
    scores = []
    for head in range(heads):
        for a, i in enumerate(positions):
            for b, j in enumerate(positions):
                product = dot(turned(query[head, a], i, theta), turned(key[head, b], j, theta))
                scores.append(product / math.sqrt(head_dim))
    return torch.stack(scores).reshape(heads, len(positions), len(positions))


def twin(_encoding: nn.Module, layer_part: nn.Module, positions: list[int]) -> Callable[[Tensor, Tensor], Tensor]:
    """The logits as a function of query and key."""
    local = layer_part.is_local and layer_part.local_theta is not None
    theta = layer_part.local_theta if local else layer_part.theta
    return lambda query, key: rope_scores(query, key, positions, theta)
