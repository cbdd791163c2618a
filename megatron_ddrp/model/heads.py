"""The last stage: heads pass hidden states to the objective, and compute logits of pieces or of "replaced".

The functions of ELECTRA (Clark et al., arXiv:2003.10555) sample replacements and judge their detection:

    x̂_t ~ softmax(generator logits_t) at the selected tokens t,  x_t elsewhere; no gradient through the sampling
    RTD = − Σ_t [x̂_t ≠ x_t] log p_t + [x̂_t = x_t] log(1 − p_t)   over all tokens that are not padding

A sampled token equal to the original counts as original.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_ddrp.config import ModelConfig
from megatron_ddrp.data.batches.batch import IGNORED_LABEL
from megatron_ddrp.model.embeddings import check_length
from megatron_ddrp.model.encoder import EncoderLayer
from megatron_ddrp.model.fused import Norm, compiles, is_nvidia
from megatron_ddrp.model.stages import End, Judge, ModelOutput, State, wide

_CHUNK, _GPU_CHUNK = 1 << 19, 1 << 28
"""Logits per chunk: on a CPU a chunk's noise fits in a core's cache; on a GPU it needs few launches and 2 GiB."""

_GOLDEN, _FIRST, _SECOND = -1640531527, 0x21F0AAAD, -749094293
"""Odd constant that spreads the pieces, and the two factors of a 32-bit finaliser like SplitMix's."""


def gumbel_argmax(logits: Tensor, keys: Tensor, first_piece: int = 0) -> tuple[Tensor, Tensor]:
    """Sample a piece for each row from softmax(logits), temperature 1.

    `logits` `[tokens, pieces]` has one column per piece, starting with `first_piece`; `keys` int64 `[tokens]` comes
    from `sample_keys`. Return (winning score, winning column), both `[tokens]`. If several calls share the vocabulary,
    the largest score wins.

    Sampling takes Gumbel's argmax, argmax_v logits_v + g_v. The noise g_v is a counter-based hash of (the token's key,
    v), so every layout, also one that splits the vocabulary, draws the same replacements from the same keys.
    """
    tokens, pieces = logits.shape
    scores = logits.new_empty(tokens, dtype=torch.float32)
    winners = keys.new_empty(tokens)
    numbers = torch.arange(first_piece, first_piece + pieces, dtype=torch.int32, device=logits.device)
    spread = numbers.add_(1).mul_(_GOLDEN)  # [pieces]
    rows = max(1, (_CHUNK if logits.device.type == "cpu" else _GPU_CHUNK) // max(1, pieces))
    for begin in range(0, tokens, rows):
        part = slice(begin, begin + rows)
        noise = _gumbel(keys[part].to(torch.int32).unsqueeze(1) ^ spread)
        noise += logits[part].detach()
        scores[part], winners[part] = noise.max(-1)
    return scores, winners


def _gumbel(bits: Tensor) -> Tensor:
    """Return standard Gumbel noise −log(−log u), fp32, from int32 counters, which are overwritten.

    u = 1 − (n + ½)/2³¹ for the hash n in 0 … 2³¹ − 1: large values, which win, come
    from small n, which fp32 holds exactly.
    """
    for factor, shift in ((_FIRST, 16), (_SECOND, 15)):
        bits ^= (bits >> shift).bitwise_and_(0xFFFFFFFF >> shift)
        bits *= factor
    bits ^= (bits >> 15).bitwise_and_(0xFFFFFFFF >> 15)
    complement = bits.bitwise_and_(0x7FFFFFFF).to(torch.float32).add_(0.5).mul_(-(2.0**-31))  # −(1 − u)
    return complement.log1p_().neg_().log_().neg_()


def first_of_run(hidden: Tensor, runs: Tensor) -> Tensor:
    """Return for each token the hidden state of its run's first token; this is [CLS] if the run is a document.

    `hidden` `[batch, seq, hidden]`, `runs` int32 `[runs + 1]` as in `Layout` → `[batch, seq, hidden]`.
    """
    flat = hidden.flatten(0, 1)
    places = torch.arange(len(flat), dtype=runs.dtype, device=runs.device)
    first = runs.index_select(0, torch.searchsorted(runs, places, right=True) - 1)  # [batch · seq]
    return F.embedding(first, flat).view_as(hidden)  # unlike indexing, its gradient sums rows without atomic additions


def replace_tokens(originals: Tensor, predicted: Tensor, sampled: Tensor) -> Tensor:
    """Return `originals` int64 `[batch, seq]` with `sampled` `[num_predicted]` at the flat places `predicted`."""
    return originals.flatten().index_copy(0, predicted, sampled).view_as(originals)


def rtd_targets(replaced: Tensor, originals: Tensor, document_ids: Tensor) -> Tensor:
    """Return int64 `[batch, seq]`: 1 for replaced tokens, 0 for original ones, `IGNORED_LABEL` at padding."""
    return (replaced != originals).long().masked_fill(document_ids == 0, IGNORED_LABEL)


def rtd_sums(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (loss, correct decisions, replaced tokens, replaced tokens found), summed over the tokens with a target.

    `logits` of "replaced" and `targets` `[batch, seq]`, see `rtd_targets` → fp32 (or fp64) scalars.
    """
    logits = wide(logits)
    valid, is_replaced = targets != IGNORED_LABEL, targets == 1
    losses = F.binary_cross_entropy_with_logits(logits, is_replaced.to(logits.dtype), reduction="none")
    judged_replaced = logits.detach() > 0
    correct = ((judged_replaced == is_replaced) & valid).sum()
    found = (judged_replaced & is_replaced).sum()
    counts = (count.to(losses.dtype) for count in (correct, is_replaced.sum(), found))
    return (losses * valid).sum(), *counts  # type: ignore[return-value]


def masked_lm_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of −log p(label) over the predicted tokens, in nats.

    `logits` `[num_predicted, vocab]` in any precision, `labels` int64 `[num_predicted]` → fp32 (or fp64) scalar. Where
    layers compile on GPUs, logits in half precision are not converted (`triton_loss.py`).
    """
    if logits.dtype.itemsize < 4 and is_nvidia(logits.device) and compiles("auto", logits.device):
        from megatron_ddrp.model.triton_loss import sum_of_losses

        return sum_of_losses(logits, labels)
    return F.cross_entropy(wide(logits), labels, ignore_index=IGNORED_LABEL, reduction="sum")


class Head(nn.Module):
    """Base of the last stages: `State` → `ModelOutput`. The objective computes the sums."""

    def __init__(self, config: ModelConfig, objective: Judge) -> None:
        super().__init__()
        self.objective = objective
        self.own = objective.modules(config.hidden_size)
        is_pre_norm = config.layernorm_position == "pre"
        self.final_norm = Norm(config.hidden_size, config) if is_pre_norm else None

    def last_hidden(self, hidden: Tensor) -> Tensor:
        """Return the encoder's output, `[.., hidden]`: normalised once more in a pre-LN model."""
        return hidden if self.final_norm is None else self.final_norm(hidden)

    def forward(self, state: State) -> ModelOutput:
        return self.objective.output(End(state, self.last_hidden(state.hidden), self))


class MaskedLMHead(Head):
    """Dense, GELU, LayerNorm, then the token embedding as the output matrix (tied), plus a bias per piece.

    With `--ffn swiglu` SiLU takes the place of GELU.

    The dense map changes the width where the embedding is narrower than the hidden states, as in ELECTRA's generator.
    Tensor parallelism splits the vocabulary and overrides `first_piece`, `lm_sum` and `winner`.
    """

    first_piece = 0
    """Piece of the first logit column."""

    def __init__(self, config: ModelConfig, token_embedding: nn.Embedding, objective: Judge) -> None:
        super().__init__(config, objective)
        self.vocab_size = config.vocab_size
        width = token_embedding.embedding_dim
        self.dense = nn.Linear(config.hidden_size, width, bias=config.biased_norms)
        self.activation = F.silu if config.ffn == "swiglu" else F.gelu
        self.norm = Norm(width, config)
        self.decoder = nn.Linear(width, config.padded_vocab_size)
        self.decoder.weight = token_embedding.weight

    def logits(self, hidden: Tensor) -> Tensor:
        """Return `[.., hidden]` → `[.., padded_vocab]`, −∞ at the padding of the vocabulary."""
        logits = self.decoder(self.norm(self.activation(self.dense(hidden))))
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

    def forward(self, state: State) -> ModelOutput:
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

    def forward(self, before: State) -> ModelOutput:
        """Return the sums of the objective; `before` holds H[L−1]."""
        state = self.last_layer(before)
        predicted = self.head.last_hidden(self.decoder(before, self.last_layer))
        return self.head.objective.output(End(state, self.head.last_hidden(state.hidden), self.head, predicted))
