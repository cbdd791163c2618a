"""The arguments of attention: every backend takes them as one tuple."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_ddrp.model.positions.contract import PositionTerms
from megatron_ddrp.model.stages import Layout


class Demand(NamedTuple):
    """Properties of a call of attention that decide which backends can compute it."""

    device: torch.device
    dtype: torch.dtype
    dropout: float
    """Dropout rate of the probabilities in training."""
    head_dim: int
    window: int | None = None
    """Same as `Attending.window`."""


class Attending(NamedTuple):
    """Arguments of one call of attention. Names: b = batch, h = heads, s = sequence, d = head size."""

    query: Tensor
    """`[b, h, s, d]`."""
    key: Tensor
    """`[b, h, s, d]`."""
    value: Tensor
    """`[b, h, s, d]`."""
    terms: PositionTerms
    document_ids: Tensor
    """int64 `[b, s]`: document number of each token, 0 for padding. A token attends to its own document only."""
    heads: Tensor
    """int64 `[m′]`: heads whose logits HCD compares; empty without HCD."""
    dropout: float = 0.0
    counted: Tensor | None = None
    """`[b, documents]`: weight of each document's cosine in HCD's sum, 1 or 0 in training. None: every row is one
    document of weight 1."""
    layout: Layout | None = None
    """Layout of the rows, if the CPU knows it."""
    window: int | None = None
    """Tokens on each side of a query that it attends to, besides itself; None: its whole document."""

    @property
    def num_documents(self) -> int:
        """Largest number of documents in a row."""
        return 1 if self.counted is None else self.counted.shape[1]

    @property
    def full(self) -> bool:
        """True if every token is known to attend to all of its row."""
        return self.layout is not None and self.layout.full and self.window is None

    @property
    def compares_content(self) -> bool:
        """True if HCD compares content-only logits over whole documents, for which there are closed forms."""
        return self.terms.compared.content_only and self.window is None

    @property
    def demand(self) -> Demand:
        """`Demand` of this call."""
        return Demand(self.query.device, self.query.dtype, self.dropout, self.query.shape[-1], self.window)


class Attended(NamedTuple):
    """Attention of one layer, for objectives that look inside."""

    attending: Attending
    """Arguments of attention. Under tensor parallelism they hold this rank's heads only."""
    context: Tensor
    """`[b, h, s, d]`: output of each head before the output projection."""
    mean_of_heads: Callable[[Tensor], Tensor]
    """Mean over all heads of the layer, including those of other ranks: `[b, h, ..]` → `[b, ..]`."""


Backend = Callable[[Attending], tuple[Tensor, Tensor | None]]
"""Function that returns the context `[b, h, s, d]`, and HCD's mean pairwise cosine summed over the counted documents
(None if no heads are compared)."""
