"""Where heads look: attention probabilities above the diagonal (to the right) and below it (to the left).

Heads are divided evenly (section 5.3, appendix C): for each sentence and layer, the half that looks most to the right
is group 1, the half that looks most to the left group 2. Of an odd number of heads the middle one is in neither.
Triangles are strict, and [CLS] and [SEP] are tokens like others.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.errors import UserError
from megatron_ddrp.model import Encoder
from megatron_ddrp.model.attention.backends import probabilities
from megatron_ddrp.model.attention.logits import allowed_pairs
from megatron_ddrp.model.encoder import EncoderLayer
from megatron_ddrp.model.stages import Draws, Inputs


@torch.no_grad()
def layer_maps(model: Encoder, batch: Batch) -> Iterator[Tensor]:
    """Yield the attention probabilities of each layer, `[batch, heads, seq, seq]`; padding's rows and columns are 0.

    So is in a local layer all outside of its window.
    """
    nothing = Draws.none(len(batch.input_ids), model.config.num_layers, batch.document_ids.device)
    state = model.embeddings(Inputs.of(batch, nothing))
    for layer in model.layers:
        assert isinstance(layer, EncoderLayer)
        logits, allowed = layer.logits(state), allowed_pairs(batch.document_ids, layer.attention.window)
        yield probabilities(logits, allowed, dropout=0.0).masked_fill(~allowed, 0.0)
        state = layer(state)


def sides(maps: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums of the strict upper and lower triangles ÷ the sentence's own length, `[batch, heads]` each.

    `maps` `[batch, heads, seq, seq]` with padding 0, `lengths` `[batch]`.
    """
    n = lengths[:, None].to(maps.dtype)
    return maps.triu(1).sum((-2, -1)) / n, maps.tril(-1).sum((-2, -1)) / n


def divide_heads(up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """Return the heads that look most to the right, and most to the left, int64 `[batch, heads // 2]` each."""
    num_heads = up.shape[-1]
    if num_heads < 2:
        raise UserError("the heads are divided into two groups, and this model has one: give a model with two or more")
    order = (up - down).argsort(dim=-1, descending=True, stable=True)
    return order[:, : num_heads // 2], order[:, num_heads - num_heads // 2 :]
