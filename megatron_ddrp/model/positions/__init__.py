"""Position encodings: the contract and the registry. A new encoding is one file, one line here, one test."""

from megatron_ddrp.model.positions.absolute import Absolute
from megatron_ddrp.model.positions.contract import PositionEncoding, PositionTerms
from megatron_ddrp.model.positions.ddrp import Ddrp

REGISTRY: dict[str, type[PositionEncoding]] = {
    "absolute": Absolute,
    "ddrp": Ddrp,
}

__all__ = ["REGISTRY", "PositionEncoding", "PositionTerms"]
