"""Attention without position terms over rows that hold several documents or padding: torch's varlen flash attention.

`torch.nn.attention.varlen` (torch 2.10 and newer) takes runs of tokens laid end to end; each run attends to itself. So
no mask is stored, and no pair of two documents or outside the window is computed. Padding is a run of its own: nothing
has to be gathered, and its output is never read. Limits: no dropout, no bias, half precision, GPUs from A100 on.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megatron_ddrp.model.attention.attending import Attending, Demand

LOWEST_CAPABILITY = (8, 0)
LARGEST_HEAD = 192
"""Largest head size for which every GPU of that capability has flash attention's backward pass."""


def why_not_flash(demand: Demand) -> str | None:
    """Return the reason why flash attention cannot run, in one line, or None if it can."""
    if demand.device.type != "cuda" or torch.version.hip:
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
    if not _has_varlen():
        return f"varlen attention needs torch 2.10 or newer, got {torch.__version__}"
    if demand.dropout:
        return f"varlen attention has no dropout, got {demand.dropout}"
    if demand.window is not None and not _has_windows():
        return f"varlen attention has no window in torch {torch.__version__}, got {demand.window}"
    return why_not_flash(demand)


@cache
def _has_varlen() -> bool:
    return importlib.util.find_spec("torch.nn.attention.varlen") is not None


@cache
def _has_windows() -> bool:
    from torch.nn.attention import varlen

    return "window_size" in inspect.signature(varlen.varlen_attn).parameters


def varlen_attention(attending: Attending) -> Tensor:
    """Return the context `[b, h, s, d]` of content-only logits; the layout must be known."""
    from torch.nn.attention import varlen

    layout, (batch, _, seq, head_dim) = attending.layout, attending.query.shape
    assert layout is not None
    query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in attending[:3])  # [b·s, h, d]
    if not math.isclose(attending.terms.scale, head_dim**-0.5):  # torch 2.10 accepts no other scale
        query = query * (attending.terms.scale * head_dim**0.5)
    runs, window = (layout.runs, layout.runs, layout.longest, layout.longest), attending.window
    options: dict[str, Any] = {} if window is None else {"window_size": (window, window)}  # both ends are inclusive
    context = varlen.varlen_attn(query, key, value, *runs, **options)
    assert isinstance(context, Tensor)
    return context.unflatten(0, (batch, seq)).transpose(1, 2)
