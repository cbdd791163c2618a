"""Parallel layouts; the only folder that imports torch.distributed."""
