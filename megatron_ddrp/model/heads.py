"""The last stage: passes hidden states to the objective, and computes logits of pieces or of "replaced"."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_ddrp.config import ModelConfig
from megatron_ddrp.data.batches.batch import IGNORED_LABEL
from megatron_ddrp.model.embeddings import check_length
from megatron_ddrp.model.encoder import EncoderLayer
from megatron_ddrp.model.norm import Norm
from megatron_ddrp.model.replacing import first_of_run, gumbel_argmax
from megatron_ddrp.model.stages import End, Judge, Output, State


def masked_lm_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of −log p(label) over the predicted tokens, in nats.

    `logits` `[num_predicted, vocab]` in any precision, `labels` int64 `[num_predicted]` → fp32 (or fp64) scalar.
    """
    logits = logits if logits.dtype.itemsize >= 4 else logits.float()
    return F.cross_entropy(logits, labels, ignore_index=IGNORED_LABEL, reduction="sum")


class Head(nn.Module):
    """Base of the last stages: `State` → `Output`. The objective computes the sums."""

    def __init__(self, config: ModelConfig, objective: Judge) -> None:
        super().__init__()
        self.objective = objective
        self.own = objective.modules(config.hidden_size)
        is_pre_norm = config.layernorm_position == "pre"
        self.final_norm = Norm(config.hidden_size, config) if is_pre_norm else None

    def last_hidden(self, hidden: Tensor) -> Tensor:
        """Return the encoder's output, `[.., hidden]`: normalised once more in a pre-LN model."""
        return hidden if self.final_norm is None else self.final_norm(hidden)

    def forward(self, state: State) -> Output:
        return self.objective.output(End(state, self.last_hidden(state.hidden), self))


class MaskedLMHead(Head):
    """Dense, GELU, LayerNorm, then the token embedding as the output matrix (tied), plus a bias per piece.

    The dense map changes the width where the embedding is narrower than the hidden states, as in ELECTRA's generator.
    Tensor parallelism splits the vocabulary and overrides `first_piece`, `lm_sum` and `winner`.
    """

    first_piece = 0
    """Piece of the first logit column."""

    def __init__(self, config: ModelConfig, token_embedding: nn.Embedding, objective: Judge) -> None:
        super().__init__(config, objective)
        self.vocab_size = config.vocab_size
        width = token_embedding.embedding_dim
        self.dense = nn.Linear(config.hidden_size, width, bias=config.bias)
        self.norm = Norm(width, config)
        self.decoder = nn.Linear(width, config.padded_vocab_size)
        self.decoder.weight = token_embedding.weight

    def logits(self, hidden: Tensor) -> Tensor:
        """Return `[.., hidden]` → `[.., padded_vocab]`, −∞ at the padding of the vocabulary."""
        logits = self.decoder(self.norm(F.gelu(self.dense(hidden))))
        end = self.first_piece + logits.shape[-1]
        if end <= self.vocab_size:
            return logits
        padding = torch.arange(self.first_piece, end, device=logits.device) >= self.vocab_size
        return logits.masked_fill(padding, float("-inf"))

    def lm_sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return `masked_lm_sum` over the whole vocabulary."""
        return masked_lm_sum(logits, labels)

    def winner(self, scores: Tensor, columns: Tensor) -> Tensor:
        """Return the piece with the largest score, int64 `[n]`.

        `scores` and `columns`, `[n]` each, are the best logit among this module's pieces and its column.
        """
        return columns

    def sample(self, logits: Tensor, keys: Tensor) -> Tensor:
        """Draw a piece for each token from softmax(logits): int64 `[n]`. `keys` int64 `[n]`, see `gumbel_argmax`."""
        return self.winner(*gumbel_argmax(logits, keys, self.first_piece))

    def best(self, logits: Tensor) -> Tensor:
        """Return the likeliest piece of each token, int64 `[n]`."""
        return self.winner(*logits.detach().max(-1))

    def forward(self, state: State) -> Output:
        hidden = self.last_hidden(state.hidden)
        predicted = hidden.flatten(0, 1).index_select(0, state.inputs.layout.predicted)
        return self.objective.output(End(state, hidden, self, predicted))


class ReplacedTokenHead(Head):
    """ELECTRA's classifier of every token as original or replaced: dense, GELU, one logit."""

    def __init__(self, config: ModelConfig, objective: Judge) -> None:
        super().__init__(config, objective)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size, bias=config.bias)
        self.output = nn.Linear(config.hidden_size, 1)

    def logits(self, hidden: Tensor, runs: Tensor | None = None) -> Tensor:
        """Return the logits of "replaced" for last hidden states: `[batch, seq, hidden]` → `[batch, seq]`.

        `runs` as in `Layout` marks where documents begin, for subclasses that need it; without it each row is one
        document.
        """
        return self.output(F.gelu(self.dense(hidden))).squeeze(-1)


class ContextualReplacedTokenHead(ReplacedTokenHead):
    """DeBERTaV3's classifier (arXiv:2111.09543, released code): y_t = W₂ · GELU(W₁ · LN(h_[CLS] + h_t)).

    [CLS] is the first token of the document that t belongs to.
    """

    def __init__(self, config: ModelConfig, objective: Judge) -> None:
        super().__init__(config, objective)
        self.norm = Norm(config.hidden_size, config)

    def logits(self, hidden: Tensor, runs: Tensor | None = None) -> Tensor:
        first = hidden[:, :1] if runs is None else first_of_run(hidden, runs)
        return super().logits(self.norm(hidden + first))


class EnhancedMaskDecoder(nn.Module):
    """DeBERTa's decoder (arXiv:2006.03654, section 3.2): adds absolute positions just before the masked-LM head.

    It applies the last layer twice more, at the predicted places only. The first queries are absolute embedding +
    H[L−1]; keys and values come from H[L−1] and are computed once. Fine-tuning drops it. TCD and HCD see the ordinary
    H[L].
    """

    APPLICATIONS = 2

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.absolute = nn.Embedding(config.seq_length, config.hidden_size)

    def forward(self, state: State, last_layer: EncoderLayer) -> Tensor:
        """Return `[num_predicted, hidden]`, in the order of the labels; `state` holds H[L−1]."""
        batch, layout = state.inputs.batch, state.inputs.layout
        check_length(batch.input_ids.shape[1], self.absolute.num_embeddings)
        places = layout.queries  # [batch, most]
        states = self.absolute(batch.position_ids) + state.hidden
        queries = states.gather(1, places.unsqueeze(-1).expand(-1, -1, states.shape[-1]))
        decoded = last_layer.decode(queries, places, state, self.APPLICATIONS)
        return decoded.flatten(0, 1).index_select(0, layout.answers)


class DecodingStage(nn.Module):
    """The last layer and the head as one stage, for models whose mask decoder applies that layer again."""

    def __init__(self, last_layer: nn.Module, decoder: EnhancedMaskDecoder, head: MaskedLMHead) -> None:
        super().__init__()
        assert isinstance(last_layer, EncoderLayer)
        self.last_layer, self.decoder, self.head = last_layer, decoder, head

    def forward(self, before: State) -> Output:
        """Return the sums of the objective; `before` holds H[L−1]."""
        state = self.last_layer(before)
        predicted = self.head.last_hidden(self.decoder(before, self.last_layer))
        return self.head.objective.output(End(state, self.head.last_hidden(state.hidden), self.head, predicted))
