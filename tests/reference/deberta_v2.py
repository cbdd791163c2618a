"""Slow twin of DeBERTa's attention logits as of version 2 (He et al., arXiv:2111.09543, and the released code).

A[i,j] = ( Q_i · K_j  +  Q_i · K^r_delta  +  K_j · Q^r_delta ) / sqrt(3d),   delta = clip(bucket(i - j) + b, 0, 2b - 1)
K^r = LayerNorm(R) W^K + b^K,   Q^r = LayerNorm(R) W^Q + b^Q,   by the layer's own maps of keys and queries

R has 2b rows. With m = b / 2, offsets up to m are their own bucket; of larger ones up to M - 1, those in

    ((M - 1) / m)^((k - 1) / (m - 1))  <  |x| / m  <=  ((M - 1) / m)^(k / (m - 1))

are bucket k + m, by exact fractions here, with the sign of the offset. Offsets beyond M - 1 have the bucket of M - 1.
i = query, j = key: position numbers, which restart in a packed row. Everything is torch.float64 and differentiable.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.reference.attention import layer_norm, linear, split_heads
from tests.reference.positions import clip, dot

EPS = 1e-12


def buckets(number: int, longest: int) -> list[int]:
    """The bucket of each distance 0, ..., longest - 1."""
    half = number // 2
    found = list(range(min(half + 1, longest)))
    k = 1
    for distance in range(half + 1, longest):
        while distance ** (half - 1) * half**k > half ** (half - 1) * (longest - 1) ** k:
            k += 1
        found.append(half + (k if half > 1 else 0))
    return found


def row(offset: int, number: int, table: list[int]) -> int:
    """Row of R for i - j = `offset`; `table` is that of `buckets`."""
    far = table[min(abs(offset), len(table) - 1)]
    return clip((far if offset > 0 else -far) + number, 0, 2 * number - 1)


def deberta_v2_scores(
    query: Tensor, key: Tensor, place_query: Tensor, place_key: Tensor, positions: list[int], longest: int
) -> Tensor:
    """The logits before any padding mask: query, key `[heads, S, d]` to `[heads, S, S]`.

    place_query Q^r, place_key K^r: `[heads, 2b, d]`. positions: the S position numbers. longest: M.
    """
    heads, seq, head_dim = query.shape
    number = place_key.shape[1] // 2
    table = buckets(number, longest)
    scores = []
    for head in range(heads):
        for a, i in enumerate(positions):
            for b, j in enumerate(positions):
                delta = row(i - j, number, table)
                of_query = dot(query[head, a], key[head, b] + place_key[head, delta])
                total = of_query + dot(key[head, b], place_query[head, delta])
                scores.append(total / math.sqrt(3 * head_dim))
    return torch.stack(scores).reshape(heads, seq, seq)


def twin(
    encoding: nn.Module, _layer_part: nn.Module, positions: list[int], query_map: nn.Linear, key_map: nn.Linear
) -> Callable[[Tensor, Tensor], Tensor]:
    """The logits as a function of query and key."""

    def scores(query: Tensor, key: Tensor) -> Tensor:
        states = layer_norm(encoding.relative, encoding.norm.weight, encoding.norm.bias, EPS)
        of_query, of_key = (
            split_heads(linear(states, each.weight, each.bias), len(query)) for each in (query_map, key_map)
        )
        return deberta_v2_scores(query, key, of_query, of_key, positions, encoding.longest)

    return scores
