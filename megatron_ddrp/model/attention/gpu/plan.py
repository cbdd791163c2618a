"""Arguments of the Triton kernels that follow from shapes and settings: equal for all layers of a micro-batch.

Names: b = batch, h = heads, s = sequence, d = head size.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from megatron_ddrp.model.attention.attending import Attending
from megatron_ddrp.model.attention.gpu import launching
from megatron_ddrp.model.attention.gpu.offsets import Offsets

DROPOUT_STEPS = 65536
"""Steps of the dropout rate, decided by 16 bits per pair: 0.1 acts as 6554/65536, and kept values are scaled to
match."""


class Plan(NamedTuple):
    """Arguments of the kernels that contain no tensor."""

    offsets: Offsets
    tiles: launching.Tiles
    numbers: tuple[float, int]
    sizes: tuple[int, int, int]
    constants: dict[str, Any]


class Facts(NamedTuple):
    """Shapes and settings that decide a `Plan`."""

    shape: tuple[int, ...]
    """`[b, s, h, d]` of the queries."""
    dtype: torch.dtype
    capability: tuple[int, int]
    scale: float
    lowest: int
    highest: int
    of_terms: tuple[tuple[int, ...] | None, ...]
    """Shapes of the terms' tensors, in the order of `HEAD_DIMENSIONS`."""
    window: int | None
    dropout: float
    compared: int
    """Number of heads that HCD compares."""

    @classmethod
    def of(cls, attending: Attending) -> Facts:
        """Return the facts of a call."""
        query, terms = attending.query, attending.terms
        batch, num_heads, seq, head_dim = query.shape
        of_query = ((batch, seq, num_heads, head_dim), query.dtype, launching.capability_of(query.device))
        of_terms = tuple(None if x is None else x.shape for x in terms.tensors)
        bounds = (terms.scale, terms.lowest, terms.highest)
        return cls(*of_query, *bounds, of_terms, attending.window, attending.dropout, len(attending.heads))


@lru_cache(maxsize=1024)
def plan_of(facts: Facts) -> Plan:
    """Return the plan of a call. Its parts cost more time than a launch, so calls of one shape share it."""
    batch, seq, num_heads, head_dim = facts.shape
    has_query_table, has_key_table, has_bias, has_offset_bias = (shape is not None for shape in facts.of_terms)
    bias_shape = facts.of_terms[2]
    window = None if facts.window is None or facts.window >= seq - 1 else facts.window
    offsets = Offsets(facts.lowest, facts.highest, seq)
    chosen = launching.tiles(head_dim, facts.dtype, facts.capability, has_key_table, offsets.cover_all)
    reach = seq if window is None else chosen.largest + 2 * window
    leaves_band = window is None or window - min(-facts.lowest, facts.highest) >= chosen.smallest
    has_bins = (has_query_table or has_key_table or has_offset_bias) and not offsets.cover_all
    constants = {
        "D": head_dim,
        "D_PAD": max(16, _next_power_of_2(head_dim)),
        "S_PAD": max(512, _next_power_of_2(min(seq, reach))),
        "TABLE_ROWS": offsets.rows,
        "LOWEST": offsets.lowest,
        "HIGHEST": offsets.highest,
        "WINDOW": window,
        "RUNS": 3 if has_bins and leaves_band else 1,
        "BIAS_BATCHED": bias_shape is not None and bias_shape[0] > 1,
        "COUNT": facts.compared,
        "COUNT_PAD": max(2, _next_power_of_2(facts.compared)),
        # fp32 as three products on tensor cores is as exact as fp32; a single product keeps 10 bits.
        "PRECISION": "tf32x3" if facts.dtype == torch.float32 else "tf32",
    }
    drop_below = min(max(round(facts.dropout * DROPOUT_STEPS), 1), DROPOUT_STEPS - 1)
    return Plan(offsets, chosen, (facts.scale, drop_below), (batch, num_heads, seq), constants)


def _next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()
