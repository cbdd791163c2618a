"""Direction of attention: probabilities above the diagonal (to the right) and below it (to the left).

The heads are divided evenly (section 5.3 and appendix C of the paper): for each sentence and layer, the half that looks
most to the right is group 1, the half that looks most to the left group 2. With an odd number of heads, the middle one
belongs to neither. The triangles exclude the diagonal; [CLS] and [SEP] count like other tokens.
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


def layer_maps(model: Encoder, batch: Batch) -> Iterator[Tensor]:
    """Yield the attention probabilities of each layer, `[batch, heads, seq, seq]`.

    They are 0 in the rows and columns of padding, and outside the window of a local layer.
    """
    for logits, window in layer_logits(model, batch):
        allowed = allowed_pairs(batch.document_ids, window)
        yield probabilities(logits, allowed, dropout=0.0).masked_fill(~allowed, 0.0)


@torch.no_grad()
def layer_logits(model: Encoder, batch: Batch) -> Iterator[tuple[Tensor, int | None]]:
    """Yield the attention logits of each layer, `[batch, heads, seq, seq]`, and its window in tokens.

    The logits have values at padding and outside the window too; the window of a layer without one is None.
    """
    nothing = Draws.none(len(batch.input_ids), model.config.num_layers, batch.document_ids.device)
    state = model.embeddings(Inputs.of(batch, nothing))
    for layer in model.layers:
        assert isinstance(layer, EncoderLayer)
        yield layer.logits(state), layer.attention.window
        state = layer(state)


def sides(maps: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums above and below the diagonal, divided by the sentence's length, `[batch, heads]` each.

    `maps` is `[batch, heads, seq, seq]` with 0 for padding, `lengths` `[batch]`.
    """
    n = lengths[:, None].to(maps.dtype)
    return maps.triu(1).sum((-2, -1)) / n, maps.tril(-1).sum((-2, -1)) / n


def divide_heads(up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers of the heads of group 1 and of group 2, int64 `[batch, heads // 2]` each.

    `up` and `down` are those of `sides`. Raises `UserError` for a model with one head.
    """
    num_heads = up.shape[-1]
    if num_heads < 2:
        raise UserError("heads are divided into two groups, but this model has one head: use a model with two or more")
    order = (up - down).argsort(dim=-1, descending=True, stable=True)
    return order[:, : num_heads // 2], order[:, num_heads - num_heads // 2 :]
