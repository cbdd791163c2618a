"""The attention function: its logits, and the backends that compute it."""
