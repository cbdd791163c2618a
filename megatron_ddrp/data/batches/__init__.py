"""From datasets to micro-batches: samples, packing, masks, blends."""
