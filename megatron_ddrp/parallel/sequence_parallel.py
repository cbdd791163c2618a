"""Sequence parallelism (Korthikanti et al., arXiv:2205.05198), added to a model that tensor parallelism has cut.

Between the cut regions, tensor parallelism keeps whole hidden states on all T ranks. Here each rank keeps a T-th of
every row there, `[batch, seq / T, hidden]`; LayerNorms, residual sums and dropout work on that part and store only it.

    embeddings → split ┐ ┌→ enter → attention    → leave ┐ ┌→ enter → feed-forward → leave ┐ ┌→ join → heads
                       └─┴──────────────── + ────────────┴─┴──────────────── + ────────────┴─┘

    forward                            backward
    split   own part                     all-gather
    enter   all-gather                   reduce-scatter       where tensor parallelism has f
    leave   reduce-scatter               all-gather           where it has g
    join    all-gather                   own part

An all-reduce is a reduce-scatter and an all-gather, so a layer exchanges as much as before. Code inside, before and
after the regions sees whole rows and does not change: attention with HCD, embeddings, notes, TCD, heads. Parameters
used on parts get the sum of the ranks' gradients. If T does not divide a row, zeros pad the last part. Gathered states
are kept for the backward pass; the paper keeps only the part and gathers again.

DeBERTa's mask decoder applies the last layer to a few tokens of whole rows; f and g stay unchanged there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_ddrp.model.electra import FormerGeneratorEmbeddings
from megatron_ddrp.model.embeddings import Embeddings
from megatron_ddrp.model.encoder import EncoderLayer
from megatron_ddrp.model.fused import Norm, normalise
from megatron_ddrp.model.heads import EnhancedMaskDecoder
from megatron_ddrp.model.stages import State
from megatron_ddrp.parallel.collectives import Entrance, Wait, enter, replicated_entrance, sum_of_ranks
from megatron_ddrp.parallel.process_group import Ranks
from megatron_ddrp.parallel.tensor_parallel import (
    ColumnParallelGeluLinear,
    FeedForwardOfRanks,
    ProjectingOfRanks,
    RowParallelLinear,
    SelfAttentionOfRanks,
    own_randomness,
    specialise,
)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:  # type: ignore[override]
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[override]
        return ctx.back(gradient), None, None


def split(whole: Tensor, ranks: Ranks) -> Tensor:
    """Return this rank's part `[batch, ⌈seq / T⌉, hidden]` of `[batch, seq, hidden]`, which is equal on all ranks."""
    return _Exchange.apply(whole, partial(_part_of, ranks), partial(_all_gather, ranks, whole.shape[1]))


def gathering_entrance(length: int, ranks: Ranks) -> Entrance:
    """Return the entrance of parts into a region as `[batch, length, hidden]`, which each rank uses differently."""
    return Entrance(partial(_all_gather, ranks, length), partial(_start_reduce_scatter, ranks))


def leave(summand: Tensor, ranks: Ranks) -> Tensor:
    """Return this rank's part of the sum over ranks of `summand` `[batch, seq, hidden]`."""
    return _Exchange.apply(summand, partial(_reduce_scatter, ranks), partial(_all_gather, ranks, summand.shape[1]))


def join(part: Tensor, length: int, ranks: Ranks) -> Tensor:
    """Return all parts as `[batch, length, hidden]`, which all ranks use alike."""
    return _Exchange.apply(part, partial(_all_gather, ranks, length), partial(_part_of, ranks))


def _parts(ranks: Ranks, whole: Tensor) -> Tensor:
    """Return `[batch, seq, ..]` → `[T, batch, ⌈seq / T⌉, ..]`, padded with zeros."""
    missing = -whole.shape[1] % ranks.tensor_size
    padded = F.pad(whole, (0, 0, 0, missing)) if missing else whole
    return padded.unflatten(1, (ranks.tensor_size, -1)).transpose(0, 1)


def _part_of(ranks: Ranks, whole: Tensor) -> Tensor:
    return _parts(ranks, whole)[ranks.tensor_rank].clone(memory_format=torch.contiguous_format)


def _all_gather(ranks: Ranks, length: int, part: Tensor) -> Tensor:
    parts = part.new_empty(ranks.tensor_size * len(part), *part.shape[1:])
    dist.all_gather_into_tensor(parts, part.contiguous(), group=ranks.tensor_group)
    return parts.unflatten(0, (ranks.tensor_size, -1)).transpose(0, 1).flatten(1, 2)[:, :length].contiguous()


def _reduce_scatter(ranks: Ranks, whole: Tensor) -> Tensor:
    return _start_reduce_scatter(ranks, whole)()


def _start_reduce_scatter(ranks: Ranks, whole: Tensor) -> Wait:
    parts = _parts(ranks, whole).flatten(0, 1).contiguous()
    own = parts.new_empty(len(whole), *parts.shape[1:])
    work = dist.reduce_scatter_tensor(own, parts, group=ranks.tensor_group, async_op=True)

    def wait() -> Tensor:
        work.wait()
        return own

    return wait


class SharedRows:
    """State that the modules below share: the rows that a layer works on now.

    Attributes:
        length: tokens of the whole rows of which the layer has parts; None if the layer has whole rows.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.length: int | None = None

    def for_rows(self, parameters: Tensor) -> Tensor:
        """Return parameters that are equal on all ranks, for use on the current rows."""
        return parameters if self.length is None else enter(parameters, replicated_entrance(self.ranks))

    @property
    def entrance(self) -> Entrance:
        """Entrance of a part, or of whole rows, into a cut region as whole rows."""
        return replicated_entrance(self.ranks) if self.length is None else gathering_entrance(self.length, self.ranks)

    def join(self, state: State) -> State:
        """Return a state with whole rows in place of parts."""
        return state._replace(hidden=join(state.hidden, state.inputs.batch.input_ids.shape[1], self.ranks))


class EncoderLayerOfParts(EncoderLayer):
    """A layer whose input and output are parts; the last layer returns whole rows."""

    rows: SharedRows

    def forward(self, state: State) -> State:
        self.rows.length = state.inputs.batch.input_ids.shape[1]
        state = super().forward(state)
        return self.rows.join(state) if self.number == self.config.num_layers - 1 else state

    def runs_compiled(self, hidden: Tensor) -> bool:
        """Return False: LayerNorms and dropout must stay modules, because they exchange with other ranks."""
        return False


class ProjectingOfParts(ProjectingOfRanks):
    """A block that gathers its input rows."""

    rows: SharedRows

    @property
    def entrance(self) -> Entrance:
        return self.rows.entrance


class FeedForwardOfParts(ProjectingOfParts, FeedForwardOfRanks):
    """A feed-forward block that gathers its input rows."""


class SelfAttentionOfParts(ProjectingOfParts, SelfAttentionOfRanks):
    """Attention that gathers its input rows."""


class GeluLinearOfParts(ColumnParallelGeluLinear):
    """A feed-forward block's first map, which gathers its input rows."""

    rows: SharedRows

    @property
    def entrance(self) -> Entrance:
        return self.rows.entrance


class RowParallelLinearToParts(RowParallelLinear):
    """A `RowParallelLinear` that returns this rank's part of the output, unless the rows are whole."""

    rows: SharedRows

    def forward(self, x: Tensor) -> Tensor:
        summand = F.linear(x, self.weight)
        total = sum_of_ranks(summand, self.ranks) if self.rows.length is None else leave(summand, self.ranks)
        return total if self.bias is None else total + self.rows.for_rows(self.bias)


class NormOfParts(Norm):
    """A norm whose parameters get gradients from all parts."""

    rows: SharedRows

    def forward(self, x: Tensor) -> Tensor:
        given: tuple[Tensor, ...] = (self.weight,) if self.bias is None else (self.weight, self.bias)
        weight, *bias = self.rows.for_rows(torch.stack(given))
        return normalise(x, weight, bias[0] if bias else None, self.eps, self.is_rms)


class SplittingNorm(NormOfParts):
    """The embeddings' norm, whose input is whole rows."""

    def forward(self, x: Tensor) -> Tensor:
        self.rows.length = x.shape[1]
        return super().forward(split(x, self.rows.ranks))


class LinearOfParts(nn.Linear):
    """The projection after `SplittingNorm`; its parameters get gradients from all parts."""

    rows: SharedRows

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.rows.for_rows(self.bias)
        return F.linear(x, self.rows.for_rows(self.weight), bias)


class DropoutOfParts(nn.Dropout):
    """Dropout that draws separately for each part; on whole rows all ranks draw alike."""

    rows: SharedRows

    def forward(self, x: Tensor) -> Tensor:
        if self.rows.length is None or not (self.p and self.training):
            return super().forward(x)
        with own_randomness(self.rows.ranks):
            return super().forward(x)


class MaskDecoderOfParts(EnhancedMaskDecoder):
    """A mask decoder that works on whole rows, until the next layer begins or embeddings are split."""

    rows: SharedRows

    def forward(self, state: State, last_layer: EncoderLayer) -> Tensor:
        self.rows.length = None
        return super().forward(self.rows.join(state), last_layer)


PARALLEL: tuple[tuple[str, type[nn.Module]], ...] = (
    (r"layers\.\d+", EncoderLayerOfParts),
    (r"attention", SelfAttentionOfParts),
    (r"feed_forward", FeedForwardOfParts),
    (r"feed_forward\.input", GeluLinearOfParts),
    (r"(attention|feed_forward)\.output", RowParallelLinearToParts),
    (r"(attention|feed_forward)_norm", NormOfParts),
    (r"embeddings\.norm", SplittingNorm),
    (r"(layers\.\d+|embeddings)\.dropout", DropoutOfParts),
    (r"mask_decoder", MaskDecoderOfParts),
)
"""(pattern of the end of a module's name, subclass that such a module becomes if it is of the subclass's base)."""


def apply_sequence_parallel(model: nn.Module, ranks: Ranks) -> None:
    """Make a model that `apply_tensor_parallel` has cut keep only parts of rows between its cut regions, in place."""
    rows = SharedRows(ranks)
    specialise(model, PARALLEL, rows=rows)
    for module in model.modules():
        if isinstance(module, Embeddings) and not isinstance(module, FormerGeneratorEmbeddings):
            specialise(module, ((r"projection", LinearOfParts),), rows=rows)
