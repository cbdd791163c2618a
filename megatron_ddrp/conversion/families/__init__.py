"""Model families that can be imported from Hugging Face folders and exported as such: one class and one line each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_ddrp.config import ModelConfig
from megatron_ddrp.conversion.families import bert, deberta, modernbert
from megatron_ddrp.conversion.families.contract import HEADS, Family, model_type
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError
from megatron_ddrp.foreign import show

__all__ = ["FAMILIES", "HEADS", "Family", "family_of", "leaving_family"]

_ALL: tuple[Family, ...] = (
    *(bert.CamembertFamily(), bert.XlmRobertaFamily(), bert.RobertaFamily(), bert.BertFamily(), bert.ElectraFamily()),
    *(deberta.DebertaFamily(), deberta.DebertaV2Family(), modernbert.ModernBertFamily()),
    *(modernbert.NomicBertFamily(), modernbert.EuroBertFamily(), modernbert.OwnFamily()),
)
FAMILIES = {family.model_type: family for family in _ALL}
"""`model_type` of config.json → its family. A trained model is exported as the first one that it matches and fits."""


NEAR = {
    "distilbert": "it has BERT's layers: use its teacher or another small BERT",
    "albert": "its layers share one set of weights, and here each layer has its own",
    "mpnet": "its relative positions have no equal here",
}
"""`model_type` of models that users often ask for → why they are not supported, or which model to use instead."""


def family_of(path: Path, values: dict[str, Any]) -> Family:
    """Return the family of a folder by its config.json. Raise `UserError` for an unknown model."""
    kind = model_type(path, values)
    if kind not in FAMILIES:
        near = f"; {NEAR[kind]}" if kind in NEAR else ""
        raise UserError(f"{path}: model_type is {show(kind)}{near}; supported are {', '.join(FAMILIES)}")
    return FAMILIES[kind]


def leaving_family(config: ModelConfig, head: str, tokenizer: Tokenizer, name: str | None = None) -> Family:
    """Return the family for the export of a model: the named one, else the first that it matches and fits.

    Raise `UserError` if there is no such family, or if the model does not belong to it.
    """
    if name is None:
        return next(f for f in FAMILIES.values() if f.refusal(config, head) is None and f.fits(config, tokenizer))
    if name not in FAMILIES:
        raise UserError(f"--family {name} is not known: expected one of {', '.join(FAMILIES)}", WRONG_ARGUMENTS)
    shares = isinstance(FAMILIES[name], bert.RobertaFamily) and tokenizer.roles_of("pad") != ["[PAD]"]
    if reason := FAMILIES[name].refusal(config, head) or "it needs a piece of its own for [PAD]" * shares:
        raise UserError(f"--family {name}: {reason}; leave --family out", WRONG_ARGUMENTS)
    return FAMILIES[name]
