"""The path from datasets to micro-batches: samples, packing, masks, blends."""
