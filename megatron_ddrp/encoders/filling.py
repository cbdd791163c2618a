"""Models of transformers, filled with the weights that our own reader finds in a folder, in whatever form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron_ddrp.conversion.foreign_config import OWN_MODEL_TYPE
from megatron_ddrp.conversion.weight_files import read_weights, refuse_homeless
from megatron_ddrp.errors import UserError


class Filled(NamedTuple):
    """Account of a folder's weights in a model."""

    missing: set[str] = set()
    """Names of the model's weights that the folder lacks."""
    unused: set[str] = set()
    """Names of the folder's weights that the model does not use."""


def fill(folder: Path, config: Any, build: Callable[[Any], Any], finite: bool = True) -> tuple[Any, Filled]:
    """Return the model that `build` makes of `config` with a folder's weights, and an account of them.

    Raises:
        UserError: the weights cannot be read, one has another shape than the model's, two values, or no place in the
            encoder. With `finite`, also if a number is not finite.
    """
    with torch.device("meta"):
        empty = build(config)
    base = f"{empty.base_model_prefix}."
    tensors = _with_word_embedding(read_weights(folder, finite), config, base)
    for name in sorted(tensors.keys() & {name.removeprefix(base) for name in tensors if name.startswith(base)}):
        if not torch.equal(tensors[name].float(), tensors[base + name].float()):
            raise UserError(f"{folder}: {name} and {base}{name} have different values; copy the folder again")
    places = empty.state_dict()
    for name, tensor in sorted(tensors.items()):  # before transformers makes room for what does not fit
        place = next((places[key] for key in (name, base + name, name.removeprefix(base)) if key in places), tensor)
        if place.shape != tensor.shape:
            raise _misfit(folder, name, tensor.shape, place.shape)
    model, report = type(empty).from_pretrained(
        None, config=config, state_dict=tensors, output_loading_info=True, ignore_mismatched_sizes=True
    )
    for name, theirs, ours in sorted(report["mismatched_keys"]):
        raise _misfit(folder, name, theirs, ours)
    unused = set(report["unexpected_keys"])
    refuse_homeless(model.base_model.state_dict(), unused, base, folder)
    return model, Filled(set(report["missing_keys"]), unused)


def _misfit(folder: Path, name: str, theirs: Sequence[int], ours: Sequence[int]) -> UserError:
    return UserError(f"{folder}: the weight for {name} is {list(theirs)}, but config.json requires {list(ours)}")


def _with_word_embedding(tensors: dict[str, torch.Tensor], config: Any, base: str) -> dict[str, torch.Tensor]:
    """Return a folder's tensors with the word embedding, if it is tied and stored only as the output matrix."""
    if config.model_type == OWN_MODEL_TYPE or not config.tie_word_embeddings:
        return tensors
    from transformers import AutoModelForMaskedLM

    try:
        with torch.device("meta"):
            model = AutoModelForMaskedLM.from_config(config)
    except ValueError:  # the family has no masked LM
        return tensors
    names = {id(module): f"{name}.weight" for name, module in model.named_modules()}
    pair = (model.get_input_embeddings(), model.get_output_embeddings())
    word, output = (names.get(id(module), "") for module in pair)
    if output not in tensors or {word, word.removeprefix(base)} & tensors.keys():
        return tensors
    return {**tensors, word: tensors[output]} if tensors[output].shape == pair[0].weight.shape else tensors
