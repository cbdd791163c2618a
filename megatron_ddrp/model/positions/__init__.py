"""Position encodings: the contract, and one file per encoding. `config/registry.py` names them."""

from megatron_ddrp.model.positions.contract import LayerPositions, PositionEncoding, PositionTerms, Sizes

__all__ = ["LayerPositions", "PositionEncoding", "PositionTerms", "Sizes"]
