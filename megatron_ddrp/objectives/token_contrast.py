"""Masked LM with a contrast of tokens: SimCTG's loss (Su et al., arXiv:2202.06417, eq. 2) on an encoder.

    loss = MLM + w · mean over sequences of  Σ_{i≠j} max(0, ρ − cos(h_i, h_i) + cos(h_i, h_j)) / (n (n − 1))

h_i are the last hidden states of the n tokens of a sequence. cos(h_i, h_i) = 1, so a pair counts if its cosine is above
1 − ρ. Options: `weight` is w, `margin` is ρ.

Departure: the released code divides by the number of pairs in the whole batch, without padding; ours divides by the
pairs of each sequence, like TCD, the closest term. TCD has no hinge and so has a closed form; this loss needs n²
cosines.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from megatron_ddrp.config import Number
from megatron_ddrp.config.option import NOT_NEGATIVE
from megatron_ddrp.model.similarity import SMALLEST_NORM, document_mask
from megatron_ddrp.model.stages import End
from megatron_ddrp.objectives.contract import Term
from megatron_ddrp.objectives.mlm import MaskedLM


class TokenContrast(MaskedLM):
    """Masked LM, and the contrast of every two tokens of a sequence."""

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
    hidden = hidden if hidden.dtype.itemsize >= 4 else hidden.float()
    unit = F.normalize(hidden, dim=-1, eps=SMALLEST_NORM)
    hinges = F.relu(margin - 1 + unit @ unit.transpose(1, 2))  # [batch, seq, seq]
    hinges = hinges - hinges.diagonal(dim1=1, dim2=2).diag_embed()
    tokens = documents.to(hinges.dtype)
    sums = ((tokens @ hinges) * tokens).sum(-1)  # [batch, documents]
    lengths = tokens.sum(-1)
    return (sums / (lengths * (lengths - 1)).clamp_min(1)).sum()
