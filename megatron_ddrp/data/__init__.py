"""The path from text to batches, in numpy only; ranks are plain integers here."""

from megatron_ddrp.data.dataset.indexed_dataset import IndexedDataset

__all__ = ["IndexedDataset"]
