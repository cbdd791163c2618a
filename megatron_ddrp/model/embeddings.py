"""The first stage: token, segment and (where the encoding wants it) absolute position embeddings, then LayerNorm."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_ddrp.config import ModelConfig
from megatron_ddrp.errors import UserError
from megatron_ddrp.model.positions import REGISTRY
from megatron_ddrp.model.stages import NUM_LOSSES, StageState

NUM_SEGMENTS = 2


def check_length(length: int, longest: int) -> None:
    """Refuse rows for whose positions nothing was learned."""
    if length > longest:
        raise UserError(
            f"rows of {length} tokens: this model has positions for --seq-length {longest} only; cut them, or train an "
            "encoding that is relative"
        )


class Embeddings(nn.Module):
    """Ids → the first `StageState`; computes the position tensors that all layers share."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dropout = config.hidden_dropout
        self.token = nn.Embedding(config.padded_vocab_size, config.hidden_size)
        self.segment = nn.Embedding(NUM_SEGMENTS, config.hidden_size)
        encoding = REGISTRY[config.position_encoding](config)
        self.longest = config.seq_length if encoding.limits_length else None
        self.absolute = (
            nn.Embedding(config.seq_length, config.hidden_size) if encoding.adds_absolute_embedding else None
        )
        self.position = encoding if config.relative_table == "shared" else None
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layernorm_epsilon)

    def embed(self, input_ids: Tensor, segment_ids: Tensor, position_ids: Tensor) -> Tensor:
        """int64 `[batch, seq]` each → `[batch, seq, hidden]`."""
        if self.longest is not None:
            check_length(input_ids.shape[1], self.longest)
        hidden = self.token(input_ids) + self.segment(segment_ids)
        if self.absolute is not None:
            hidden = hidden + self.absolute(position_ids)
        return F.dropout(self.norm(hidden), self.dropout, self.training)

    def forward(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """(input_ids, segment_ids, document_ids, position_ids, labels, token_mask, heads) → packed `StageState`."""
        input_ids, segment_ids, document_ids, position_ids, labels, token_mask, heads = tensors
        hidden = self.embed(input_ids, segment_ids, position_ids)
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        losses = torch.zeros(NUM_LOSSES, dtype=dtype, device=hidden.device)
        position = self.position(position_ids) if self.position is not None else ()
        return StageState(hidden, losses, position, document_ids, position_ids, labels, token_mask, heads).pack()
