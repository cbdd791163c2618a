"""Hidden states of every layer, for models of this project and for models that transformers runs.

Layer 0 is the embeddings, layer L the last hidden states (after the final LayerNorm of a pre-LN model). A layer between
gives the states that the next layer reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.encoders.huggingface import foreign_inputs
from megatron_ddrp.errors import UserError
from megatron_ddrp.model import Encoder as ModelEncoder
from megatron_ddrp.model.stages import Draws, Inputs


class LayerStates(NamedTuple):
    """States of one layer over a batch."""

    hidden: Tensor
    """`[batch, seq, hidden]`."""
    head_cosine: Tensor | None
    """Mean pairwise cosine of the heads' attention logits, summed over the sentences (scalar). None for the embeddings,
    for a model with one head, for a model that transformers runs, and without `with_heads`."""


@torch.no_grad()
def layer_states(model: Any, batch: Batch, with_heads: bool = True) -> Iterator[LayerStates]:
    """Yield the states of layers 0 to L. `model` is an `Encoder` or an encoder of transformers.

    Without `with_heads` the heads are not compared, which saves their logits. Raises `UserError` for an encoder whose
    layers have fewer states than tokens.
    """
    own = isinstance(model, ModelEncoder)
    yield from _own_states(model, batch, with_heads) if own else _foreign_states(model, batch)


def _own_states(model: ModelEncoder, batch: Batch, with_heads: bool) -> Iterator[LayerStates]:
    num_heads, num_layers = model.config.num_attention_heads, model.config.num_layers
    compared = num_heads if with_heads and num_heads > 1 else 0
    heads = torch.arange(compared, device=batch.document_ids.device).expand(num_layers, -1)  # [layers, heads]
    nothing = Draws.none(len(batch.input_ids), num_layers, batch.document_ids.device)
    state = model.embeddings(Inputs.of(batch, nothing._replace(heads=heads)))
    yield LayerStates(state.hidden, None)
    for number, layer in enumerate(model.layers, 1):
        state = layer(state)
        hidden = state.hidden if number < num_layers else model.head.last_hidden(state.hidden)
        yield LayerStates(hidden, state.head_cosine if compared else None)
        state = state._replace(head_cosine=torch.zeros_like(state.head_cosine))


def _foreign_states(model: Any, batch: Batch) -> Iterator[LayerStates]:
    output = model(**foreign_inputs(model.config, batch), output_hidden_states=True)
    states = (*output.hidden_states[:-1], output.last_hidden_state)
    if any(hidden.shape[:2] != batch.input_ids.shape for hidden in states):
        kind = model.config.model_type
        raise UserError(f"layers of a {kind} shorten their rows: use an encoder with one state per token and layer")
    for hidden in states:
        yield LayerStates(hidden, None)
