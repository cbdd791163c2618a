"""Slow twin of attention and of one BERT encoder layer ("Better Pre-Training by Reducing Representation Confusion").

Eq. 1: Q = H W^Q, K = H W^K, V = H W^V           (with biases, as in BERT)
Eq. 3: Z = softmax(A) V                          (over the keys of the query's own document)

The logits A come from `positions.py`. Attention is allowed where query and key carry the same non-zero document id;
0 is padding and attends to nothing. Around it, BERT's layer: output projection, residual, LayerNorm (biased variance,
eps inside the root), and the feed-forward network with the exact gelu x/2 · (1 + erf(x / sqrt 2)). No dropout.
Everything is torch.float64 and differentiable.
"""

import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor, dot


def attend(scores: Tensor, value: Tensor, document_ids: list[int]) -> Tensor:
    """softmax(A) V over the allowed keys only: scores `[heads, S, S]`, value `[heads, S, d]` to `[heads, S, d]`.

    Rows of padding (document id 0) are zeros.
    """
    heads, seq, head_dim = value.shape
    rows = []
    for head, i in [(head, i) for head in range(heads) for i in range(seq)]:
        row = torch.zeros(head_dim, dtype=torch.float64)
        allowed = [j for j in range(seq) if document_ids[j] == document_ids[i] and document_ids[i] != 0]
        if allowed:
            largest = max(scores[head, i, j].item() for j in allowed)  # any constant cancels; this one cannot overflow
            weights = [torch.exp(scores[head, i, j] - largest) for j in allowed]
            total = sum(weights)
            for weight, j in zip(weights, allowed, strict=True):
                row = row + weight / total * value[head, j]
        rows.append(row)
    return torch.stack(rows).reshape(heads, seq, head_dim)


def within_window(scores: Tensor, window: int | None, causal: bool = False) -> Tensor:
    """Local attention (Beltagy et al., Longformer, arXiv:2004.05150, section 3.1): a query i attends to j if
    |i − j| <= window alone, to everything if window is None; causal attention (Vaswani et al., arXiv:1706.03762,
    section 3.2.3): if j <= i alone.

    Other entries of scores `[heads, S, S]` become −inf, which `attend` gives the weight 0.
    """
    seq, entries = range(scores.shape[-1]), []
    for head, i, j in itertools.product(scores, seq, seq):
        reaches = (window is None or abs(i - j) <= window) and (j <= i or not causal)
        entries.append(head[i, j] if reaches else torch.tensor(-math.inf, dtype=torch.float64))
    return torch.stack(entries).reshape(scores.shape)


def linear(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """hidden `[S, in]`, weight `[out, in]`, bias `[out]` or none to `[S, out]`."""
    return torch.stack([weight @ row if bias is None else weight @ row + bias for row in hidden])


def layer_norm(hidden: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Each row of hidden `[S, D]` to mean 0 and variance 1, then scaled and shifted by weight and bias `[D]`."""
    rows = []
    for row in hidden:
        centred = row - row.sum() / len(row)  # [D]
        variance = dot(centred, centred) / len(row)
        scaled = centred / torch.sqrt(variance + eps) * weight
        rows.append(scaled if bias is None else scaled + bias)
    return torch.stack(rows)


def rms_norm(hidden: Tensor, weight: Tensor, bias: None, eps: float) -> Tensor:
    """Each row of hidden `[S, D]` to mean square 1, then scaled by weight `[D]` (arXiv:1910.07467, eq. 4)."""
    return torch.stack([row / torch.sqrt(dot(row, row) / len(row) + eps) * weight for row in hidden])


def gelu(x: Tensor) -> Tensor:
    """x times the normal distribution's share below x, exactly; any shape."""
    return 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))


def silu(x: Tensor) -> Tensor:
    """x times the logistic function of x; any shape."""
    return x / (1.0 + torch.exp(-x))


def split_heads(hidden: Tensor, num_heads: int) -> Tensor:
    """`[S, heads·d]` to `[heads, S, d]`: head h owns columns h·d .. (h+1)·d - 1."""
    head_dim = hidden.shape[1] // num_heads
    return torch.stack([hidden[:, h * head_dim : (h + 1) * head_dim] for h in range(num_heads)])


def bert_layer(
    hidden: Tensor,
    params: dict[str, Tensor],
    scores_fn: Callable[[Tensor, Tensor], Tensor],
    document_ids: list[int],
    num_heads: int,
    layernorm_eps: float = 1e-12,
    layernorm_position: str = "post",
    queries: Tensor | None = None,
    norm: Callable[..., Tensor] = layer_norm,
    activation: Callable[[Tensor], Tensor] = gelu,
) -> Tensor:
    """One encoder layer: hidden `[S, D]` to `[S, D]`.

    params: `NAME.weight` and `NAME.bias`, weights as `[out, in]`, for NAME among query, key, value, attention_output,
        attention_norm, ffn_in, ffn_out, ffn_norm; no bias where its name is missing. With ffn_gate the block is GEGLU
        (arXiv:2002.05202, eq. 5): GELU of ffn_in times ffn_gate; with SiLU as activation it is SwiGLU. Without
        attention_norm a "pre" layer attends to what entered.
    scores_fn: query, key `[heads, S, d]` to the logits `[heads, S, S]`; a closure may keep them for HCD.
    layernorm_position: "post" normalises each residual sum (BERT), "pre" each sub-layer's input.
    queries: `[S, D]`, the states that ask and that the residual carries on; keys and values stay those of `hidden`.
        Left out: `hidden` itself, which is self-attention.
    """

    def project(name: str, x: Tensor) -> Tensor:
        return linear(x, params[f"{name}.weight"], params.get(f"{name}.bias"))

    def normalise(name: str, x: Tensor) -> Tensor:
        given = f"{name}.weight" in params
        return norm(x, params[f"{name}.weight"], params.get(f"{name}.bias"), layernorm_eps) if given else x

    def attention(asking: Tensor, asked: Tensor) -> Tensor:
        query = split_heads(project("query", asking), num_heads)
        key, value = (split_heads(project(name, asked), num_heads) for name in ("key", "value"))
        context = attend(scores_fn(query, key), value, document_ids)  # [heads, S, d]
        return project("attention_output", torch.cat(list(context), dim=1))  # [S, D]

    def feed_forward(x: Tensor) -> Tensor:
        inner = activation(project("ffn_in", x))
        return project("ffn_out", inner * project("ffn_gate", x) if "ffn_gate.weight" in params else inner)  # [S, D]

    stream = hidden if queries is None else queries
    if layernorm_position == "pre":
        stream = stream + attention(normalise("attention_norm", stream), normalise("attention_norm", hidden))
        return stream + feed_forward(normalise("ffn_norm", stream))
    stream = normalise("attention_norm", stream + attention(stream, hidden))
    return normalise("ffn_norm", stream + feed_forward(stream))
