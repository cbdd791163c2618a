"""Similarity of a sentence's tokens and of a layer's heads (eq. 15 and 16, figures 2 and 3a of the paper).

    f(S) = 2/(n(n−1)) Σ_{i<j} cos(h_i, h_j)              over the last hidden states of all n tokens
    f(H) = 2/(L m(m−1)) Σ_l Σ_{i<j} cos(a_i^l, a_j^l)    over the logits of all m heads of each of L layers

They are TCD and HCD over all tokens and heads and share their closed forms, which compute no cosine of a single pair.
Both are means over sentences; `a` is the pre-softmax logits, as in HCD.

Cosines between the rows of an encoding's query table for the keys k places to the right and k places to the left.

Near 1, the two rows are parallel: this table cannot tell left from right, whatever the query.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.encoders.layers import layer_states
from megatron_ddrp.errors import UserError
from megatron_ddrp.model import Encoder
from megatron_ddrp.model.encoder import EncoderLayer
from megatron_ddrp.model.similarity import document_mask, token_cosine
from megatron_ddrp.model.stages import Draws, Inputs, State


@dataclass(frozen=True)
class Similarity:
    """Means over sentences, each in [−1, 1]."""

    token_similarity: float
    """f(S), the mean cosine of two tokens of a sentence."""
    head_similarity_by_layer: tuple[float, ...]
    """Terms of f(H), from the first layer to the last."""
    sentences: int

    @property
    def head_similarity(self) -> float:
        """f(H), the mean cosine of two heads of a layer, averaged over layers."""
        return sum(self.head_similarity_by_layer) / len(self.head_similarity_by_layer)


def measure_similarity(model: Encoder, batches: Iterable[Batch]) -> Similarity:
    """Return f(S) and f(H) of a model over batches of sentences on its device.

    Raises `UserError` for a model with one head.
    """
    if model.config.num_attention_heads < 2:
        raise UserError("f(H) compares attention heads, but this model has one: use a model with two or more")
    tokens, heads, count = 0.0, torch.zeros(model.config.num_layers, dtype=torch.float64), 0
    for batch in batches:
        token_sum, head_sums = similarity_sums(model, batch)
        tokens += float(token_sum)
        heads += head_sums.double().cpu()
        count += len(batch.input_ids)
    return Similarity(tokens / count, tuple((heads / count).tolist()), count)


def similarity_sums(model: Encoder, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return sums over the sentences of a batch: of the mean cosine of tokens, and of heads per layer, `[layers]`."""
    by_layer = []
    for layer in layer_states(model, batch):
        if layer.head_cosine is not None:
            by_layer.append(layer.head_cosine)
    token_mask = document_mask(batch.document_ids, 1).long()  # [batch, 1, seq]
    return token_cosine(layer.hidden, token_mask).sum(), torch.stack(by_layer)


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
