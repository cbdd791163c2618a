"""Geometry of the hidden states of each layer: cosines of tokens, isotropy, effective rank.

    within    mean cosine of two tokens of one sentence; in the last layer, with [CLS] and [SEP], it is f(S)
    between   mean cosine of two tokens of different sentences (Ethayarajh, arXiv:1909.00512)
    centred   both cosines for x − μ, μ the mean of all tokens
    IsoScore  (tr(C)²/‖C‖²_F − 1)/(n − 1), C the covariance of the tokens, n the hidden size (Rudman et al.,
              arXiv:2108.07344: their algorithm in closed form); 1 is isotropic, 0 is one direction
    effective rank  exp(−Σ p ln p), p the eigenvalues of C divided by their sum (Roy and Vetterli 2007)
    first component the largest p, the share of the variance along the first principal component, and the kurtosis
              E[z⁴]/E[z²]² of the tokens' places z on it: 1 if all stand at two opposite poles, 3 for a normal cloud

All pairs of tokens count; sums of unit vectors give their cosines without sampling. A second pass over the sentences
subtracts the mean before anything is squared, so that a large common offset costs no precision; a third projects on the
first principal component. Sums are float64.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.encoders.layers import LayerStates, layer_states
from megatron_ddrp.errors import UserError
from megatron_ddrp.model.similarity import SMALLEST_NORM, document_mask, token_cosine

PASSES = 3
"""Number of passes of `measure_space` over the sentences."""


@dataclass(frozen=True)
class LayerSpace:
    """Geometry of one layer's hidden states; undefined values are None."""

    layer: int
    """0 for the embeddings."""
    hidden_size: int
    token_similarity: float
    """f(S) of this layer over all tokens of a sentence, including [CLS] and [SEP]."""
    head_similarity: float | None
    """This layer's term of f(H); None if the model does not give its attention logits."""
    cosine_within: float | None
    cosine_between: float | None
    centred_cosine_within: float | None
    centred_cosine_between: float | None
    isoscore: float | None
    effective_rank: float | None
    first_component: float | None
    first_component_kurtosis: float | None


@dataclass(frozen=True)
class Space:
    """Geometry of all layers of a model, the embeddings first, and the number of tokens measured."""

    layers: tuple[LayerSpace, ...]
    tokens: int
    """Number of text tokens, without [CLS], [SEP] and other special tokens."""


class CosineSums:
    """Float64 sums over sentences that give the mean cosines of all pairs of tokens, in closed form."""

    def __init__(self) -> None:
        self.total: Tensor | float = 0.0  # [hidden], Σ of all unit vectors
        self.inside = self.within = 0.0
        self.tokens = self.same_sentence = self.sentences = 0

    def add(self, states: Tensor, text: Tensor) -> None:
        """Add a batch of states, float64 `[batch, seq, hidden]`. `text`, bool `[batch, seq]`, marks counted tokens."""
        units = F.normalize(states, dim=-1, eps=SMALLEST_NORM) * text.unsqueeze(-1)
        sums, counts = units.sum(1), text.sum(1)  # [batch, hidden], [batch]
        squares = sums.pow(2).sum(-1)  # [batch], the cosines of all ordered pairs, including each token with itself
        pairs = counts * (counts - 1)
        self.total = self.total + sums.sum(0)
        self.inside += float(squares.sum())
        means = (squares - units.pow(2).sum((1, 2))) / pairs.clamp_min(1)
        self.within += float(means[pairs > 0].sum())
        self.sentences += int((pairs > 0).sum())
        self.tokens += int(counts.sum())
        self.same_sentence += int(counts.pow(2).sum())

    @property
    def mean_within(self) -> float | None:
        """Mean over sentences of the mean cosine of two of their tokens; None if no sentence has two tokens."""
        return self.within / self.sentences if self.sentences else None

    @property
    def mean_between(self) -> float | None:
        """Mean cosine of two tokens of different sentences: (‖Σ x̂‖² − Σ_s ‖Σ_s x̂‖²)/(N² − Σ_s n_s²)."""
        pairs = self.tokens**2 - self.same_sentence
        return (float(torch.as_tensor(self.total).pow(2).sum()) - self.inside) / pairs if pairs else None


class _Layer:
    """Sums of one layer: `first`, `second` and `third` add a batch in the pass of that number."""

    def __init__(self) -> None:
        self.plain, self.centred = CosineSums(), CosineSums()
        self.sentences, self.f_s = 0, 0.0
        self.f_h: float | None = None
        self.sum: Tensor | float = 0.0  # [hidden]
        self.covariance: Tensor | float = 0.0  # [hidden, hidden], times the number of tokens
        self.fourth_powers = 0.0  # Σ z⁴, z the places of the tokens on the first principal component

    def first(self, state: LayerStates, batch: Batch, text: Tensor) -> None:
        hidden = state.hidden.double()
        self.sentences += len(text)
        self.plain.add(hidden, text)
        self.sum = self.sum + hidden[text].sum(0)
        self.f_s += float(token_cosine(hidden, document_mask(batch.document_ids, 1).long()).sum())
        if state.head_cosine is not None:
            self.f_h = (self.f_h or 0.0) + float(state.head_cosine)

    def second(self, state: LayerStates, batch: Batch, text: Tensor) -> None:
        centred = state.hidden.double() - self.sum / self.plain.tokens
        self.centred.add(centred, text)
        tokens = centred[text]  # [tokens, hidden]
        self.covariance = self.covariance + tokens.T @ tokens

    def third(self, state: LayerStates, batch: Batch, text: Tensor) -> None:
        places = (state.hidden.double()[text] - self.sum / self.plain.tokens) @ self.axes[:, -1]  # [tokens]
        self.fourth_powers += float(places.pow(4).sum())

    @cached_property
    def axes(self) -> Tensor:
        """Principal components `[hidden, hidden]`, one per column, the first component in the last one."""
        return torch.linalg.eigh(torch.as_tensor(self.covariance))[1]

    def check(self, number: int) -> None:
        if not torch.as_tensor(self.covariance).isfinite().all():
            raise UserError(f"hidden states of layer {number} are not finite: use a checkpoint that has not diverged")

    def result(self, number: int) -> LayerSpace:
        covariance = torch.as_tensor(self.covariance)
        largest = float(torch.linalg.eigvalsh(covariance)[-1])  # Σ z²
        return LayerSpace(
            number,
            len(covariance),
            self.f_s / self.sentences,
            None if self.f_h is None else self.f_h / self.sentences,
            self.plain.mean_within,
            self.plain.mean_between,
            self.centred.mean_within,
            self.centred.mean_between,
            isoscore(covariance),
            effective_rank(covariance),
            largest / float(covariance.trace()) if largest > 0 else None,
            self.plain.tokens * self.fourth_powers / largest**2 if largest > 0 else None,
        )


def measure_space(model: Any, batches: Callable[[], Iterable[Batch]], specials: Tensor) -> Space:
    """Return the geometry of a model's hidden states over batches of sentences on its device.

    `batches` is called three times and must give the same batches. `model` is an `Encoder` or an encoder of
    transformers. `specials`, int64 `[n]`, are the ids of special tokens such as [CLS]. Raises `UserError` for fewer
    than two tokens of text, and for states that are not finite.
    """
    layers: dict[int, _Layer] = defaultdict(_Layer)

    def read(add: Callable[[_Layer, LayerStates, Batch, Tensor], None]) -> None:
        for batch in batches():
            text = text_mask(batch, specials)
            for number, state in enumerate(layer_states(model, batch)):
                add(layers[number], state, batch, text)

    read(_Layer.first)
    if not layers or layers[0].plain.tokens < 2:
        raise UserError("the sentences hold fewer than two tokens of text: give more sentences, or longer ones")
    read(_Layer.second)
    for number, layer in layers.items():
        layer.check(number)
    read(_Layer.third)
    return Space(tuple(layer.result(number) for number, layer in layers.items()), layers[0].plain.tokens)


def text_mask(batch: Batch, specials: Tensor) -> Tensor:
    """Mark the tokens that are neither padding nor one of `specials`, bool `[batch, seq]`."""
    return (batch.document_ids > 0) & ~torch.isin(batch.input_ids, specials)


def isoscore(covariance: Tensor) -> float | None:
    """Return IsoScore of a covariance `[n, n]` of any scale; None for n = 1 and for zero variance."""
    n, squares = len(covariance), float(covariance.pow(2).sum())
    return (float(covariance.trace()) ** 2 / squares - 1) / (n - 1) if n > 1 and squares > 0 else None


def effective_rank(covariance: Tensor) -> float | None:
    """Return the effective rank, in [1, n], of a covariance `[n, n]` of any scale; None for zero variance."""
    eigenvalues = torch.linalg.eigvalsh(covariance).clamp_min(0.0)
    total = eigenvalues.sum()
    return float(torch.special.entr(eigenvalues / total).sum().exp()) if total > 0 else None
