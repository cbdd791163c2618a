"""Tokenizers behind one contract, and the vocabularies they need."""
