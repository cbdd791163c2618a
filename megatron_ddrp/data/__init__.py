"""From text to batches, in numpy; rank and world size arrive as ints."""

from megatron_ddrp.data.dataset.indexed_dataset import IndexedDataset

__all__ = ["IndexedDataset"]
