"""The one type that crosses from data to model.

`document_ids` serves padding *and* packing: attention is allowed if both tokens have the same non-zero id, so there is
no second mask. `sequence_ids` names the sample that a token came from, independent of rank, row and layout; every
random draw per token is a pure function of it and `position_ids`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

IGNORED_LABEL = -100
"""Label of a position without a prediction (the convention of torch's cross entropy)."""


class Batch(NamedTuple):
    """One micro-batch. Every field is int64 `[batch, seq]`: numpy from the loader, torch in the model."""

    input_ids: Any
    """Token ids after masking: vocabulary rows, from 0."""
    labels: Any
    """Original token id at predicted positions, `IGNORED_LABEL` elsewhere; in a causal phase the next token's id."""
    document_ids: Any
    """Document of a row: 1, 2, …; 0 for padding."""
    position_ids: Any
    """Positions 0, 1, … within each document of a row; 0 at padding."""
    segment_ids: Any
    """Segment: 0 for the first sentence, 1 for the second (fine-tuning on pairs); 0 at padding."""
    sequence_ids: Any
    """Number of the sample that the token belongs to, unique within a step; 0 at padding."""
    note_ids: Any = None
    """Rare words under `--notes`: w at the first piece of rare word w = 1, 2, …, −w at its others, 0 elsewhere."""

    @classmethod
    def of_texts(cls, ids: Any, documents: Any) -> Batch:
        """Return a batch without masks whose rows are texts of one segment: no labels, all of sample 0.

        `ids` and `documents` are int64 `[batch, seq]`, numpy or torch; `documents` is 1 at tokens and 0 at padding.
        """
        nothing = documents * 0
        positions = (documents.cumsum(1) - 1) * documents
        return cls(ids, nothing + IGNORED_LABEL, documents, positions, nothing, nothing)

    def arrays(self) -> list[Any]:
        """Return the fields that are not None."""
        return [field for field in self if field is not None]

    def map(self, function: Callable[[Any], Any]) -> Batch:
        """Return a batch with `function` applied to every field that is not None."""
        return Batch(*(field if field is None else function(field) for field in self))
