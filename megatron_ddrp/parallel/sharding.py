"""Tensor parallelism's cut of each parameter, and the conversion between parts and whole tensors.

One table names the cut parameters of the layers that every model has; `by_head` of an encoding names its own parameters
and buffers. Every tensor-parallel rank holds all others whole. Rank t of T holds block t of T equal blocks along the
cut dimension. The vocabulary is padded to a multiple of 128 first, in every layout.

Parameters are known by their names in the whole model on one device: `layers.3.attention.query.weight`. A pipeline
stage holds a part of the model under other names; `local_parameters` returns them by the names of the whole.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_ddrp.config import encoding_class
from megatron_ddrp.parallel.process_group import Ranks

ROWS, COLUMNS = 0, 1
"""Dimensions of a weight `[out, in]`. A layer cut by rows computes a part of its output; a layer cut by columns reads
a part of its input."""

SPLIT = (
    (r"embeddings\.(token|difference)\.weight", ROWS),
    (r"head\.decoder\.(weight|bias)", ROWS),
    (r"attention\.(query|key|value)\.(weight|bias)", ROWS),
    (r"attention\.output\.weight", COLUMNS),
    (r"feed_forward\.(input|gate)\.(weight|bias)", ROWS),
    (r"feed_forward\.output\.weight", COLUMNS),
)
"""(pattern of the end of a parameter's name, cut dimension)."""


def split_dimension(name: str, encoding: str) -> int | None:
    """Return the dimension along which tensor parallelism cuts a parameter or buffer; None if it stays whole.

    `encoding` is a name in `config.registry.ENCODINGS`, here and below.
    """
    positions = encoding_class(encoding)
    for module, by_head in (("position", positions.by_head), ("layer_position", positions.layer_part.by_head)):
        for parameter, dimension in by_head.items():
            if name.endswith(f".{module}.{parameter}"):
                return dimension
    for pattern, dimension in SPLIT:
        if re.search(rf"(^|\.){pattern}$", name):
            return dimension
    return None


def uncut_shape(name: str, local: Sequence[int], encoding: str, ranks: Ranks) -> tuple[int, ...]:
    """Return the shape of the whole tensor of which a tensor of shape `local` is this rank's `own_part`."""
    shape, dimension = list(local), split_dimension(name, encoding)
    if dimension is not None:
        shape[dimension] *= ranks.tensor_size
    return tuple(shape)


def own_part(name: str, whole: Tensor, encoding: str, ranks: Ranks) -> Tensor:
    """Return this rank's part of a whole parameter, or of a tensor of its shape (gradient, Adam moment), as a view."""
    dimension = split_dimension(name, encoding)
    if dimension is None or ranks.tensor_size == 1:
        return whole
    return whole.chunk(ranks.tensor_size, dimension)[ranks.tensor_rank]


def gather_whole(name: str, local: Tensor, encoding: str, ranks: Ranks) -> Tensor:
    """Return the whole tensor of which `local` is this rank's `own_part`, on every tensor-parallel rank.

    A collective call among these ranks, on `ranks.device`.
    """
    dimension = split_dimension(name, encoding)
    if dimension is None or ranks.tensor_size == 1:
        return local
    parts = [torch.empty_like(local) for _ in range(ranks.tensor_size)]
    dist.all_gather(parts, local.contiguous(), group=ranks.tensor_group)
    return torch.cat(parts, dimension)


def name_parameters(model: nn.Module) -> None:
    """Store on each parameter and module its name in the whole model; the name stays when the model is cut."""
    for name, item in (*model.named_parameters(), *model.named_modules()):
        item.whole_name = name  # type: ignore[assignment, union-attr]


def whole_name(item: nn.Parameter | nn.Module) -> str | None:
    """Return the name of a parameter or module in the whole model, if `name_parameters` stored it, else None."""
    return getattr(item, "whole_name", None)


def local_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return this rank's parameters by their names in the whole model; a model that was never cut keeps its names.

    Tied weights have one name: the first and the last stage of a pipeline both hold `embeddings.token.weight`.
    """
    return {whole_name(parameter) or name: parameter for name, parameter in module.named_parameters()}


def local_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return this rank's buffers that checkpoints keep, by their names in the whole model."""
    kept = {id(tensor) for tensor in module.state_dict(keep_vars=True).values()}
    return {
        f"{whole_name(holder) or place}.{name}": buffer
        for place, holder in module.named_modules()
        for name, buffer in holder.named_buffers(recurse=False)
        if id(buffer) in kept
    }
