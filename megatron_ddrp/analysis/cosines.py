"""Cosines between the rows of an encoding's query table for the keys k places to the right and k places to the left.

Near 1, the two rows are parallel: this table cannot tell left from right, whatever the query.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.model import Encoder
from megatron_ddrp.model.encoder import EncoderLayer
from megatron_ddrp.model.stages import Draws, Inputs, State

NEAR = 8
"""Number of distances of the first mean."""


@torch.no_grad()
def table_cosines(model: Encoder) -> list[float] | None:
    """Return the cosine of T^q[+k] and T^q[−k] for k = 1, 2, …, or None for an encoding without T^q.

    A cosine is the mean over the layers and, if the table belongs to single heads, over the heads. Only distances count
    that occur: below `seq_length`, and within the window of a local layer. `model` is in eval mode.
    """
    state, longest = _first_state(model), model.config.seq_length - 1
    by_layer = []
    for layer in model.layers:
        assert isinstance(layer, EncoderLayer)
        terms = layer.terms(state).within(min(layer.attention.window or longest, longest)).by_offset
        if terms.query_table is None:
            return None
        steps = torch.arange(1, min(-terms.lowest, terms.highest) + 1, device=terms.query_table.device)
        one, other = (terms.query_table[:, sign * steps - terms.lowest] for sign in (1, -1))  # [1 or heads, k, d]
        by_layer.append(torch.cosine_similarity(one.double(), other.double(), dim=-1).mean(0))
    return pad_sequence(by_layer, batch_first=True, padding_value=math.nan).nanmean(0).tolist()


def near_and_far(cosines: Sequence[float] | None) -> tuple[float | None, float | None]:
    """Return the means over k = 1 … `NEAR` and over all k; None without cosines."""
    return (statistics.fmean(cosines[:NEAR]), statistics.fmean(cosines)) if cosines else (None, None)


def _first_state(model: Encoder) -> State:
    """Return the state before the first layer for one row of the longest length, on the model's device."""
    nothing = torch.zeros(1, model.config.seq_length, dtype=torch.long, device=next(model.parameters()).device)
    batch = Batch.of_texts(nothing, torch.ones_like(nothing))
    return model.embeddings(Inputs.of(batch, Draws.none(1, model.config.num_layers, nothing.device)))
