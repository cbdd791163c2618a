"""Slow twins of DeBERTa's attention logits and enhanced mask decoder (He et al., arXiv:2006.03654, version 1).

A[i,j] = ( Q_i · K_j  +  Q_i · K^r_delta(i,j)  +  K_j · Q^r_delta(i,j) ) / sqrt(3d)
delta(i,j) = clip(i - j + k, 0, 2k - 1);   K^r = P W^{K,r},   Q^r = P W^{Q,r} + its bias

P is a table of 2k rows. The paper's text writes delta(j,i) in the third term; the released code, which decides here,
uses delta(i,j) for both. i = query, j = key: position numbers, which restart in a packed row.

Enhanced mask decoder: the absolute embedding of each place joins H[L-1] to ask, and the last layer is applied twice to
what asks; keys and values are H[L-1]'s in both, the residual runs along the asking states.
Everything is torch.float64 and differentiable.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tests.reference.attention import bert_layer, linear, split_heads
from tests.reference.positions import clip, dot


def deberta_scores(query: Tensor, key: Tensor, params: dict[str, Tensor], positions: list[int]) -> Tensor:
    """DeBERTa's logits before any padding mask: query, key `[heads, S, d]` to `[heads, S, S]`.

    params: `table` P `[2k, D]`; `key.weight` W^{K,r} and `query.weight` W^{Q,r} `[D, D]` as `[out, in]`, `query.bias`
    `[D]`; the released code gives W^{K,r} no bias. positions: the S position numbers.
    """
    heads, seq, head_dim = query.shape
    span = params["table"].shape[0] // 2  # k
    no_bias = torch.zeros(params["key.weight"].shape[0], dtype=torch.float64)
    place_key = split_heads(linear(params["table"], params["key.weight"], no_bias), heads)  # [heads, 2k, d]
    place_query = split_heads(linear(params["table"], params["query.weight"], params["query.bias"]), heads)
    scores = []
    for head in range(heads):
        for a, i in enumerate(positions):
            for b, j in enumerate(positions):
                delta = clip(i - j + span, 0, 2 * span - 1)
                content_to_content = dot(query[head, a], key[head, b])
                content_to_position = dot(query[head, a], place_key[head, delta])
                position_to_content = dot(key[head, b], place_query[head, delta])
                total = content_to_content + content_to_position + position_to_content
                scores.append(total / math.sqrt(3 * head_dim))
    return torch.stack(scores).reshape(heads, seq, seq)


def enhanced_mask_decoder(
    hidden: Tensor,
    absolute: Tensor,
    params: dict[str, Tensor],
    scores_fn: Callable[[Tensor, Tensor], Tensor],
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
    asking = torch.stack([row + absolute[place] for row, place in zip(hidden, positions, strict=True)])  # [S, D]
    for _ in range(2):
        asking = bert_layer(
            hidden, params, scores_fn, document_ids, num_heads, layernorm_eps, layernorm_position, queries=asking
        )
    return asking[chosen]
