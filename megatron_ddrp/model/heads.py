"""The last stage: TCD on the last hidden states, and the masked-LM head on the predicted positions, or ELECTRA's."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_ddrp.config import ModelConfig
from megatron_ddrp.data.batches.batch import IGNORED_LABEL
from megatron_ddrp.model.embeddings import check_length
from megatron_ddrp.model.encoder import EncoderLayer
from megatron_ddrp.model.notes import window_means
from megatron_ddrp.model.replacing import best, rtd_sums, sample
from megatron_ddrp.model.similarity import token_cosine
from megatron_ddrp.model.stages import HCD, REPLACED, REPLACED_FOUND, RTD, RTD_CORRECT, TCD, StageState


def masked_lm_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum over predicted tokens of −log p(label), in nats.

    `logits` `[num_predicted, vocab]` in any precision, `labels` int64 `[num_predicted]` → fp32 (or fp64) scalar.
    """
    logits = logits if logits.dtype.itemsize >= 4 else logits.float()
    return F.cross_entropy(logits, labels, ignore_index=IGNORED_LABEL, reduction="sum")


class MaskedLMHead(nn.Module):
    """Dense, GELU, LayerNorm, then the token embedding itself as the output matrix (tied), plus a bias a piece.

    The embedding may be of another width than the hidden states, as for ELECTRA's generator; the dense map goes there.
    """

    def __init__(self, config: ModelConfig, token_embedding: nn.Embedding) -> None:
        super().__init__()
        self.vocab_size = config.vocab_size
        self.first_piece = 0  # that of the first logit: tensor parallelism gives each rank some rows of the vocabulary
        self.lm_sum = masked_lm_sum  # … and over all of them a cross entropy
        self.sample, self.best = sample, best  # … and ELECTRA's choices of a piece
        self.final_norm = (
            nn.LayerNorm(config.hidden_size, eps=config.layernorm_epsilon)
            if config.layernorm_position == "pre"
            else None
        )
        width = token_embedding.embedding_dim
        self.dense = nn.Linear(config.hidden_size, width)
        self.norm = nn.LayerNorm(width, eps=config.layernorm_epsilon)
        self.decoder = nn.Linear(width, config.padded_vocab_size)
        self.decoder.weight = token_embedding.weight

    def last_hidden(self, hidden: Tensor) -> Tensor:
        """The encoder's output, `[batch, seq, hidden]`: normalised once more in a pre-LN model."""
        return hidden if self.final_norm is None else self.final_norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """`[.., hidden]` → `[.., padded_vocab]`, −∞ at the padding of the vocabulary."""
        logits = self.decoder(self.norm(F.gelu(self.dense(hidden))))
        end = self.first_piece + logits.shape[-1]
        if end <= self.vocab_size:
            return logits
        padding = torch.arange(self.first_piece, end, device=logits.device) >= self.vocab_size
        return logits.masked_fill(padding, float("-inf"))

    def forward(self, tensors: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, Tensor]:
        """Packed `StageState` → the sums `[3]` of the LM, TCD and HCD terms over this micro-batch, and the notes."""
        state = StageState.unpack(tensors)
        hidden = self.last_hidden(state.hidden)
        chosen = hidden.flatten(0, 1).index_select(0, predicted_places(state.labels))  # [num_predicted, hidden]
        return self.losses(chosen, hidden, state)

    def losses(self, predicted_hidden: Tensor, hidden: Tensor, state: StageState) -> Tensor | tuple[Tensor, Tensor]:
        """The sums `[3]`: LM of `predicted_hidden` `[num_predicted, hidden]`, TCD of the last hidden states."""
        lm = self.lm_sum(self.logits(predicted_hidden), state.labels[state.labels != IGNORED_LABEL])
        return with_notes(torch.stack((lm, tcd_sum(hidden, state), state.losses[HCD])), hidden, state)


class ReplacedTokenHead(nn.Module):
    """ELECTRA's judge of every token, original or replaced: dense, GELU, one logit."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.final_norm = (
            nn.LayerNorm(config.hidden_size, eps=config.layernorm_epsilon)
            if config.layernorm_position == "pre"
            else None
        )
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.output = nn.Linear(config.hidden_size, 1)

    def last_hidden(self, hidden: Tensor) -> Tensor:
        """The encoder's output, `[batch, seq, hidden]`: normalised once more in a pre-LN model."""
        return hidden if self.final_norm is None else self.final_norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Last hidden states `[batch, seq, hidden]` → logits of "replaced", `[batch, seq]`."""
        return self.output(F.gelu(self.dense(hidden))).squeeze(-1)

    def forward(self, tensors: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, Tensor]:
        """Packed `StageState`, whose labels are RTD's targets → its sums `[8]` with TCD and RTD's, and the notes."""
        state = StageState.unpack(tensors)
        hidden = self.last_hidden(state.hidden)
        loss, correct, replaced, found = rtd_sums(self.logits(hidden), state.labels)
        sums = list(state.losses.unbind())
        sums[TCD], sums[RTD] = tcd_sum(hidden, state), loss
        sums[RTD_CORRECT], sums[REPLACED], sums[REPLACED_FOUND] = correct, replaced, found
        return with_notes(torch.stack(sums), hidden, state)


def predicted_places(labels: Tensor) -> Tensor:
    """int64 `[num_predicted]`: flat places of the tokens of `labels` `[batch, seq]` that are to be predicted."""
    return (labels.flatten() != IGNORED_LABEL).nonzero().squeeze(-1)


def tcd_sum(hidden: Tensor, state: StageState) -> Tensor:
    """TCD of the last hidden states `[batch, seq, hidden]`, summed over the documents; 0 where it is off."""
    if not state.token_mask.shape[2]:
        return state.losses.new_zeros(())
    return token_cosine(hidden, state.token_mask).sum().to(state.losses.dtype)


def with_notes(sums: Tensor, hidden: Tensor, state: StageState) -> Tensor | tuple[Tensor, Tensor]:
    """The sums, and beside them the notes of the rare words' windows where these were carried here."""
    return (sums, window_means(hidden, state.carried[0])) if state.carried else sums


class EnhancedMaskDecoder(nn.Module):
    """DeBERTa's decoder (arXiv:2006.03654, section 3.2): absolute positions join just before the masked-LM head.

    The last layer is applied twice more, from queries = absolute embedding + H[L−1] to keys and values of H[L−1], at
    the predicted positions alone; K and V are computed once. Dropped at fine-tuning. TCD and HCD see the ordinary H[L].
    """

    APPLICATIONS = 2

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.absolute = nn.Embedding(config.seq_length, config.hidden_size)

    def forward(self, before: tuple[Tensor, ...], last_layer: EncoderLayer) -> Tensor:
        """Packed `StageState` with H[L−1] → `[num_predicted, hidden]`, in the order of the labels."""
        state = StageState.unpack(before)
        check_length(state.hidden.shape[1], self.absolute.num_embeddings)
        predicted = state.labels != IGNORED_LABEL  # [batch, seq]
        counts = predicted.sum(-1, keepdim=True)  # [batch, 1]
        most = int(counts.max())
        # The predicted places of each row first, then others to fill up; what these give is thrown away.
        places = (~predicted).long().argsort(dim=-1, stable=True)[:, :most]  # [batch, most]
        states = self.absolute(state.position_ids) + state.hidden
        queries = states.gather(1, places.unsqueeze(-1).expand(-1, -1, states.shape[-1]))
        decoded = last_layer.decode(queries, places, state, self.APPLICATIONS)
        return decoded[torch.arange(most, device=places.device) < counts]


class DecodingStage(nn.Module):
    """The last layer and the head as one stage, for models whose head applies that layer again."""

    def __init__(self, last_layer: nn.Module, decoder: EnhancedMaskDecoder, head: MaskedLMHead) -> None:
        super().__init__()
        assert isinstance(last_layer, EncoderLayer)
        self.last_layer, self.decoder, self.head = last_layer, decoder, head

    def forward(self, tensors: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, Tensor]:
        """Packed `StageState` with H[L−1] → the sums `[3]`, and the notes."""
        state = StageState.unpack(self.last_layer(tensors))
        decoded = self.head.last_hidden(self.decoder(tensors, self.last_layer))
        return self.head.losses(decoded, self.head.last_hidden(state.hidden), state)
