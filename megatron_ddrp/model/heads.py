"""The last stage: TCD on the last hidden states, and the masked-LM head on the predicted positions alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_ddrp.config import ModelConfig
from megatron_ddrp.data.batch import IGNORED_LABEL
from megatron_ddrp.model.stages import HCD, StageState
from megatron_ddrp.objectives.mlm import masked_lm_sum
from megatron_ddrp.objectives.mth import token_cosine


class MaskedLMHead(nn.Module):
    """Dense, GELU, LayerNorm, then the token embedding itself as the output matrix (tied), plus a bias a piece."""

    def __init__(self, config: ModelConfig, token_embedding: nn.Embedding) -> None:
        super().__init__()
        self.vocab_size = config.vocab_size
        self.final_norm = (
            nn.LayerNorm(config.hidden_size, eps=config.layernorm_epsilon)
            if config.layernorm_position == "pre"
            else None
        )
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layernorm_epsilon)
        self.decoder = nn.Linear(config.hidden_size, config.padded_vocab_size)
        self.decoder.weight = token_embedding.weight

    def last_hidden(self, hidden: Tensor) -> Tensor:
        """The encoder's output, `[batch, seq, hidden]`: normalised once more in a pre-LN model."""
        return hidden if self.final_norm is None else self.final_norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """`[.., hidden]` → `[.., padded_vocab]`, −∞ at the padding of the vocabulary."""
        logits = self.decoder(self.norm(F.gelu(self.dense(hidden))))
        padding = torch.arange(logits.shape[-1], device=logits.device) >= self.vocab_size
        return logits.masked_fill(padding, float("-inf")) if len(padding) > self.vocab_size else logits

    def forward(self, tensors: tuple[Tensor, ...]) -> Tensor:
        """Packed `StageState` → the sums `[3]` of the LM, TCD and HCD terms over this micro-batch."""
        state = StageState.unpack(tensors)
        hidden = self.last_hidden(state.hidden)
        predicted = (state.labels.flatten() != IGNORED_LABEL).nonzero().squeeze(-1)  # [num_predicted]
        chosen = hidden.flatten(0, 1).index_select(0, predicted)  # [num_predicted, hidden]
        lm = masked_lm_sum(self.logits(chosen), state.labels.flatten()[predicted])
        tcd = token_cosine(hidden, state.token_mask).sum() if state.token_mask.shape[1] else lm.new_zeros(())
        return torch.stack((lm, tcd, state.losses[HCD]))
