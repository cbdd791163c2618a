"""Which rank holds what: how tensor parallelism cuts each parameter, and the way there and back.

One table says it for the layers that every model has; an encoding says it for its own parameters and buffers
(`by_head`). What is in neither is held whole by all tensor-parallel ranks. Rank t of T holds block t of T equal blocks
along the dimension given. The vocabulary is padded to a multiple of 128 first, in every layout alike.

Parameters are known by the name they have in the whole model, on one device: `layers.3.attention.query.weight`. A
pipeline stage holds a part of the model under other names; `local_parameters` gives them by the names of the whole.
"""

from __future__ import annotations

import re

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_ddrp.config import ModelConfig, encoding_class
from megatron_ddrp.parallel.process_group import Ranks

ROWS, COLUMNS = 0, 1
"""Dimensions of a weight `[out, in]`: cut by rows a layer yields a part of its output, by columns it takes a part of
its input."""

SPLIT = (
    (r"embeddings\.(token|difference)\.weight", ROWS),
    (r"head\.decoder\.(weight|bias)", ROWS),
    (r"attention\.(query|key|value)\.(weight|bias)", ROWS),
    (r"attention\.output\.weight", COLUMNS),
    (r"feed_forward\.(input|gate)\.(weight|bias)", ROWS),
    (r"feed_forward\.output\.weight", COLUMNS),
)
"""(pattern of the end of a parameter's name, the dimension that is cut)."""


def split_dimension(name: str, config: ModelConfig) -> int | None:
    """The dimension along which tensor parallelism cuts a parameter or buffer of the whole model; None = whole."""
    encoding = encoding_class(config.position_encoding)
    for module, by_head in (("position", encoding.by_head), ("layer_position", encoding.layer_part.by_head)):
        for parameter, dimension in by_head.items():
            if name.endswith(f".{module}.{parameter}"):
                return dimension
    for pattern, dimension in SPLIT:
        if re.search(rf"(^|\.){pattern}$", name):
            return dimension
    return None


def own_part(name: str, whole: Tensor, config: ModelConfig, ranks: Ranks) -> Tensor:
    """This rank's part of a whole parameter, or of a tensor shaped like it (a gradient, an Adam moment): a view."""
    dimension = split_dimension(name, config)
    if dimension is None or ranks.tensor_size == 1:
        return whole
    return whole.chunk(ranks.tensor_size, dimension)[ranks.tensor_rank]


def gather_whole(name: str, local: Tensor, config: ModelConfig, ranks: Ranks) -> Tensor:
    """The inverse of `own_part`, on every tensor-parallel rank; a collective call among them, on `ranks.device`."""
    dimension = split_dimension(name, config)
    if dimension is None or ranks.tensor_size == 1:
        return local
    parts = [torch.empty_like(local) for _ in range(ranks.tensor_size)]
    dist.all_gather(parts, local.contiguous(), group=ranks.tensor_group)
    return torch.cat(parts, dimension)


def name_parameters(model: nn.Module) -> None:
    """Write its name in the whole model onto each parameter and module, where it stays when the model is cut up."""
    for name, item in (*model.named_parameters(), *model.named_modules()):
        item.whole_name = name  # type: ignore[assignment, union-attr]


def whole_name(item: nn.Parameter | nn.Module) -> str | None:
    """Name of a parameter or module in the whole model, where `name_parameters` wrote it down."""
    return getattr(item, "whole_name", None)


def local_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """This rank's parameters by their names in the whole model; a module that was never cut up keeps its own names.

    Tied weights have one name: with a pipeline, its first and its last stage both hold `embeddings.token.weight`.
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
