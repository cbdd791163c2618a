"""The only place that talks to torch.distributed."""
