"""Slow twins of every position encoding's attention logits, before any padding mask, and of DeBERTa's mask decoder.

i = query, j = key: the tokens' position numbers, which restart in a packed row, not their indices. Pairs of different
documents get values too; softmax never sees them. Everything is torch.float64 and differentiable. Each twin takes query
and key `[heads, S, d]` and the S position numbers, and returns the logits before any padding mask, `[heads, S, S]`.

"Better Pre-Training by Reducing Representation Confusion":

Eq. 2:  A[i,j] = Q_i · K_j / sqrt(d)                                   (absolute: positions live in the input alone)
Eq. 4:  A[i,j] = Q_i · (K_j + K^r_{sigma(i,j)}) / sqrt(d)              (BERT-R, Shaw et al.)
Eq. 5:  sigma(i,j) = clip(i - j) + r_s, with clip's bounds -r_s .. r_s - 1, so that K^r has exactly 2·r_s rows
Eq. 9:  A[i,j] = Q_i · (K_j + K^d_{delta(i,j)}) / sqrt(d)              (DDRP)
Eq. 10: K^d_{delta(i,j)} = D_{rho(i,j)} * K^rd_{delta(i,j)}            (element by element)
Eq. 11: rho(i,j) = 1 if i - j < 0, 0 if i - j = 0, 2 if i - j > 0
Eq. 12: delta(i,j) = |clip(i - j)|

The paper leaves DDRP's bounds open; its count of r_s + 3 vectors closes them: -(r_s - 1) .. r_s - 1, so that K^rd has
exactly r_s rows.

T5's relative bias (Raffel et al., arXiv:1910.10683, section 2.1), its buckets by exact fractions:

A[i,j] = Q_i · K_j / sqrt(d) + beta[bucket(j - i), h]

32 buckets: 0 .. 15 for keys at or left of the query, 16 .. 31 for keys right of it (16 itself is never used). Distances
0 .. 7 have a bucket each. The logarithms of the distances from 8 to the largest one are cut into 8 equal parts, and the
last bucket also takes all that is farther:

    bucket 8 + n begins where ln(a / 8) = n / 8 · ln(largest / 8), that is, where (a / 8)^8 = (largest / 8)^n

T5 itself has no 1 / sqrt(d).

TUPE-A and TUPE-R (Ke et al., "Rethinking Positional Encoding in Language Pre-training", arXiv:2006.15595):

A[i,j] = (x_i W^Q)(x_j W^K) / sqrt(2d)  +  reset_theta( (p_i U^Q)(p_j U^K) / sqrt(2d) )_ij  [ + b_bucket(j - i) ]

p: a learned table of max length + 1 rows, each through a LayerNorm. The token at position t uses row t + 1. [CLS], the
token at position 0, is untied, one pair of values a head: theta_1 (CLS to others) from row 0 with itself, theta_2
(others to CLS) from row 1 with itself; the column is written before the row, so CLS to CLS is theta_1. Every document
of a packed row has its own [CLS]. TUPE-R adds T5's bucket bias, 32 buckets and a maximal distance of 128, from a table
of 33 rows a head: T5's map never uses rows 16 and 32, which serve CLS to others and others to CLS, written in the same
order. Another maximal distance may be given: from there on one bucket serves each direction, also where that begins
before the logarithmic ones do.

DeBERTa and its enhanced mask decoder (He et al., arXiv:2006.03654, version 1):

A[i,j] = ( Q_i · K_j  +  Q_i · K^r_delta(i,j)  +  K_j · Q^r_delta(i,j) ) / sqrt(3d)
delta(i,j) = clip(i - j + k, 0, 2k - 1);   K^r = P W^{K,r},   Q^r = P W^{Q,r} + its bias

P is a table of 2k rows. The paper's text writes delta(j,i) in the third term; the released code, which decides here,
uses delta(i,j) for both. Enhanced mask decoder: the absolute embedding of each place joins H[L-1] to ask, and the last
layer is applied twice to what asks; keys and values are H[L-1]'s in both, the residual runs along the asking states.

DeBERTa's attention as of version 2 (He et al., arXiv:2111.09543, and the released code):

A[i,j] = ( Q_i · K_j  +  Q_i · K^r_delta  +  K_j · Q^r_delta ) / sqrt(3d),   delta = clip(bucket(i - j) + b, 0, 2b - 1)
K^r = LayerNorm(R) W^K + b^K,   Q^r = LayerNorm(R) W^Q + b^Q,   by the layer's own maps of keys and queries

R has 2b rows. With m = b / 2, offsets up to m are their own bucket; of larger ones up to M - 1, those in

    ((M - 1) / m)^((k - 1) / (m - 1))  <  |x| / m  <=  ((M - 1) / m)^(k / (m - 1))

are bucket k + m, by exact fractions here, with the sign of the offset. Offsets beyond M - 1 have the bucket of M - 1.

Rotary positions (Su et al., RoFormer, arXiv:2104.09864), two numbers at a time. Eq. 34: the pair number t of a vector
of d numbers, at position p, is turned by the angle p · theta^(-2t/d), where theta is 10000:

    (a, b) becomes (a cos - b sin, b cos + a sin)

and A[i,j] is the product of the turned query at i and the turned key at j, over sqrt(d). The paper's pair t are the
numbers 2t and 2t + 1; ours t and t + d/2, in which only the order of the numbers differs.

ALiBi (Press et al., arXiv:2108.12409), symmetric: A[h,i,j] = Q_i·K_j / sqrt(d) − m_h·|i − j|; with learned slopes for
each direction m = log(1 + e^a), with a of the head's left ones for j < i, of its right ones for j > i.
"""

import math
from collections.abc import Callable
from fractions import Fraction
from functools import cache

import torch
from torch import Tensor, dot, nn

from tests.reference.attention import bert_layer, layer_norm, linear, split_heads

HALF, EXACT, MAX_DISTANCE = 16, 8, 128
CLS_TO_OTHERS, OTHERS_TO_CLS = 16, 32
THETA, EPS = 10000.0, 1e-12
Scores = Callable[[Tensor, Tensor], Tensor]
"""The logits `[heads, S, S]` as a function of query and key `[heads, S, d]`."""


def over_pairs(query: Tensor, key: Tensor, positions: list[int], entry: Callable[..., Tensor]) -> Tensor:
    """`[heads, S, S]` of entry(q, k, head, i, j) for each query q `[d]` at position i and each key k at position j."""
    entries = []
    for head, (queries, keys) in enumerate(zip(query, key, strict=True)):
        for q, i in zip(queries, positions, strict=True):
            entries += [entry(q, k, head, i, j) for k, j in zip(keys, positions, strict=True)]
    return torch.stack(entries).reshape(len(query), len(positions), len(positions))


def clip(difference: int, low: int, high: int) -> int:
    """`difference` held within `low .. high`, both ends included."""
    return low if difference < low else high if difference > high else difference


def scaled(q: Tensor, k: Tensor) -> Tensor:
    """q · k / sqrt(d), both `[d]`; a scalar."""
    return dot(q, k) / math.sqrt(len(q))


def absolute_scores(query: Tensor, key: Tensor) -> Tensor:
    """BERT's logits, eq. 2."""
    return over_pairs(query, key, list(range(query.shape[1])), lambda q, k, *_: scaled(q, k))


def bert_r_scores(query: Tensor, key: Tensor, relative: Tensor, positions: list[int]) -> Tensor:
    """BERT-R logits, eq. 4; relative: K^r `[2 · r_s, d]`, shared by the heads."""
    relative_distance = relative.shape[0] // 2

    def entry(q: Tensor, k: Tensor, _head: int, i: int, j: int) -> Tensor:
        sigma = clip(i - j, -relative_distance, relative_distance - 1) + relative_distance
        return scaled(q, k + relative[sigma])

    return over_pairs(query, key, positions, entry)


def ddrp_row(direction: Tensor, distance: Tensor, i: int, j: int) -> Tensor:
    """K^d of eq. 10 for query position i and key position j: `[d]`.

    direction: D `[3, d]`, rows 0 same place, 1 key to the right (i < j), 2 key to the left (i > j).
    distance: K^rd `[r_s, d]`.
    """
    relative_distance = distance.shape[0]
    rho = 1 if i - j < 0 else 0 if i - j == 0 else 2
    delta = abs(clip(i - j, -(relative_distance - 1), relative_distance - 1))
    return direction[rho] * distance[delta]  # [d]


def ddrp_scores(query: Tensor, key: Tensor, direction: Tensor, distance: Tensor, positions: list[int]) -> Tensor:
    """DDRP logits, eq. 9; direction `[3, d]` and distance `[r_s, d]` are shared by the heads."""
    return over_pairs(query, key, positions, lambda q, k, _, i, j: scaled(q, k + ddrp_row(direction, distance, i, j)))


@cache
def t5_bucket(offset: int, largest: int = MAX_DISTANCE) -> int:
    """Row of T5's table for a key at `offset` = j - i: 0..15 for keys at or left of the query, 17..31 right of it."""
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
    """T5's logits; table `[32, heads]`."""
    return over_pairs(query, key, positions, lambda q, k, h, i, j: scaled(q, k) + table[t5_bucket(j - i, largest), h])


def tupe_bucket(i: int, j: int, max_distance: int = MAX_DISTANCE) -> int:
    """Row of TUPE-R's bias table for query position i and key position j."""
    return CLS_TO_OTHERS if i == 0 else OTHERS_TO_CLS if j == 0 else t5_bucket(j - i, max_distance)


def tupe_position_term(params: dict[str, Tensor], positions: list[int], num_heads: int, eps: float = 1e-12) -> Tensor:
    """The content-independent logits of TUPE-A: `[heads, S, S]`.

    params: `table` `[max length + 1, D]`; `norm.weight`, `norm.bias` `[D]`; `query.weight`, `key.weight` `[D, D]` as
    `[out, in]` and `query.bias`, `key.bias` `[D]` (U^Q and U^K).
    """
    places = layer_norm(params["table"], params["norm.weight"], params["norm.bias"], eps)  # [max length + 1, D]
    asking = split_heads(linear(places, params["query.weight"], params["query.bias"]), num_heads)
    asked = split_heads(linear(places, params["key.weight"], params["key.bias"]), num_heads)
    head_dim = asking.shape[2]

    def entry(head: int, i: int, j: int) -> Tensor:
        # theta_1, theta_2 and all others
        left, right = (0, 0) if i == 0 else (1, 1) if j == 0 else (i + 1, j + 1)
        return dot(asking[head, left], asked[head, right]) / math.sqrt(2 * head_dim)

    entries = [entry(head, i, j) for head in range(num_heads) for i in positions for j in positions]
    return torch.stack(entries).reshape(num_heads, len(positions), len(positions))


def tupe_scores(
    query: Tensor, key: Tensor, params: dict[str, Tensor], positions: list[int], max_distance: int = MAX_DISTANCE
) -> Tensor:
    """TUPE's logits.

    params: as for `tupe_position_term`; with `buckets` `[33, heads]` it is TUPE-R, without it TUPE-A.
    """

    def entry(q: Tensor, k: Tensor, head: int, i: int, j: int) -> Tensor:
        content = dot(q, k) / math.sqrt(2 * len(q))
        return content + params["buckets"][tupe_bucket(i, j, max_distance), head] if "buckets" in params else content

    return over_pairs(query, key, positions, entry) + tupe_position_term(params, positions, len(query))


def deberta_scores(query: Tensor, key: Tensor, params: dict[str, Tensor], positions: list[int]) -> Tensor:
    """DeBERTa's logits.

    params: `table` P `[2k, D]`; `key.weight` W^{K,r} and `query.weight` W^{Q,r} `[D, D]` as `[out, in]`, `query.bias`
    `[D]`; the released code gives W^{K,r} no bias.
    """
    span = params["table"].shape[0] // 2  # k
    place_key = split_heads(linear(params["table"], params["key.weight"], None), len(query))  # [heads, 2k, d]
    place_query = split_heads(linear(params["table"], params["query.weight"], params["query.bias"]), len(query))

    def entry(q: Tensor, k: Tensor, head: int, i: int, j: int) -> Tensor:
        delta = clip(i - j + span, 0, 2 * span - 1)
        content_to_position, position_to_content = dot(q, place_key[head, delta]), dot(k, place_query[head, delta])
        return (dot(q, k) + content_to_position + position_to_content) / math.sqrt(3 * len(q))

    return over_pairs(query, key, positions, entry)


def enhanced_mask_decoder(
    hidden: Tensor,
    absolute: Tensor,
    params: dict[str, Tensor],
    scores_fn: Scores,
    document_ids: list[int],
    positions: list[int],
    chosen: list[int],
    num_heads: int,
    layernorm_eps: float = 1e-12,
    layernorm_position: str = "post",
) -> Tensor:
    """States that predict the tokens at the indices `chosen`: `[len(chosen), D]`.

    hidden: H[L-1] `[S, D]`, the last layer's input. absolute: `[max length, D]`. params, scores_fn: the last layer's,
    as for `bert_layer`. Every place is decoded here; a place's answer depends on no other place's question.
    """
    layer = hidden, params, scores_fn, document_ids, num_heads, layernorm_eps, layernorm_position
    asking = torch.stack([row + absolute[place] for row, place in zip(hidden, positions, strict=True)])  # [S, D]
    return bert_layer(*layer, queries=bert_layer(*layer, queries=asking))[chosen]


def deberta_v2_buckets(number: int, longest: int) -> list[int]:
    """The bucket of each distance 0, ..., longest - 1."""
    half = number // 2
    found = list(range(min(half + 1, longest)))
    k = 1
    for distance in range(half + 1, longest):
        while distance ** (half - 1) * half**k > half ** (half - 1) * (longest - 1) ** k:
            k += 1
        found.append(half + (k if half > 1 else 0))
    return found


def deberta_v2_row(offset: int, number: int, table: list[int]) -> int:
    """Row of R for i - j = `offset`; `table` is that of `deberta_v2_buckets`."""
    far = table[min(abs(offset), len(table) - 1)]
    return clip((far if offset > 0 else -far) + number, 0, 2 * number - 1)


def turned(vector: Tensor, place: int, theta: float = THETA) -> Tensor:
    """A query or key `[d]` turned to its place, pairs being t and t + d/2."""
    size, half, numbers = len(vector), len(vector) // 2, list(vector)
    for t in range(half):
        angle = place / theta ** (2 * t / size)
        a, b = vector[t], vector[t + half]
        numbers[t] = a * math.cos(angle) - b * math.sin(angle)
        numbers[t + half] = b * math.cos(angle) + a * math.sin(angle)
    return torch.stack(numbers)


def alibi_slopes(heads: int) -> list[float]:
    """The slopes of `heads` heads: the rule for powers of two, and its mixture for others."""
    power = 2 ** math.floor(math.log2(heads))
    if power == heads:
        return [2 ** (-8 * (head + 1) / heads) for head in range(heads)]
    return alibi_slopes(power) + alibi_slopes(2 * power)[0::2][: heads - power]


def alibi_scores(query: Tensor, key: Tensor, left: list, right: list, positions: list[int]) -> Tensor:
    """ALiBi's logits, with each head's slopes to the left and to the right."""

    def entry(q: Tensor, k: Tensor, head: int, i: int, j: int) -> Tensor:
        bias = left[head] * (i - j) if j < i else right[head] * (j - i)
        return scaled(q, k) - bias

    return over_pairs(query, key, positions, entry)


def alibi_asym(query: Tensor, key: Tensor, encoding: nn.Module, _part: nn.Module, positions: list[int]) -> Tensor:
    left, right = ([(1 + a.exp()).log() for a in slopes] for slopes in (encoding.left, encoding.right))
    return alibi_scores(query, key, left, right, positions)


def tupe(query: Tensor, key: Tensor, encoding: nn.Module, _part: nn.Module, positions: list[int]) -> Tensor:
    modules = {"norm": encoding.norm, "query": encoding.query, "key": encoding.key}
    params = {f"{name}.{part}": getattr(modules[name], part) for name in modules for part in ("weight", "bias")}
    params |= {"table": encoding.table} | ({"buckets": encoding.relative} if hasattr(encoding, "relative") else {})
    return tupe_scores(query, key, params, positions, getattr(encoding, "largest_distance", MAX_DISTANCE))


def deberta(query: Tensor, key: Tensor, encoding: nn.Module, part: nn.Module, positions: list[int]) -> Tensor:
    params = {"key.weight": part.key.weight, "query.weight": part.query.weight}
    params |= {"table": encoding.relative, "query.bias": part.query.bias}
    return deberta_scores(query, key, params, positions)


def deberta_v2(
    query: Tensor, key: Tensor, encoding: nn.Module, _part: nn.Module, positions: list[int], *maps: nn.Linear
) -> Tensor:
    states = layer_norm(encoding.relative, encoding.norm.weight, encoding.norm.bias, EPS)  # [2b, D]
    place_query, place_key = (split_heads(linear(states, each.weight, each.bias), len(query)) for each in maps)
    number = len(states) // 2
    table = deberta_v2_buckets(number, encoding.longest)

    def entry(q: Tensor, k: Tensor, head: int, i: int, j: int) -> Tensor:
        delta = deberta_v2_row(i - j, number, table)
        return (dot(q, k + place_key[head, delta]) + dot(k, place_query[head, delta])) / math.sqrt(3 * len(q))

    return over_pairs(query, key, positions, entry)


def rope(query: Tensor, key: Tensor, _encoding: nn.Module, part: nn.Module, positions: list[int]) -> Tensor:
    theta = part.local_theta if part.is_local and part.local_theta is not None else part.theta
    return over_pairs(query, key, positions, lambda q, k, _, i, j: scaled(turned(q, i, theta), turned(k, j, theta)))


TWINS: dict[str, Callable[..., Tensor]] = {
    "absolute": lambda query, key, *_: absolute_scores(query, key),
    "alibi": lambda query, key, _, __, places: alibi_scores(query, key, *[alibi_slopes(len(query))] * 2, places),
    "alibi-asym": alibi_asym,
    "bert-r": lambda query, key, own, _, places: bert_r_scores(query, key, own.relative, places),
    "ddrp": lambda query, key, own, _, places: ddrp_scores(query, key, own.direction, own.distance, places),
    "deberta": deberta,
    "deberta-v2": deberta_v2,
    "nope": lambda query, key, *_: absolute_scores(query, key),
    "rope": rope,
    "t5": lambda query, key, own, _, places: t5_scores(query, key, own.relative, places, own.largest_distance),
    "tupe-a": tupe,
    "tupe-r": tupe,
}
"""Encoding → its twin: query and key, the `PositionEncoding` in use, a layer's part of it and the S position numbers to
the logits.

A twin of a layer's part that uses the layer's linear maps of queries and keys takes these two as well.
"""
COMPARED: dict[str, Scores] = {"alibi": absolute_scores}
"""Encoding → the logits that HCD compares, where they are others: here without the bias."""
