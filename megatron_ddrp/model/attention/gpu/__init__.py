"""Attention on GPUs: Triton kernels, and FlexAttention."""
