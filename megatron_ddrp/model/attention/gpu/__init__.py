"""Attention on GPUs: Triton kernels."""
