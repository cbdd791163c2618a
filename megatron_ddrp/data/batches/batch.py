"""The one type that crosses from data to model.

`document_ids` serves padding *and* packing: attention is allowed where both ends carry the same non-zero id, so no
second mask exists. `sequence_ids` names the sample a token came from, independent of rank, row and layout; with
`position_ids` it is what every per-token random draw is a pure function of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

IGNORED_LABEL = -100
"""Label of a position that is not predicted (the convention of torch's cross entropy)."""


class Batch(NamedTuple):
    """One micro-batch. Every field is int64 `[batch, seq]`; numpy from the loader, torch in the model."""

    input_ids: Any
    """Token ids after masking; 0-based vocabulary rows."""
    labels: Any
    """Original token id where it is to be predicted, `IGNORED_LABEL` elsewhere."""
    document_ids: Any
    """0 for padding; 1, 2, … for the documents of a row."""
    position_ids: Any
    """0, 1, … within each document of a row; 0 at padding."""
    segment_ids: Any
    """0 for the first sentence, 1 for the second (fine-tuning on pairs); 0 at padding."""
    sequence_ids: Any
    """Number of the sample that the token belongs to, unique within a step; 0 at padding."""
    note_ids: Any = None
    """Under `--notes`: w at the first piece of rare word w = 1, 2, …, −w at its others, 0 elsewhere. Else None."""

    def arrays(self) -> list[Any]:
        """Return the fields that are not None."""
        return [field for field in self if field is not None]

    def map(self, function: Callable[[Any], Any]) -> Batch:
        """Apply `function` to every field that is not None: move to a device, slice rows, turn into tensors."""
        return Batch(*(field if field is None else function(field) for field in self))
