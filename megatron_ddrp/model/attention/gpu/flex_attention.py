"""torch's FlexAttention with the position terms as a learned score modification: compiled, no logits are stored.

The formula of `model/attention/logits.py`: P^q = Q·T^qᵀ, P^k = K·T^kᵀ (`[b, h, s, rows]`) and v are captured and
looked up by clip(i − j, lowest, highest) for each pair, and document ids make the block mask. Limits of FlexAttention:
no dropout; no backward pass on CPUs; the gradients of P and v are summed by atomic additions, in an order that changes
from run to run. So it is offered, not chosen by `auto`.

Names: b = batch, h = heads, s = sequence, d = head size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from megatron_ddrp.model.attention.attending import Attending
from megatron_ddrp.model.attention.logits import tapped_cosine
from megatron_ddrp.model.positions.contract import PositionTerms

SMALLEST_HEAD = 16
LOWEST_CAPABILITY = (8, 0)


def why_not_flex(device: torch.device, dtype: torch.dtype, dropout: float, head_dim: int) -> str | None:
    """Say in one line why this backend cannot serve training; None where it can."""
    if dropout > 0:
        return f"flex attention has no dropout, got {dropout}: use --attention-dropout 0 or another backend"
    if device.type != "cuda":
        return f"flex attention has no backward pass on {device.type}: use another backend"
    capability = torch.cuda.get_device_capability(device)
    if capability < LOWEST_CAPABILITY:
        got = ".".join(map(str, capability))
        return f"flex attention needs compute capability 8.0 (A100) or newer, this GPU has {got}: use sdpa"
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"flex attention takes bfloat16, float16 or float32, got {str(dtype).removeprefix('torch.')}"
    if head_dim < SMALLEST_HEAD:
        return f"flex attention takes heads of {SMALLEST_HEAD} and wider, got {head_dim}: use another backend"
    return None


def _by_offset(vectors: Tensor, table: Tensor | None) -> Tensor | None:
    """Return P `[b, h, s, rows]`, in fp32 at least, since its gradient is a long sum of atomic additions."""
    return None if table is None else _wide(vectors @ table.to(vectors.dtype).transpose(-1, -2))


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _score_mod(query: Tensor, key: Tensor, terms: PositionTerms) -> Callable[..., Tensor] | None:
    """Return the function that turns Q_i·K_j·scale into A, or None where nothing is to be added."""
    if terms.content_only:
        return None
    by_query, by_key = _by_offset(query, terms.query_table), _by_offset(key, terms.key_table)
    bias, scale, lowest, highest = terms.bias, terms.scale, terms.lowest, terms.highest
    shares_bias = bias is not None and bias.shape[0] == 1
    by_offset = None if terms.offset_bias is None else _wide(terms.offset_bias).expand(query.shape[1], -1)

    def add_terms(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        row = (i - j).clamp(lowest, highest) - lowest
        if by_query is not None:
            score = score + by_query[b, h, i, row] * scale
        if by_key is not None:
            score = score + by_key[b, h, j, row] * scale
        if bias is not None:
            score = score + bias[b * 0 if shares_bias else b, h, i, j]
        if by_offset is not None:
            score = score + by_offset[h, row]
        return score

    return add_terms


def _block_mask(document_ids: Tensor) -> flex.BlockMask:
    def same_document(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (document_ids[b, i] == document_ids[b, j]) & (document_ids[b, i] > 0)

    batch, seq = document_ids.shape
    return flex.create_block_mask(same_document, batch, None, seq, seq, device=str(document_ids.device))


_eager: Any = flex.flex_attention


@cache
def _compiled() -> Any:
    """Return one compiled function per process; past its recompile limit it fails instead of storing all logits."""
    return torch.compile(_eager, fullgraph=True)


def flex_attention(attending: Attending) -> tuple[Tensor, Tensor | None]:
    """Compute attention as the other backends do. Raises ValueError for dropout.

    CPUs take the uncompiled function, forward only.
    """
    attending, cosine = tapped_cosine(attending)
    query, key, value, terms, document_ids, _, dropout, _ = attending
    if dropout > 0:
        raise ValueError(why_not_flex(query.device, query.dtype, dropout, query.shape[-1]))
    attend = _compiled() if query.device.type == "cuda" else _eager
    context = attend(
        query,
        key,
        value,
        score_mod=_score_mod(query, key, terms),
        block_mask=_block_mask(document_ids),
        scale=terms.scale,
    )
    return context, cosine
