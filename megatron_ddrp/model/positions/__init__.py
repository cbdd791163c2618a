"""Position encodings: the contract and the registry. A new encoding is one file, one line here, one test."""

from megatron_ddrp.model.positions.absolute import Absolute
from megatron_ddrp.model.positions.bert_r import BertR
from megatron_ddrp.model.positions.contract import LayerPositions, PositionEncoding, PositionTerms
from megatron_ddrp.model.positions.ddrp import Ddrp
from megatron_ddrp.model.positions.deberta import Deberta
from megatron_ddrp.model.positions.tupe import TupeA, TupeR

REGISTRY: dict[str, type[PositionEncoding]] = {
    "absolute": Absolute,
    "bert-r": BertR,
    "tupe-a": TupeA,
    "tupe-r": TupeR,
    "deberta": Deberta,
    "ddrp": Ddrp,
}

__all__ = ["REGISTRY", "LayerPositions", "PositionEncoding", "PositionTerms"]
