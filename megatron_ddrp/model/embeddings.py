"""The first stage: token, segment and absolute position embeddings (the last two are optional), then LayerNorm."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_ddrp.config import ModelConfig, encoding_class
from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.errors import UserError
from megatron_ddrp.model.fused import Norm
from megatron_ddrp.model.similarity import document_mask
from megatron_ddrp.model.stages import Inputs, State, blend


def check_length(length: int, longest: int) -> None:
    """Raise `UserError` for rows longer than the model's positions."""
    if length > longest:
        raise UserError(
            f"rows of {length} tokens: this model has positions for --seq-length {longest} only; shorten them, or "
            "train a relative encoding"
        )


class Embeddings(nn.Module):
    """`Inputs` → `State`: embeds the ids and computes the position tensors that all layers share.

    Embeddings narrower or wider than the hidden states (`--embedding-size`) are projected after their norm, as in
    ELECTRA. `shared` serves ELECTRA's generator: it lends token, segment and absolute embeddings and their norm, and
    the result is projected to the generator's hidden size.
    """

    tables: tuple[str, ...] = ("token",)
    """Names of the embeddings with one row per piece of the vocabulary."""

    def __init__(self, config: ModelConfig, notes_share: float = 0.0, shared: Embeddings | None = None) -> None:
        super().__init__()
        self.config, self.notes_share = config, notes_share
        width = config.embedding_width
        if shared is None:
            self.token = nn.Embedding(config.padded_vocab_size, width)
            self.segment = nn.Embedding(config.num_segments, width) if config.num_segments else None
        else:
            self.token, self.segment, width = shared.token, shared.segment, shared.token.embedding_dim
        self.projection: nn.Module | None = None
        if shared is not None or width != config.hidden_size:
            self.projection = nn.Linear(width, config.hidden_size, bias=config.bias)
        encoding = encoding_class(config.position_encoding)(config)
        adds_absolute = config.adds_absolute_embedding
        self.longest = config.seq_length if encoding.limits_length or adds_absolute else None
        if shared is None:
            self.absolute = nn.Embedding(config.seq_length, width) if adds_absolute else None
        else:
            self.absolute = shared.absolute
        self.position = encoding if config.relative_table == "shared" else None
        self.norm: nn.Module = Norm(width, config) if shared is None else shared.norm
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, inputs: Inputs) -> State:
        """Return the input state of the first layer."""
        hidden = self.embed(inputs)
        nothing = torch.zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)
        position: tuple[Tensor, ...] = ()
        if self.position is not None:
            position = self.position.of_rows(inputs.batch.position_ids, inputs.layout.restarts)
        lengths = document_mask(inputs.batch.document_ids, inputs.draws.num_documents).sum(-1)  # [batch, documents]
        return State(inputs, hidden, position, inputs.draws.heads, (lengths >= 2).float(), nothing)

    def look_up(self, input_ids: Tensor) -> Tensor:
        """Return the token embeddings: int64 `[batch, seq]` → `[batch, seq, hidden]`."""
        return self.token(input_ids)

    def embed(self, inputs: Inputs) -> Tensor:
        """Return `[batch, seq, hidden]`: the sum of the embeddings, blended with notes, then normalised."""
        batch, notes = inputs.batch, inputs.notes
        if self.longest is not None:
            check_length(batch.input_ids.shape[1], self.longest)
        hidden = self.tokens(batch)
        if self.absolute is not None:
            hidden = hidden + self.absolute(batch.position_ids)
        if notes is not None:
            hidden = blend(hidden, notes.places, notes.vectors.to(hidden.dtype), self.notes_share)
        hidden = self.dropout(self.norm(hidden))
        return hidden if self.projection is None else self.projection(hidden)

    def tokens(self, batch: Batch) -> Tensor:
        """Return the sum of token and segment embeddings, `[batch, seq, width]`."""
        tokens = self.look_up(batch.input_ids)
        if self.segment is None:
            return tokens
        segments = batch.segment_ids if self.segment.num_embeddings > 1 else torch.zeros_like(batch.segment_ids)
        return tokens + self.segment(segments)
