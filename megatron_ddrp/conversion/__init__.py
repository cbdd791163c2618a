"""Conversion between training checkpoints and Hugging Face folders."""
