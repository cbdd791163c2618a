"""A Hugging Face folder's tensors, renamed and copied into a model of ours.

Every family ties the output matrix to the word embedding, as our models do.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from megatron_ddrp import checkpoint
from megatron_ddrp.config import ModelConfig
from megatron_ddrp.conversion.vocabulary_transfer import Transfer
from megatron_ddrp.errors import UserError
from megatron_ddrp.model import on_meta_device

TOKEN_EMBEDDING, SEGMENT_EMBEDDING = "embeddings.token.weight", "embeddings.segment.weight"
EMBEDDING_DIFFERENCE = "embeddings.difference.weight"
"""Name of E_Δ of `objectives/rtd.py`, which starts at 0."""
OUTPUT_BIAS, OUTPUT_MATRIX = "head.decoder.bias", "head.decoder.weight"
BY_PIECE = (TOKEN_EMBEDDING, EMBEDDING_DIFFERENCE, OUTPUT_BIAS)
"""Ends of the names of weights with one row per piece of the vocabulary."""
UNREAD = re.compile(r"(position_ids|position_embeddings\.weight|inv_freq)$")
"""Names of an encoder's weights that transformers does not read: constants, and positions of DeBERTa's mask decoder."""
DIFFERENCE = "difference of the embeddings"
DRAWN = {
    r"head\.own\.": "modules of the objective",
    r"head\.(?!own\.|final_norm\.)": "head",
    r"generator\.": "generator",
    r"embeddings\.difference\.": DIFFERENCE,
}
"""Pattern of weights that a folder may lack as a whole, because they can be drawn anew → their name in messages."""


@dataclass(frozen=True)
class Weights:
    """Tensors of a folder under our names, and an account of the others."""

    ours: dict[str, Tensor]
    """Tensors in fp32, under our names."""
    left_out: list[str] = field(default_factory=list)
    """Names in the folder that have no counterpart here."""
    encoder: list[str] = field(default_factory=list)
    """Names in the folder of the encoder's weights."""
    initialised: list[str] = field(default_factory=list)
    """Parts of our model that the folder lacks, with their initial values; known after `fill`."""


def rename(
    tensors: Mapping[str, Tensor], our_name: Callable[[str], str | None], wanted: Collection[str], source: Path
) -> Weights:
    """Return a folder's tensors under our names; all but the `wanted` are left out.

    A folder may store the matrix that is word embedding and output matrix under either name.

    Raise `UserError` for a tensor that occurs twice with different values, and for an untied output matrix.
    """
    weights = Weights({})
    for name, tensor in tensors.items():
        ours = our_name(name)
        if ours is None or (ours not in wanted and ours != OUTPUT_MATRIX):
            weights.left_out.append(name)
            continue
        if not ours.startswith("head."):
            weights.encoder.append(name)
        if not torch.equal(weights.ours.setdefault(ours, tensor.float()), tensor.float()):
            raise UserError(f"{source}: {name} occurs under two names, with different values")
    matrix = weights.ours.pop(OUTPUT_MATRIX, None)
    if matrix is not None and not torch.equal(matrix, weights.ours.setdefault(TOKEN_EMBEDDING, matrix)):
        raise UserError(f"{source}: its output matrix differs from its word embedding; here the two are always tied")
    return weights


def refuse_homeless(encoder: Iterable[str], unused: Iterable[str], prefix: str, source: Path) -> None:
    """Raise `UserError` if an unused weight belongs to a part of the encoder, such as a layer too many.

    `encoder` are names of weights that the encoder of config.json has, with or without `prefix`.
    """
    parts = {name.removeprefix(prefix).partition(".")[0] for name in encoder}
    of_parts = (name for name in unused if name.removeprefix(prefix).partition(".")[0] in parts)
    homeless = [name for name in of_parts if not UNREAD.search(name)]
    if homeless:
        raise UserError(
            f"{source}: the encoder that config.json describes has no place for the weight {min(homeless)}, nor for "
            f"{len(homeless) - 1} more: they do not match; copy the folder again, or correct config.json"
        )


def refuse_sizes(config: ModelConfig, tensors: Mapping[str, Tensor], source: Path) -> None:
    """Raise `UserError`, before a model is built, if a configuration needs far more weights than a folder has."""
    held, needed = sum(tensor.numel() for tensor in tensors.values()), 0
    if config.num_layers <= len(tensors):
        may_lack = ("head.", TOKEN_EMBEDDING, SEGMENT_EMBEDDING)
        shapes = on_meta_device(config).named_parameters()
        needed = sum(p.numel() for name, p in shapes if not name.startswith(may_lack))
    if config.num_layers > len(tensors) or needed > 2 * held:  # `fill` reports smaller differences by tensor
        raise UserError(
            f"{source}: config.json says {config.num_layers} layers x {config.hidden_size}, and the weights are "
            f"{len(tensors)} tensors of {held:,} numbers: they do not match; copy the folder again"
        )


def change_rows(weights: Weights, transfer: Transfer) -> None:
    """Replace the rows of one vocabulary by those of another one."""
    for name, tensor in weights.ours.items():
        if name.endswith(BY_PIECE):
            weights.ours[name] = transfer.rows(tensor)


def fill(model: nn.Module, weights: Weights, vocab_size: int, source: Path) -> None:
    """Copy the weights into a freshly initialised model; its vocabulary's padding stays unchanged.

    Raise `UserError` for a weight that is missing or whose shape differs from the configuration's.
    """
    parameters = dict(model.named_parameters()) | checkpoint.persistent_buffers(model)
    _complete(parameters, weights, source)
    for name, parameter in parameters.items():
        if name not in weights.ours:
            continue
        value, target = weights.ours[name], parameter.data
        if name.endswith(BY_PIECE):
            value, target = value[:vocab_size], target[:vocab_size]
        if value.shape != target.shape:
            raise UserError(
                f"{source}: the weight for {name} is {list(value.shape)}, but config.json requires {list(target.shape)}"
            )
        target.copy_(value)


def _complete(parameters: Mapping[str, Tensor], weights: Weights, source: Path) -> None:
    """Record the parts that a folder lacks and that are drawn anew; raise `UserError` for any other missing weight."""
    missing = {name for name in parameters if name not in weights.ours}
    kind = "masked-LM " if OUTPUT_BIAS in parameters else "replaced-token "
    for pattern, part in DRAWN.items():
        whole = {name for name in parameters if re.match(pattern, name)}
        if whole and whole <= missing:
            missing -= whole
            begins = "0" if part == DIFFERENCE else "drawn anew"
            weights.initialised.append(f"{kind * (part == 'head')}{part} ({begins}; the folder has none)")
    if missing:
        raise UserError(
            f"{source}: the weight for {min(missing)} is missing, and {len(missing) - 1} more; the folder is incomplete"
        )
