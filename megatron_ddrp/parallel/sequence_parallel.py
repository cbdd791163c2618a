"""Sequence parallelism (Korthikanti et al., arXiv:2205.05198), laid over a model that tensor parallelism has cut.

Between the cut regions tensor parallelism leaves hidden states whole on all T ranks. Here each rank has a T-th of every
row there, `[batch, seq / T, hidden]`: LayerNorms, residual sums and dropout work on its part, and remember that alone.

    embeddings → split ┐ ┌→ enter → attention    → leave ┐ ┌→ enter → feed-forward → leave ┐ ┌→ join → heads
                       └─┴──────────────── + ────────────┴─┴──────────────── + ────────────┴─┘

    forward                            backward
    split   own part                     all-gather
    enter   all-gather                   reduce-scatter       where tensor parallelism has f
    leave   reduce-scatter               all-gather           where it has g
    join    all-gather                   own part

An all-reduce is a reduce-scatter and an all-gather, so that in a layer as much travels as before. What lies inside the
regions, before and after sees whole rows and does not change: attention with HCD, embeddings, notes, TCD, heads.
Parameters used on parts get the sum of the ranks' gradients. Zeros fill up the last part where T does not divide a row.
What was gathered is kept for the backward pass; the paper keeps the part alone and gathers once more.

DeBERTa's mask decoder applies the last layer to a few tokens of whole rows: there f and g stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_ddrp.model.electra import GeneratorEmbeddings
from megatron_ddrp.model.encoder import EncoderLayer
from megatron_ddrp.model.heads import EnhancedMaskDecoder
from megatron_ddrp.model.stages import StageState
from megatron_ddrp.parallel.collectives import copy_to_ranks, sum_of_ranks
from megatron_ddrp.parallel.process_group import Ranks
from megatron_ddrp.parallel.tensor_parallel import RowParallelLinear, own_randomness, replace_modules

Tensors = tuple[Tensor, ...]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:  # type: ignore[override]
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[override]
        return ctx.back(gradient), None, None


def split(whole: Tensor, ranks: Ranks) -> Tensor:
    """`[batch, seq, hidden]`, alike on all tensor-parallel ranks → our part `[batch, ⌈seq / T⌉, hidden]`."""
    return _Exchange.apply(whole, partial(_own_part, ranks), partial(_all_gathered, ranks, whole.shape[1]))


def enter(part: Tensor, length: int, ranks: Ranks) -> Tensor:
    """Parts → `[batch, length, hidden]`, used by each rank in its own way, so that gradients add up."""
    return _Exchange.apply(part, partial(_all_gathered, ranks, length), partial(_reduce_scattered, ranks))


def leave(summand: Tensor, ranks: Ranks) -> Tensor:
    """Each rank's summand `[batch, seq, hidden]` → our part of the sum."""
    return _Exchange.apply(summand, partial(_reduce_scattered, ranks), partial(_all_gathered, ranks, summand.shape[1]))


def join(part: Tensor, length: int, ranks: Ranks) -> Tensor:
    """Parts → `[batch, length, hidden]`, used by all ranks alike."""
    return _Exchange.apply(part, partial(_all_gathered, ranks, length), partial(_own_part, ranks))


def _parts(ranks: Ranks, whole: Tensor) -> Tensor:
    """`[batch, seq, ..]` → `[T, batch, ⌈seq / T⌉, ..]`, filled up with zeros."""
    missing = -whole.shape[1] % ranks.tensor_size
    padded = F.pad(whole, (0, 0, 0, missing)) if missing else whole
    return padded.unflatten(1, (ranks.tensor_size, -1)).transpose(0, 1)


def _own_part(ranks: Ranks, whole: Tensor) -> Tensor:
    return _parts(ranks, whole)[ranks.tensor_rank].clone(memory_format=torch.contiguous_format)


def _all_gathered(ranks: Ranks, length: int, part: Tensor) -> Tensor:
    parts = part.new_empty(ranks.tensor_size * len(part), *part.shape[1:])
    dist.all_gather_into_tensor(parts, part.contiguous(), group=ranks.tensor_group)
    return parts.unflatten(0, (ranks.tensor_size, -1)).transpose(0, 1).flatten(1, 2)[:, :length].contiguous()


def _reduce_scattered(ranks: Ranks, whole: Tensor) -> Tensor:
    parts = _parts(ranks, whole).flatten(0, 1).contiguous()
    own = parts.new_empty(len(whole), *parts.shape[1:])
    dist.reduce_scatter_tensor(own, parts, group=ranks.tensor_group)
    return own


class Rows:
    """The rows that a layer works on now: what the modules below have to know of each other.

    Attributes:
        length: tokens of the whole rows of which the layer has parts; None where it is given whole ones.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.length: int | None = None

    def shared(self, parameters: Tensor) -> Tensor:
        """Parameters alike on all ranks, for use on these rows."""
        return parameters if self.length is None else copy_to_ranks(parameters, self.ranks)

    def begin_layer(self, layer: nn.Module, inputs: tuple[Tensors]) -> None:
        """Before an encoder layer: parts enter."""
        self.length = StageState.unpack(inputs[0]).document_ids.shape[1]

    def end_layers(self, layer: nn.Module, inputs: tuple[Tensors], outputs: Tensors) -> Tensors:
        """After the last one: whole rows go on."""
        assert self.length is not None
        return (join(outputs[0], self.length, self.ranks), *outputs[1:])

    def decode(self, decoder: nn.Module, inputs: tuple[Tensors, EncoderLayer]) -> tuple[Tensors, EncoderLayer]:
        """Before the mask decoder: whole rows from here on, until the next layer begins or embeddings are split."""
        tensors, last_layer = inputs
        length = StageState.unpack(tensors).document_ids.shape[1]
        self.length = None
        return (join(tensors[0], length, self.ranks), *tensors[1:]), last_layer


class Enter(nn.Module):
    """Where rows enter a cut region."""

    def __init__(self, _identity: nn.Module, rows: Rows) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, x: Tensor) -> Tensor:
        """A part, or where the rows are whole these → whole rows."""
        rows = self.rows
        return copy_to_ranks(x, rows.ranks) if rows.length is None else enter(x, rows.length, rows.ranks)


class RowParallelLinearToParts(nn.Module):
    """`RowParallelLinear`, of whose output this rank gets its part, unless the rows are whole."""

    def __init__(self, linear: RowParallelLinear, rows: Rows) -> None:
        super().__init__()
        self.rows, self.weight, self.bias = rows, linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        summand, ranks = F.linear(x, self.weight), self.rows.ranks
        total = sum_of_ranks(summand, ranks) if self.rows.length is None else leave(summand, ranks)
        return total + self.rows.shared(self.bias)


class NormOfParts(nn.Module):
    """A LayerNorm whose parameters learn from all parts."""

    def __init__(self, norm: nn.LayerNorm, rows: Rows) -> None:
        super().__init__()
        self.rows, self.weight, self.bias, self.eps = rows, norm.weight, norm.bias, norm.eps

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.rows.shared(torch.stack((self.weight, self.bias)))
        return F.layer_norm(x, weight.shape, weight, bias, self.eps)


class SplittingNorm(NormOfParts):
    """The embeddings' LayerNorm: whole rows come in."""

    def forward(self, x: Tensor) -> Tensor:
        self.rows.length = x.shape[1]
        return super().forward(split(x, self.rows.ranks))


class LinearOfParts(nn.Module):
    """The projection behind `SplittingNorm` in ELECTRA's generator, whose parameters learn from all parts."""

    def __init__(self, linear: nn.Linear, rows: Rows) -> None:
        super().__init__()
        self.rows, self.weight, self.bias = rows, linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.rows.shared(self.weight), self.rows.shared(self.bias))


class DropoutOfParts(nn.Dropout):
    """Draws for each part its own, where the rows are whole alike on all ranks."""

    def __init__(self, dropout: nn.Dropout, rows: Rows) -> None:
        super().__init__(dropout.p)
        self.rows = rows

    def forward(self, x: Tensor) -> Tensor:
        if self.rows.length is None or not (self.p and self.training):
            return super().forward(x)
        with own_randomness(self.rows.ranks):
            return super().forward(x)


REPLACED = (
    (r"(attention|feed_forward)\.enter", Enter),
    (r"(attention|feed_forward)\.output", RowParallelLinearToParts),
    (r"(attention|feed_forward)_norm", NormOfParts),
    (r"embeddings\.norm", SplittingNorm),
    (r"(layers\.\d+|embeddings)\.dropout", DropoutOfParts),
)
"""(pattern of the end of a module's name, what takes its place)."""


def apply_sequence_parallel(model: nn.Module, ranks: Ranks) -> None:
    """Make a model that `apply_tensor_parallel` has cut keep parts of the rows between its cut regions, in place."""
    rows = Rows(ranks)
    replace_modules(model, REPLACED, rows)
    for module in model.modules():
        if type(module) is GeneratorEmbeddings:  # in the former layout whole rows are projected
            assert isinstance(module.projection, nn.Linear)
            module.projection = LinearOfParts(module.projection, rows)
        if isinstance(module, EncoderLayer):
            module.register_forward_pre_hook(rows.begin_layer)
            if module.number == module.config.num_layers - 1:
                module.register_forward_hook(rows.end_layers)
        if isinstance(module, EnhancedMaskDecoder):
            module.register_forward_pre_hook(rows.decode)
