"""Slow twins of TUPE-A and TUPE-R (Ke et al., "Rethinking Positional Encoding in Language Pre-training", 2006.15595).

A[i,j] = (x_i W^Q)(x_j W^K) / sqrt(2d)  +  reset_theta( (p_i U^Q)(p_j U^K) / sqrt(2d) )_ij  [ + b_bucket(j - i) ]

p: a learned table of max length + 1 rows, each through a LayerNorm. The token at position t uses row t + 1. [CLS], the
token at position 0, is untied, one pair of values a head: theta_1 (CLS to others) from row 0 with itself, theta_2
(others to CLS) from row 1 with itself; the column is written before the row, so CLS to CLS is theta_1. TUPE-R adds T5's
bucket bias, 32 buckets and a maximal distance of 128, from a table of 33 rows a head: T5's map never uses rows 16 and
32, which serve CLS to others and others to CLS, written in the same order. Another maximal distance may be given: from
there on one bucket serves each direction, also where that begins before the logarithmic ones do.

i = query, j = key: position numbers, so every document of a packed row has its own [CLS]. Pairs of different documents
get values too; softmax never sees them. Everything is torch.float64 and differentiable.
"""

import math

import torch
from torch import Tensor

from tests.reference.attention import layer_norm, linear, split_heads
from tests.reference.positions import dot

NUM_BUCKETS = 32
MAX_DISTANCE = 128
CLS_TO_OTHERS = 16
OTHERS_TO_CLS = 32


def t5_bucket(offset: int, max_distance: int = MAX_DISTANCE) -> int:
    """T5's bidirectional bucket of `offset` = j - i: 0..15 for keys at or left of the query, 17..31 right of it.

    Distances 0..7 have a bucket each; those from 8 share eight whose ends grow by a constant ratio, the last unending.
    """
    half = NUM_BUCKETS // 2
    exact = half // 2
    side = half if offset > 0 else 0
    distance = abs(offset)
    if distance >= max_distance:
        return side + half - 1
    if distance < exact:
        return side + distance
    share = math.log(distance / exact) / math.log(max_distance / exact)  # 0 at distance 8, 1 at the maximal one
    return side + min(exact + int(share * (half - exact)), half - 1)


def tupe_bucket(i: int, j: int, max_distance: int = MAX_DISTANCE) -> int:
    """Row of the bias table for query position i and key position j."""
    if i == 0:
        return CLS_TO_OTHERS
    if j == 0:
        return OTHERS_TO_CLS
    return t5_bucket(j - i, max_distance)


def tupe_position_term(params: dict[str, Tensor], positions: list[int], num_heads: int, eps: float = 1e-12) -> Tensor:
    """The content-independent logits of TUPE-A: `[heads, S, S]`.

    params: `table` `[max length + 1, D]`; `norm.weight`, `norm.bias` `[D]`; `query.weight`, `key.weight` `[D, D]` as
    `[out, in]` and `query.bias`, `key.bias` `[D]` (U^Q and U^K). positions: the S position numbers.
    """
    places = layer_norm(params["table"], params["norm.weight"], params["norm.bias"], eps)  # [max length + 1, D]
    asking = split_heads(linear(places, params["query.weight"], params["query.bias"]), num_heads)
    asked = split_heads(linear(places, params["key.weight"], params["key.bias"]), num_heads)
    head_dim = asking.shape[2]
    terms = []
    for head in range(num_heads):
        for i in positions:
            for j in positions:
                if i == 0:
                    left = right = 0  # theta_1
                elif j == 0:
                    left = right = 1  # theta_2
                else:
                    left, right = i + 1, j + 1
                terms.append(dot(asking[head, left], asked[head, right]) / math.sqrt(2 * head_dim))
    return torch.stack(terms).reshape(num_heads, len(positions), len(positions))


def bucket_term(buckets: Tensor, positions: list[int], max_distance: int = MAX_DISTANCE) -> Tensor:
    """TUPE-R's bias: table `[33, heads]` to `[heads, S, S]`."""
    rows = [
        torch.stack([buckets[tupe_bucket(i, j, max_distance)] for j in positions]) for i in positions
    ]  # S of [S, heads]
    return torch.stack(rows).permute(2, 0, 1)


def tupe_scores(
    query: Tensor, key: Tensor, params: dict[str, Tensor], positions: list[int], max_distance: int = MAX_DISTANCE
) -> Tensor:
    """TUPE's logits before any padding mask: query, key `[heads, S, d]` to `[heads, S, S]`.

    params: as for `tupe_position_term`; with `buckets` `[33, heads]` it is TUPE-R, without it TUPE-A.
    """
    heads, seq, head_dim = query.shape
    content = [
        dot(query[head, a], key[head, b]) / math.sqrt(2 * head_dim)
        for head in range(heads)
        for a in range(seq)
        for b in range(seq)
    ]
    scores = torch.stack(content).reshape(heads, seq, seq) + tupe_position_term(params, positions, heads)
    if "buckets" in params:
        scores = scores + bucket_term(params["buckets"], positions, max_distance)
    return scores
