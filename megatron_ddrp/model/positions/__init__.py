"""Position encodings and their contract. `config/registry.py` names them."""

from megatron_ddrp.model.positions.contract import LayerPositions, PositionEncoding, PositionTerms, Sizes

__all__ = ["LayerPositions", "PositionEncoding", "PositionTerms", "Sizes"]
