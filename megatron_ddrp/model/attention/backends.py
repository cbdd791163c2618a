"""Attention for every encoding: the backends that compute it, and the choice among them.

All of them compute logits (`logits.py`), mask, softmax, dropout and the product with the values. `eager` stores the
logits A and is the reference. `sdpa` passes all terms but Q·K to torch's fused attention as a dense bias. `blocked`
(cpu.py) works in cache-sized tiles and is the fastest on CPUs. `triton` (triton_attention.py) works in tiles on GPUs,
with kernels of its own, and recomputes A in the backward pass. Each takes an `Attending` and also returns HCD's mean
pairwise cosine, by its cheapest method.

Names: b = batch, h = heads, s = sequence, d = head size.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ddrp.model.attention.cpu import blocked_attention
from megatron_ddrp.model.attention.gpu.triton_attention import triton_attention, why_not_triton
from megatron_ddrp.model.attention.logits import (
    Attending,
    Backend,
    Demand,
    attention_logits,
    in_reach,
    position_logits,
    sum_of_counted,
    tapped_cosine,
)
from megatron_ddrp.model.embeddings import document_mask, logits_cosine
from megatron_ddrp.model.fused import is_nvidia
from megatron_ddrp.model.positions.contract import UNBOUNDED, PositionTerms

LOWEST_CAPABILITY = (8, 0)
LARGEST_HEAD = 192
"""Largest head size for which every GPU of that capability has flash attention's backward pass."""


def why_not_flash(demand: Demand) -> str | None:
    """Return the reason why flash attention cannot run, in one line, or None if it can."""
    if not is_nvidia(demand.device):
        return f"flash attention needs an NVIDIA GPU, got {demand.device.type}"
    if torch.cuda.get_device_capability(demand.device) < LOWEST_CAPABILITY:
        return "flash attention needs compute capability 8.0 (A100) or newer"
    if demand.dtype not in (torch.bfloat16, torch.float16):
        return f"flash attention takes bfloat16 or float16, got {demand.dtype}".replace("torch.", "")
    if demand.head_dim % 8 or demand.head_dim > LARGEST_HEAD:
        return f"flash attention takes heads of a multiple of 8 up to {LARGEST_HEAD}, got {demand.head_dim}"
    return None


def why_not_varlen(demand: Demand) -> str | None:
    """Return the reason why `varlen_attention` cannot run, in one line, or None if it can."""
    if demand.dropout:
        return f"varlen attention has no dropout, got {demand.dropout}"
    return why_not_flash(demand)


def varlen_attention(attending: Attending) -> Tensor:
    """Return the context `[b, h, s, d]` of content-only logits; the layout must be known.

    It serves rows with several documents or padding as runs of tokens laid end to end, each of which attends to itself
    (`torch.nn.attention.varlen`). So no mask is stored, and no pair of two documents or outside the window is computed.
    Padding is a run of its own, and its output is never read. Limits: no dropout, no bias, half precision, GPUs from
    A100 on.
    """
    from torch.nn.attention import varlen

    layout, (batch, _, seq, head_dim) = attending.layout, attending.query.shape
    assert layout is not None
    query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in attending[:3])  # [b·s, h, d]
    if not math.isclose(attending.terms.scale, head_dim**-0.5):  # torch 2.11 accepts no other scale
        query = query * (attending.terms.scale * head_dim**0.5)
    runs, window = (layout.runs, layout.runs, layout.longest, layout.longest), attending.window
    options: dict[str, Any] = {}
    if not attending.demand.whole:  # both ends are inclusive, and −1 is no end
        before = -1 if window is None else window
        options["window_size"] = (before, 0 if attending.causal else before)
    context = varlen.varlen_attn(query, key, value, *runs, **options)
    assert isinstance(context, Tensor)
    return context.unflatten(0, (batch, seq)).transpose(1, 2)


def eager_attention(attending: Attending) -> tuple[Tensor, Tensor | None]:
    """Compute the reference: store A, mask it with a finite value and normalise in fp32 or wider."""
    query, key, value, terms, document_ids, heads, dropout, *_ = attending
    logits = attention_logits(query, key, terms)
    allowed = attending.allowed
    weights = probabilities(logits, allowed, dropout).to(value.dtype)
    cosine = None
    if len(heads):
        compared = logits if terms.compared is terms else attention_logits(query, key, terms.compared)
        chosen = compared.index_select(1, heads)
        chosen = chosen.to(torch.promote_types(logits.dtype, torch.float32))
        documents = document_mask(document_ids, attending.num_documents)
        cosine = sum_of_counted(logits_cosine(chosen, allowed, documents), attending)
    return weights @ value, cosine


def sdpa_attention(attending: Attending) -> tuple[Tensor, Tensor | None]:
    """Call torch's fused attention with a dense bias `[b, h, s, s]`.

    If the encoding adds nothing to the logits, full rows need no mask, so flash attention can compute them, causal or
    not. Other rows, and all rows under a window, use varlen attention where it is available and a mask `[b, 1, s, s]`
    elsewhere.
    """
    attending, cosine = tapped_cosine(attending)
    query, key, value, terms, _, _, dropout, *_ = attending
    mask = position_logits(query, key, terms)
    mask = None if mask is None else mask.to(query.dtype)
    is_causal = attending.causal and mask is None and attending._replace(causal=False).full
    if mask is not None and not attending.full:
        mask = mask.masked_fill(~attending.allowed, torch.finfo(query.dtype).min)
    elif mask is None and not attending.full and not is_causal:
        if attending.layout is not None and why_not_varlen(attending.demand) is None:
            return varlen_attention(attending), cosine
        # A fully masked row of a boolean mask gives NaN, so padding attends to padding; its output is never read.
        allowed = attending.allowed
        mask = allowed | ~allowed.any(-1, keepdim=True)
    options: dict[str, Any] = {"attn_mask": mask, "dropout_p": dropout, "is_causal": is_causal, "scale": terms.scale}
    return F.scaled_dot_product_attention(query, key, value, **options), cosine


def cpu_attention(attending: Attending) -> tuple[Tensor, Tensor | None]:
    """Call `blocked_attention`; compute HCD separately if it compares other logits or has a cheaper closed form."""
    if attending.terms.compared is attending.terms and not attending.compares_content:
        return blocked_attention(attending)
    attending, cosine = tapped_cosine(attending)
    return blocked_attention(attending)[0], cosine


def attend_from(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    terms: PositionTerms,
    places: Tensor,
    document_ids: Tensor,
    dropout: float,
    reached: tuple[int, int] = (-UNBOUNDED, UNBOUNDED),
) -> Tensor:
    """Compute attention for some queries only: `query` `[b, h, m, d]`, at `places` `[b, m]` of the sequence → the same.

    `key`, `value` `[b, h, s, d]`; `reached` as `reached_offsets`. The queries' places are arbitrary, so m·s offsets are
    gathered.
    """
    batch, num_heads, count, _ = query.shape
    seq, terms = key.shape[2], terms.by_offset
    logits = (query * terms.scale) @ key.transpose(-1, -2)  # [b, h, m, s]
    offset = places.unsqueeze(-1) - torch.arange(seq, device=places.device)  # i − j, [b, m, s]
    index = (offset.clamp(terms.lowest, terms.highest) - terms.lowest).unsqueeze(1).expand(-1, num_heads, -1, -1)
    if terms.query_table is not None:
        per_offset = query @ terms.query_table.transpose(-1, -2)  # [b, h, m, num_relative]
        logits = logits + per_offset.gather(-1, index) * terms.scale
    if terms.key_table is not None:
        per_offset = terms.key_table @ key.transpose(-1, -2)  # [b, h, num_relative, s]
        logits = logits + per_offset.gather(-2, index) * terms.scale
    if terms.bias is not None:
        rows = places[:, None, :, None].expand(-1, num_heads, -1, seq)
        logits = logits + terms.bias.expand(batch, num_heads, -1, -1).gather(2, rows)
    if terms.offset_bias is not None:
        logits = logits + terms.offset_bias[:, None].expand(batch, num_heads, count, -1).gather(-1, index)
    own = document_ids.gather(1, places).unsqueeze(-1)  # [b, m, 1]
    allowed = (own == document_ids.unsqueeze(1)) & (own > 0) & in_reach(offset, reached)  # [b, m, s]
    return probabilities(logits, allowed.unsqueeze(1), dropout).to(value.dtype) @ value


def probabilities(logits: Tensor, allowed: Tensor, dropout: float) -> Tensor:
    """Return the softmax over the allowed pairs, masked with a finite value, in fp32 or wider; then apply dropout."""
    masked = logits.masked_fill(~allowed, torch.finfo(logits.dtype).min)
    return F.dropout(masked.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32)), dropout)


def attention_map(attending: Attending) -> Tensor:
    """Return the probabilities of every head before dropout, fp32 (or fp64) `[b, h, s, s]`, for any backend."""
    logits = attention_logits(attending.query, attending.key, attending.terms)
    return probabilities(logits, attending.allowed, 0.0)


BACKENDS: dict[str, Backend] = {"eager": eager_attention, "sdpa": sdpa_attention, "blocked": cpu_attention}
"""Backends that run on every device."""

GPU_BACKENDS = {"triton": (triton_attention, why_not_triton)}
"""Backends for some GPUs, each with the function that returns the reason why it cannot run."""


def backend_function(name: str) -> Backend:
    """Return the attention function of a backend."""
    return BACKENDS[name] if name in BACKENDS else GPU_BACKENDS[name][0]


def refusal(name: str, demand: Demand) -> str | None:
    """Return the reason why a backend cannot run here, in one line, or None if it can."""
    return GPU_BACKENDS[name][1](demand) if name in GPU_BACKENDS else None


def resolve_backend(name: str, demand: Demand, in_logits: bool, full: bool = True) -> tuple[str, str]:
    """Return the backend that `--attention-backend` selects for an encoding, and the reason in a few words.

    `in_logits` is true if the encoding adds anything to the logits. `full` is true if each row of this micro-batch is
    one document without padding; it makes no difference under a window.
    """
    if name != "auto":
        return name, "as asked for"
    if demand.device.type != "cpu":
        return _auto_with_terms(demand) if in_logits else _auto_without_terms(demand, full)
    if in_logits:
        return "blocked", "fastest on CPUs with terms in the logits"
    if demand.window is not None:
        return "blocked", "fastest on CPUs for local layers"
    if demand.causal:
        return "blocked", "computes no pairs with following tokens"
    if demand.dropout:
        return "blocked", "fastest on CPUs with dropout"
    if demand.dtype == torch.bfloat16:
        return "blocked", "fastest on CPUs in bf16"
    return "sdpa", "fastest on CPUs in fp32 without terms in the logits and without dropout"


def reads_runs(name: str, demand: Demand, in_logits: bool, full: bool) -> bool:
    """Return whether a backend computes varlen attention, which reads the runs of tokens in the rows."""
    backend, _ = resolve_backend(name, demand, in_logits, full)
    is_whole = full and demand.window is None
    return backend == "sdpa" and not in_logits and not is_whole and why_not_varlen(demand) is None


def _auto_with_terms(demand: Demand) -> tuple[str, str]:
    """Choose a backend for an encoding with terms in the logits.

    Triton also serves a bias that the whole batch shares: sdpa would write and sum its gradient as `[b, h, s, s]`.
    """
    reason = why_not_triton(demand)
    if reason is None:
        return "triton", "stores no logits; no GPU has run these kernels yet, make gpu-report tests yours"
    return "sdpa", f"works on every GPU; {reason.rpartition(': ')[0]}"


def _auto_without_terms(demand: Demand, full: bool) -> tuple[str, str]:
    """Choose a backend for an encoding that adds nothing to the logits.

    For rows with padding or several documents varlen attention needs no mask but has no dropout. Triton's kernels have
    dropout and skip other documents too. Both skip pairs outside the window, which flash attention cannot.
    """
    if demand.window is not None:
        return _auto_in_window(demand)
    if why_not_flash(demand) is not None:
        return "sdpa", "works on every GPU"
    if why_not_varlen(demand) is None:
        return "sdpa", "flash for full rows, varlen for padded and packed ones"
    if why_not_triton(demand) is None:
        return "sdpa" if full else "triton", "flash for full rows, triton for padded and packed ones"
    return "sdpa", "flash for full rows, a mask for padded and packed ones"


def _auto_in_window(demand: Demand) -> tuple[str, str]:
    """Choose a backend for the local layers of an encoding that adds nothing to the logits."""
    if why_not_varlen(demand) is None:
        return "sdpa", "varlen for local layers"
    if why_not_triton(demand) is None:
        return "triton", "skips pairs outside the window"
    return "sdpa", "works on every GPU; a mask for local layers"
