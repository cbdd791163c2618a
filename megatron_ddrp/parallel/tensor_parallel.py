"""Tensor parallelism (Shoeybi et al., arXiv:1909.08053), laid over a finished model from outside.

The model is initialised whole, so that every layout starts from the same weights; then each rank keeps its part of what
`sharding.SPLIT` and the encodings' `by_head` name. A layer cut by rows needs no other code: it is a smaller layer. What
the cut does need is said by a table here: where replicated tensors enter a cut region, their gradient is summed over
the ranks (f in the paper, `copy_to_ranks`); where parts of a sum leave it, they are added up (g, `sum_of_ranks`).

Every rank uses the position parameters that all heads share (those not in `by_head`) for its own heads alone, so each
sees a part of their gradient. The parts are summed on the parameter itself, whatever the encoding does with it; what
belongs to single heads is cut, and its gradient stays on its rank. Dropout inside the cut attention differs by rank;
outside it is alike.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_ddrp.config import ModelConfig, encoding_class
from megatron_ddrp.model.encoder import SelfAttention
from megatron_ddrp.model.heads import MaskedLMHead
from megatron_ddrp.model.positions import LayerPositions, PositionEncoding
from megatron_ddrp.parallel.collectives import all_reduced, copy_to_ranks, sum_of_ranks
from megatron_ddrp.parallel.cosine import CosineOfAllRanks
from megatron_ddrp.parallel.process_group import Ranks
from megatron_ddrp.parallel.sharding import own_part, split_dimension
from megatron_ddrp.parallel.vocabulary import (
    VocabularyParallelEmbedding,
    best_of_ranks,
    masked_lm_sum_of_ranks,
    sample_of_ranks,
)


class CopyToRanks(nn.Module):
    """Where a replicated tensor enters a cut region of a layer."""

    def __init__(self, _identity: nn.Module, ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks

    def forward(self, x: Tensor) -> Tensor:
        return copy_to_ranks(x, self.ranks)


class RowParallelLinear(nn.Module):
    """A linear map of which this rank has some columns: takes its part of the input, gives the whole output."""

    def __init__(self, linear: nn.Linear, ranks: Ranks) -> None:
        super().__init__()
        self.ranks, self.weight, self.bias = ranks, linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """`[.., in / tensor_size]` → `[.., out]`, the bias added once, to the sum."""
        return sum_of_ranks(F.linear(x, self.weight), self.ranks) + self.bias


REPLACED = (
    (r"(attention|feed_forward)\.enter", CopyToRanks),
    (r"(attention|feed_forward)\.output", RowParallelLinear),
    (r"embeddings\.token", VocabularyParallelEmbedding),
)
"""(pattern of the end of a module's name, what takes its place)."""


def apply_tensor_parallel(model: nn.Module, config: ModelConfig, ranks: Ranks) -> None:
    """Leave this rank's part of a whole model, in place, and make its parts work together."""
    if ranks.tensor_size == 1:
        return
    _keep_own_parts(model, config, ranks)
    encoding = encoding_class(config.position_encoding)
    cosine = CosineOfAllRanks(ranks, bool(encoding.by_head or encoding.layer_part.by_head))
    replace_modules(model, REPLACED, ranks)
    _sum_shared_position_gradients(model, ranks)
    for module in model.modules():
        if isinstance(module, SelfAttention):
            module.cosine_of_all_ranks = cosine
            module.own_randomness = partial(own_randomness, ranks)
        if isinstance(module, MaskedLMHead):
            module.decoder.register_forward_pre_hook(partial(_copy_input, ranks))
            module.first_piece = ranks.tensor_rank * len(module.decoder.weight)
            module.lm_sum = partial(masked_lm_sum_of_ranks, first_piece=module.first_piece, ranks=ranks)
            module.sample = partial(sample_of_ranks, first_piece=module.first_piece, ranks=ranks)
            module.best = partial(best_of_ranks, first_piece=module.first_piece, ranks=ranks)


def replace_modules(model: nn.Module, table: Sequence[tuple[str, Callable[..., nn.Module]]], *arguments: Any) -> None:
    """Put `replacement(module, *arguments)` in place of the modules that `table` names by the end of their names."""
    replaced: dict[nn.Module, nn.Module] = {}  # once each, though two may share it, as ELECTRA's embeddings do
    for name, module in list(model.named_modules(remove_duplicate=False)):
        for pattern, replacement in table:
            if re.search(rf"(^|\.){pattern}$", name):
                if module not in replaced:
                    replaced[module] = replacement(module, *arguments)
                parent, _, own_name = name.rpartition(".")
                model.get_submodule(parent).register_module(own_name, replaced[module])


def _keep_own_parts(model: nn.Module, config: ModelConfig, ranks: Ranks) -> None:
    """Replace each parameter and buffer that is cut by this rank's part; tied ones stay tied, frozen ones frozen."""
    parts: dict[int, Tensor] = {}
    for module_name, module in model.named_modules():
        for name, whole in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            full_name = f"{module_name}.{name}"
            if split_dimension(full_name, config) is None:
                continue
            if id(whole) not in parts:
                part = own_part(full_name, whole.detach(), config, ranks).clone()
                if isinstance(whole, nn.Parameter):
                    part = nn.Parameter(part, whole.requires_grad)
                    part.tensor_model_parallel = True  # type: ignore[attr-defined]  # DeepSpeed's norms count each part
                parts[id(whole)] = part
            setattr(module, name, parts[id(whole)])


def _copy_input(ranks: Ranks, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(copy_to_ranks(x, ranks) for x in inputs)


def _sum_shared_position_gradients(model: nn.Module, ranks: Ranks) -> None:
    """Make each trained position parameter that all heads share receive the sum of the ranks' gradients."""
    shared = {
        parameter
        for module in model.modules()
        if isinstance(module, (PositionEncoding, LayerPositions))
        for name, parameter in module.named_parameters()
        if name not in module.by_head and parameter.requires_grad
    }
    for parameter in shared:
        parameter.register_hook(partial(all_reduced, ranks=ranks))


@contextlib.contextmanager
def own_randomness(ranks: Ranks) -> Iterator[None]:
    """Random draws of this rank's own, from a seed that torch's state gives; that state goes on alike on all ranks.

    Nothing is kept between calls, so that recomputing a layer from the state it began with draws the same again.
    """
    seed = int(torch.randint(2**62, ()))
    with torch.random.fork_rng(devices=[ranks.device] if ranks.device.type == "cuda" else []):
        torch.manual_seed(seed + ranks.tensor_rank)
        yield
