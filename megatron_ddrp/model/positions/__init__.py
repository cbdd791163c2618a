"""Position encodings: their contract, and the encodings that `config/registry.py` names."""

from megatron_ddrp.model.positions.contract import LayerPositions, PositionEncoding, PositionTerms, Sizes

__all__ = ["LayerPositions", "PositionEncoding", "PositionTerms", "Sizes"]
