"""Masked LM, and the objectives that add a term to it: SimCTG's contrast, head disagreement and MTH.

    MaskedLM            MLM, cross entropy on the predicted tokens only
    TokenContrast       MLM + w · contrast of the tokens of a sequence
    HeadDisagreement    MLM − Σ_parts λ · D, the disagreement of heads
    Mth                 MLM + α1·TCD + α2·HCD

The classes have the formulas and sources.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ddrp.config import Number
from megatron_ddrp.config.reading import NOT_NEGATIVE
from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.model.attention.backends import attention_map
from megatron_ddrp.model.attention.logits import Attended
from megatron_ddrp.model.embeddings import SMALLEST_NORM, document_mask
from megatron_ddrp.model.stages import End, State, wide
from megatron_ddrp.objectives.contract import Objective, Rate, Term


class MaskedLM(Objective):
    """Masked LM (Devlin et al., arXiv:1810.04805) and its accuracy: cross entropy on the predicted tokens only.

    `--tcd-weight` and `--hcd-weight` add the terms of MTH.
    """

    rates = (Rate("lm_accuracy", of="lm_correct", per="predicted"),)

    def own_sums(self, end: End) -> dict[str, Tensor]:
        """Return the loss and the number of tokens whose likeliest piece is the right one."""
        logits, labels = end.head.logits(end.predicted), end.state.inputs.predicted_labels
        return {"lm_loss": end.head.lm_sum(logits, labels), "lm_correct": (end.head.best(logits) == labels).sum()}


class TokenContrast(MaskedLM):
    """Masked LM, and the contrast of every two tokens of a sequence: SimCTG (Su et al., arXiv:2202.06417, eq. 2).

        loss = MLM + w · mean over sequences of  Σ_{i≠j} max(0, ρ − cos(h_i, h_i) + cos(h_i, h_j)) / (n (n − 1))

    h_i are the last hidden states of the n tokens of a sequence, here those of an encoder. cos(h_i, h_i) = 1, so a pair
    counts if its cosine is above 1 − ρ. Options: `weight` is w, `margin` is ρ.

    Departure: the released code divides by the number of pairs in the whole batch, without padding; ours divides by the
    pairs of each sequence, like TCD, the closest term. TCD has no hinge and so has a closed form; this loss needs n²
    cosines.
    """

    options = {"weight": Number(1.0, NOT_NEGATIVE), "margin": Number(0.5, "[0, 2]")}

    @property
    def terms(self) -> tuple[Term, ...]:
        return (*super().terms, Term("contrast_loss", "sequences", "contrast", self.numbers["weight"]))

    def own_sums(self, end: End) -> dict[str, Tensor]:
        inputs = end.state.inputs
        documents = document_mask(inputs.batch.document_ids, inputs.draws.num_documents)
        return {**super().own_sums(end), "contrast_loss": contrast_sum(end.hidden, documents, self.numbers["margin"])}


def contrast_sum(hidden: Tensor, documents: Tensor, margin: float) -> Tensor:
    """Return the sum over documents of the mean hinge over their pairs of tokens; 0 for documents of one token.

    `hidden` `[batch, seq, hidden]`, `documents` bool `[batch, documents, seq]` → fp32 (or fp64) scalar.
    """
    unit = F.normalize(wide(hidden), dim=-1, eps=SMALLEST_NORM)
    hinges = F.relu(margin - 1 + unit @ unit.transpose(1, 2))  # [batch, seq, seq]
    hinges = hinges - hinges.diagonal(dim1=1, dim2=2).diag_embed()
    tokens = documents.to(hinges.dtype)
    sums = ((tokens @ hinges) * tokens).sum(-1)  # [batch, documents]
    lengths = tokens.sum(-1)
    return (sums / (lengths * (lengths - 1)).clamp_min(1)).sum()


PARTS = ("value", "output", "attention")


class DocumentLengths(NamedTuple):
    """Facts about documents that the layers need."""

    lengths: Tensor
    """int64 `[batch, seq]`: number of tokens in each token's document; 0 at padding and in documents of one token."""


class Agreement(NamedTuple):
    """Agreement of the heads, summed on the way through the layers."""

    sums: Tensor
    """fp32 (or fp64) `[parts]`: −D of the parts with a weight, summed over documents and layers."""


class HeadDisagreement(MaskedLM):
    """Masked LM with heads that disagree (Li et al., arXiv:1810.10183), the published method closest to HCD.

        loss = MLM − Σ_parts λ · D,  D ≤ 0, of h heads with values V^a, probabilities P^a and outputs O^a = P^a V^a

        value       D = −(1/h²) Σ_{a,b} cos(V^a, V^b)            per token
        output      D = −(1/h²) Σ_{a,b} cos(O^a, O^b)            per token
        attention   D = −(1/h²) Σ_{a,b} Σ_{i,j} P^a_ij P^b_ij    per document

    A cosine is taken per token, then averaged over the tokens of a document. Only documents of at least two tokens
    count, as for TCD and HCD. The sum includes the pairs a = b, which gives D a closed form over all heads: with unit
    vectors v̂, −D = ‖(1/h) Σ_a v̂_a‖², and ‖(1/h) Σ_a P^a‖² for the maps. −D is logged, and its sum over layers is
    minimised. The options `output`, `value` and `attention` are λ; a part of weight 0 is not computed.

    HCD is a different term: it compares whole maps of logits, before the softmax, of a few sampled heads, without the
    pairs a = b, and averages over layers.

    Open readings: the paper defines D for one layer and one input; we chose how tokens, sequences and layers add up.
    Outputs are those that the output projection reads, after dropout on the probabilities; maps are taken before
    dropout. `attention` computes the maps separately from the attention backend and keeps h · n² probabilities per
    layer.
    """

    options = {part: Number(float(part == "output"), NOT_NEGATIVE) for part in PARTS}
    travelling = (DocumentLengths, Agreement)

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts with a weight above 0."""
        return tuple(part for part in PARTS if self.numbers[part])

    @property
    def looks_inside(self) -> bool:  # type: ignore[override]
        return bool(self.parts)

    @property
    def kept_maps(self) -> int:  # type: ignore[override]
        return int("attention" in self.parts)

    @property
    def terms(self) -> tuple[Term, ...]:
        own = (Term(_loss(part), "sequences", f"{part} alike", self.numbers[part]) for part in self.parts)
        return (*super().terms, *own)

    def draw_own(self, batch: Batch, seed: int, step: int) -> DocumentLengths:
        return DocumentLengths(torch.from_numpy(document_lengths(batch.document_ids)))

    def look_inside(self, state: State, attended: Attended) -> Any:
        drawn = state.inputs.draws.own
        if drawn is None:
            return None
        sums = torch.stack([agreement(part, attended, drawn.lengths) for part in self.parts])
        return Agreement(sums if state.own is None else state.own.sums + sums)

    def own_sums(self, end: End) -> dict[str, Tensor]:
        own = end.state.own
        sums = end.state.head_cosine.new_zeros(len(self.parts)) if own is None else own.sums
        return {**super().own_sums(end), **{_loss(part): x for part, x in zip(self.parts, sums, strict=True)}}


def _loss(part: str) -> str:
    return f"{part}_disagreement_loss"


def document_lengths(document_ids: np.ndarray) -> np.ndarray:
    """Return `DocumentLengths.lengths` for document numbers, int64 `[batch, seq]`."""
    rows, seq = document_ids.shape
    numbers = document_ids + np.arange(rows)[:, None] * (seq + 1)  # unique per document: a row holds at most seq
    lengths = np.bincount(numbers.ravel())[numbers]
    return np.where((document_ids > 0) & (lengths > 1), lengths, 0)


def agreement(part: str, attended: Attended, lengths: Tensor) -> Tensor:
    """Return −D of one part in one layer, summed over documents: fp32 (or fp64) scalar."""
    if part == "attention":
        mean = attended.mean_of_heads(attention_map(attended.attending))  # [b, s, s]
        weights = (lengths > 0).to(mean.dtype)
    else:
        x = attended.context if part == "output" else attended.attending.value
        mean = attended.mean_of_heads(F.normalize(wide(x), dim=-1, eps=SMALLEST_NORM))  # [b, s, d]
        weights = torch.where(lengths > 0, 1 / lengths.to(mean.dtype), 0.0)
    return (mean.pow(2).sum(-1) * weights).sum()


class Mth(MaskedLM):
    """Masked LM with the paper's weights of TCD and HCD (appendix A): MLM + α1·TCD + α2·HCD (eq. 17–19).

    The paper is "Better Pre-Training by Reducing Representation Confusion".
    """

    tcd_weight, hcd_weight = 1.0, 0.01
