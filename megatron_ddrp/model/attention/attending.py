"""The arguments of attention, which every backend takes as one tuple."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from megatron_ddrp.model.positions.contract import PositionTerms


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

    @property
    def num_documents(self) -> int:
        """Most documents in a row."""
        return 1 if self.counted is None else self.counted.shape[1]


Backend = Callable[[Attending], tuple[Tensor, Tensor | None]]
"""Returns the context `[b, h, s, d]`, and HCD's mean pairwise cosine summed over the counted documents (None for no
heads)."""
