"""One Transformer layer: attention, feed-forward, residuals; LayerNorm after each block (BERT) or before it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_ddrp.config import ModelConfig
from megatron_ddrp.model.attention import BACKENDS, resolve_backend
from megatron_ddrp.model.positions import REGISTRY, PositionTerms
from megatron_ddrp.model.stages import HCD, NUM_LOSSES, StageState


class SelfAttention(nn.Module):
    """Projections around the one attention. The local number of heads follows from the weights' shapes."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.dropout = config.attention_dropout
        self.backend = config.attention_backend
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)
        self.output = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(
        self, hidden: Tensor, terms: PositionTerms, document_ids: Tensor, heads: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """`[batch, seq, hidden]` → the same, and HCD's mean cosine `[batch]` of `heads` `[m′]` (None for none)."""
        batch, seq, _ = hidden.shape

        def split(x: Tensor) -> Tensor:
            return x.view(batch, seq, -1, self.head_dim).transpose(1, 2)  # [batch, heads, seq, head_dim]

        attend = BACKENDS[resolve_backend(self.backend, hidden.device)]
        context, cosine = attend(
            split(self.query(hidden)),
            split(self.key(hidden)),
            split(self.value(hidden)),
            terms,
            document_ids,
            heads,
            self.dropout if self.training else 0.0,
        )
        return self.output(context.transpose(1, 2).reshape(batch, seq, -1)), cosine


class FeedForward(nn.Module):
    """Two linear maps with an exact GELU between them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input = nn.Linear(config.hidden_size, config.ffn_size)
        self.output = nn.Linear(config.ffn_size, config.hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.output(F.gelu(self.input(hidden)))


class EncoderLayer(nn.Module):
    """Packed `StageState` → packed `StageState`; adds this layer's share of HCD to the losses."""

    def __init__(self, config: ModelConfig, number: int) -> None:
        super().__init__()
        self.config, self.number = config, number
        self.attention = SelfAttention(config)
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layernorm_epsilon)
        self.feed_forward = FeedForward(config)
        self.feed_forward_norm = nn.LayerNorm(config.hidden_size, eps=config.layernorm_epsilon)
        encoding = REGISTRY[config.position_encoding]
        self.position = encoding(config) if config.relative_table == "per-layer" else None
        self.name_terms = encoding.terms

    def forward(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        state = StageState.unpack(tensors)
        position = state.position if self.position is None else self.position(state.position_ids)
        terms = self.name_terms(self.config, position)
        before = self.config.layernorm_position == "pre"

        def dropout(x: Tensor) -> Tensor:
            return F.dropout(x, self.config.hidden_dropout, self.training)

        hidden = state.hidden
        context, cosine = self.attention(
            self.attention_norm(hidden) if before else hidden, terms, state.document_ids, state.heads[self.number]
        )
        hidden = hidden + dropout(context)
        hidden = hidden if before else self.attention_norm(hidden)
        expanded = self.feed_forward(self.feed_forward_norm(hidden) if before else hidden)
        hidden = hidden + dropout(expanded)
        hidden = hidden if before else self.feed_forward_norm(hidden)
        losses = state.losses if cosine is None else state.losses + self._hcd_share(cosine, state)
        return state._replace(hidden=hidden, losses=losses).pack()

    def _hcd_share(self, cosine: Tensor, state: StageState) -> Tensor:
        """Σ over the sequences with at least two valid tokens ÷ layers, at HCD's place in `[3]`."""
        counted = (state.document_ids > 0).sum(-1) >= 2  # [batch]
        share = torch.where(counted, cosine, 0.0).sum() / self.config.num_layers
        place = torch.arange(NUM_LOSSES, device=share.device) == HCD
        return torch.where(place, share, 0.0).to(state.losses.dtype)
