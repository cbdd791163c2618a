"""Tokenizers with one interface, and training of their vocabularies."""
