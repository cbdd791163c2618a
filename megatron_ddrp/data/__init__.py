"""The path from text to batches, in numpy only; ranks are plain integers here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_ddrp.data.dataset.indexed_dataset import IndexedDataset

__all__ = ["IndexedDataset"]


def __getattr__(name: str) -> Any:
    """Import `IndexedDataset` when it is first asked for: a command line is read without numpy."""
    if name == "IndexedDataset":
        from megatron_ddrp.data.dataset.indexed_dataset import IndexedDataset

        return IndexedDataset
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
