"""The arguments of attention, which every backend takes as one tuple."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_ddrp.model.positions.contract import PositionTerms
from megatron_ddrp.model.stages import Layout


class Demand(NamedTuple):
    """The circumstances of attention by which a backend is chosen."""

    device: torch.device
    dtype: torch.dtype
    dropout: float
    """Dropout on the probabilities in training."""
    head_dim: int
    window: int | None = None
    """As in `Attending`."""


class Attending(NamedTuple):
    """One call of attention. Names: b = batch, h = heads, s = sequence, d = head size."""

    query: Tensor
    """`[b, h, s, d]`."""
    key: Tensor
    """`[b, h, s, d]`."""
    value: Tensor
    """`[b, h, s, d]`."""
    terms: PositionTerms
    document_ids: Tensor
    """int64 `[b, s]`: tokens attend to their own document alone, 0 is padding."""
    heads: Tensor
    """int64 `[m′]`: heads whose logits HCD compares, empty without HCD."""
    dropout: float = 0.0
    counted: Tensor | None = None
    """`[b, documents]`: the weight of each document's cosine in HCD's sum, 1 or 0 in training. None: every row is one
    document, which counts."""
    layout: Layout | None = None
    """The places of the rows' tokens, as far as the CPU knows them."""
    window: int | None = None
    """Tokens left and right of a query that it attends to, itself beside them; None: its whole document."""

    @property
    def num_documents(self) -> int:
        """Most documents in a row."""
        return 1 if self.counted is None else self.counted.shape[1]

    @property
    def full(self) -> bool:
        """Return whether every token is known to attend to all of its row."""
        return self.layout is not None and self.layout.full and self.window is None

    @property
    def compares_content(self) -> bool:
        """Return whether HCD compares content alone over whole documents, for which there are closed forms."""
        return self.terms.compared.content_only and self.window is None

    @property
    def demand(self) -> Demand:
        """Return what this call demands of a backend."""
        return Demand(self.query.device, self.query.dtype, self.dropout, self.query.shape[-1], self.window)


class Attended(NamedTuple):
    """Attention of one layer, as an objective sees it that looks inside."""

    attending: Attending
    """Under tensor parallelism the heads here are those of this rank."""
    context: Tensor
    """`[b, h, s, d]`: what each head gives, before the output projection."""
    mean_of_heads: Callable[[Tensor], Tensor]
    """Mean over all heads of the layer, those of other ranks included: `[b, h, ..]` → `[b, ..]`."""


Backend = Callable[[Attending], tuple[Tensor, Tensor | None]]
"""Returns the context `[b, h, s, d]`, and HCD's mean pairwise cosine summed over the counted documents (None for no
heads)."""
