"""Tensor and sequence parallelism, added to a finished model from outside.

For tensor parallelism (Shoeybi et al., arXiv:1909.08053) the model is initialised whole, so every layout starts from
the same weights. Then each rank keeps its part of the parameters that `pipeline.SPLIT` and the encodings' `by_head`
name. A layer cut by rows is a smaller layer and needs no other code. Modules that need other code are in one table,
`PARALLEL`: each becomes a subclass of its own class that overrides the methods which exchange with other ranks. Where
replicated tensors enter a cut region, their gradient is summed over the ranks (f in the paper, `pipeline.py`); where
parts of a sum leave it, they are added up (g, `sum_of_ranks`).

Every rank uses the position parameters that all heads share (those not in `by_head`) for its own heads only, so it
computes a part of their gradient. A hook on the parameter sums the parts, for any encoding. Parameters of single heads
are cut, and their gradients stay on their rank. Dropout inside the cut attention differs by rank; elsewhere all ranks
draw alike.

Sequence parallelism is added to a model that tensor parallelism has cut; see `apply_sequence_parallel`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_ddrp.model.attention.logits import Attending
from megatron_ddrp.model.bert import Encoder
from megatron_ddrp.model.embeddings import Embeddings
from megatron_ddrp.model.encoder import EncoderLayer, FeedForward, Projecting, SelfAttention
from megatron_ddrp.model.fused import GeluLinear, Norm, normalise
from megatron_ddrp.model.heads import EnhancedMaskDecoder, MaskedLMHead
from megatron_ddrp.model.positions import LayerPositions, PositionEncoding
from megatron_ddrp.model.stages import State
from megatron_ddrp.parallel.pipeline import (
    CosineOfAllRanks,
    Entrance,
    Exchange,
    Wait,
    all_reduce,
    column_map,
    column_maps,
    enter,
    own_part,
    replicated_entrance,
    seed_draws,
    split_dimension,
    sum_of_ranks,
)
from megatron_ddrp.parallel.process_group import Ranks


def _own_rows(ids: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Return the local row of each id, 0 for an id of another rank, and true for each id of this rank."""
    rows = ids - first
    here = (rows >= 0) & (rows < count)
    return torch.where(here, rows, 0), here


class VocabularyParallelEmbedding(nn.Embedding):
    """Some rows of an embedding; each token's vector comes from the rank that holds its row."""

    ranks: Ranks

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return int64 `[..]` → `[.., hidden]`, equal on all ranks."""
        rows, here = _own_rows(input_ids, self.ranks.tensor_rank * len(self.weight), len(self.weight))
        return sum_of_ranks(F.embedding(rows, self.weight) * here.unsqueeze(-1), self.ranks)


class MaskedLMHeadOfRanks(MaskedLMHead):
    """A masked-LM head with the logits of some pieces; its results are equal on all ranks.

    The logits are never gathered. The ranks exchange the largest logit of each predicted token, and two numbers more
    per token: the sum of the exponentials and the label's logit. The padding of the vocabulary has logits of −∞ and
    takes no part.
    """

    ranks: Ranks

    @property
    def first_piece(self) -> int:  # type: ignore[override]
        return self.ranks.tensor_rank * len(self.decoder.weight)

    def lm_sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        return _CrossEntropyOfRanks.apply(logits, labels, self.first_piece, self.ranks)

    def winner(self, scores: Tensor, columns: Tensor) -> Tensor:
        """Return the piece of the largest score, the first of equal ones; `scores` and `columns` `[n]` are local."""
        largest = all_reduce(scores, self.ranks, dist.ReduceOp.MAX)
        pieces = torch.where(scores == largest, columns + self.first_piece, torch.iinfo(torch.int64).max)
        return all_reduce(pieces, self.ranks, dist.ReduceOp.MIN)


class _CrossEntropyOfRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, labels: Tensor, first_piece: int, ranks: Ranks) -> Tensor:  # type: ignore[override]
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        largest = all_reduce(wide.amax(-1), ranks, dist.ReduceOp.MAX)  # [n]
        exponentials = (wide - largest.unsqueeze(-1)).exp_()  # [n, rows], 0 at the padding
        rows, here = _own_rows(labels, first_piece, wide.shape[1])
        own_label = torch.where(here, wide.gather(1, rows.unsqueeze(1)).squeeze(1) - largest, 0.0)
        total, label = all_reduce(torch.stack((exponentials.sum(-1), own_label)), ranks)  # [n] each
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(-1)), rows, here)
        ctx.dtype = logits.dtype
        return (total.log() - label).sum()

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[override]
        probabilities, rows, here = ctx.saved_tensors
        d_logits = probabilities.scatter_add(1, rows.unsqueeze(1), -here.to(probabilities.dtype).unsqueeze(1))
        return (d_logits * gradient).to(ctx.dtype), None, None, None


class OfRanks:
    """Base of modules with a cut region: parts of it are on other ranks."""

    ranks: Ranks
    rows: SharedRows | None = None
    """Rows of sequence parallelism, if the module's input and output are parts of them."""

    @property
    def entrance(self) -> Entrance:
        """Entrance of hidden states into the cut region."""
        return replicated_entrance(self.ranks) if self.rows is None else self.rows.entrance


class ProjectingOfRanks(OfRanks, Projecting):
    """A block with some rows of each linear map on this rank."""

    def project(self, hidden: Tensor, *maps: nn.Linear) -> tuple[Tensor, ...]:
        return (hidden, *column_maps(hidden, self.entrance, maps))


class FeedForwardOfRanks(ProjectingOfRanks, FeedForward):
    """A feed-forward block with some columns of the inner width on this rank."""


class SelfAttentionOfRanks(ProjectingOfRanks, SelfAttention):
    """Attention with some heads on this rank."""

    def own_randomness(self) -> contextlib.AbstractContextManager:
        return own_randomness(self.ranks)

    def mean_of_heads(self, x: Tensor) -> Tensor:
        return sum_of_ranks(x.mean(1), self.ranks) / self.ranks.tensor_size

    def cosine_apart(self, attending: Attending) -> Tensor:
        part = self.encoding.layer_part
        has_parts_by_head = part.uses_maps or bool(self.encoding.by_head or part.by_head)
        return CosineOfAllRanks(self.ranks, has_parts_by_head)(attending)


class ColumnParallelLinear(nn.Linear):
    """A linear map with some rows on this rank: reads the whole input, returns its part of the output."""

    ranks: Ranks

    def forward(self, x: Tensor) -> Tensor:
        return column_map(x, replicated_entrance(self.ranks), self.weight, self.bias)


class ColumnParallelGeluLinear(OfRanks, GeluLinear):
    """A `GeluLinear` with some rows on this rank."""

    def forward(self, x: Tensor, gelu: bool = False) -> Any:
        return super().forward(x, gelu) if gelu else column_map(x, self.entrance, self.weight, self.bias)

    def product(self, x: Tensor) -> tuple[Tensor, ...]:
        return x, column_map(x, self.entrance, self.weight, None)


class RowParallelLinear(OfRanks, nn.Linear):
    """A linear map with some columns on this rank: reads its part of the input, returns the whole output.

    With sequence parallelism it returns this rank's part of the rows, unless they are whole.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return `[.., in / tensor_size]` → `[.., out]`; the bias is added once, to the sum."""
        summand = F.linear(x, self.weight)
        if self.rows is None or self.rows.length is None:
            total = sum_of_ranks(summand, self.ranks)
        else:
            total = leave(summand, self.ranks)
        if self.bias is None:
            return total
        return total + (self.bias if self.rows is None else self.rows.for_rows(self.bias))


PARALLEL: tuple[tuple[str, type[nn.Module]], ...] = (
    (r"attention", SelfAttentionOfRanks),
    (r"feed_forward", FeedForwardOfRanks),
    (r"feed_forward\.input", ColumnParallelGeluLinear),
    (r"(attention|feed_forward)\.output", RowParallelLinear),
    (r"embeddings\.(token|difference)", VocabularyParallelEmbedding),
    (r"head", MaskedLMHeadOfRanks),
    (r"head\.decoder", ColumnParallelLinear),
)
"""(pattern of the end of a module's name, subclass that such a module becomes if it is of the subclass's base)."""


def apply_tensor_parallel(model: Encoder, ranks: Ranks) -> None:
    """Cut a whole model to this rank's part, in place, and connect it with the other ranks' parts."""
    if ranks.tensor_size == 1:
        return
    _keep_own_parts(model, ranks)
    specialise(model, PARALLEL, ranks=ranks)
    _sum_shared_position_gradients(model, ranks)


def specialise(model: nn.Module, table: Sequence[tuple[str, type[nn.Module]]], **attributes: Any) -> None:
    """Turn each module named in `table` into an instance of its subclass there, and set `attributes` on it.

    The module stays the same object with the same parameters, so everything that shares it still shares it.
    """
    for name, module in model.named_modules():
        for pattern, subclass in table:
            base = next(one for one in subclass.__mro__ if not one.__module__.startswith(__package__))
            if re.search(rf"(^|\.){pattern}$", name) and isinstance(module, base):
                own = type(module)  # an objective's model may use a subclass of its own here
                if not isinstance(module, subclass):
                    module.__class__ = (
                        subclass if issubclass(subclass, own) else type(own.__name__, (subclass, own), {})
                    )
                vars(module).update(attributes)


def _keep_own_parts(model: Encoder, ranks: Ranks) -> None:
    """Replace each cut parameter and buffer by this rank's part; tied ones stay tied, frozen ones stay frozen."""
    parts: dict[int, Tensor] = {}
    encoding = model.config.encoding
    for module_name, module in model.named_modules():
        for name, whole in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            full_name = f"{module_name}.{name}"
            if split_dimension(full_name, encoding) is None:
                continue
            if id(whole) not in parts:
                part = own_part(full_name, whole.detach(), encoding, ranks).clone()
                if isinstance(whole, nn.Parameter):
                    part = nn.Parameter(part, whole.requires_grad)
                    part.tensor_model_parallel = True  # type: ignore[attr-defined]  # so DeepSpeed's norms count each part
                parts[id(whole)] = part
            setattr(module, name, parts[id(whole)])


def _sum_shared_position_gradients(model: nn.Module, ranks: Ranks) -> None:
    """Sum the gradients of trained position parameters that all heads share over the ranks, with a hook on each."""
    shared = {
        parameter
        for module in model.modules()
        if isinstance(module, (PositionEncoding, LayerPositions))
        for name, parameter in module.named_parameters()
        if name not in module.by_head and parameter.requires_grad
    }
    for parameter in shared:
        parameter.register_hook(partial(all_reduce, ranks=ranks))


@contextlib.contextmanager
def own_randomness(ranks: Ranks) -> Iterator[None]:
    """Draw random numbers of this rank's own, from a seed drawn from torch's state, which stays equal on all ranks.

    Nothing is kept between calls, so a layer recomputed from its initial state draws the same numbers again.
    """
    seed = int(torch.randint(2**62, ()))
    with torch.random.fork_rng(devices=[ranks.device] if ranks.device.type == "cuda" else []):
        seed_draws(seed + ranks.tensor_rank, ranks.device)
        yield


def split(whole: Tensor, ranks: Ranks) -> Tensor:
    """Return this rank's part `[batch, ⌈seq / T⌉, hidden]` of `[batch, seq, hidden]`, which is equal on all ranks."""
    return Exchange.apply(whole, partial(_part_of, ranks), partial(_all_gather, ranks, whole.shape[1]))


def leave(summand: Tensor, ranks: Ranks) -> Tensor:
    """Return this rank's part of the sum over ranks of `summand` `[batch, seq, hidden]`."""
    there, back = lambda whole: _start_reduce_scatter(ranks, whole)(), partial(_all_gather, ranks, summand.shape[1])
    return Exchange.apply(summand, there, back)


def join(part: Tensor, length: int, ranks: Ranks) -> Tensor:
    """Return all parts as `[batch, length, hidden]`, which all ranks use alike."""
    return Exchange.apply(part, partial(_all_gather, ranks, length), partial(_part_of, ranks))


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
        if self.length is None:
            return replicated_entrance(self.ranks)
        return Entrance(partial(_all_gather, self.ranks, self.length), partial(_start_reduce_scatter, self.ranks))

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
    """A mask decoder that works on whole rows, until the next layer begins or embeddings are split.

    The decoder applies the last layer to a few tokens of whole rows; f and g stay unchanged there.
    """

    rows: SharedRows

    def forward(self, state: State, last_layer: EncoderLayer) -> Tensor:
        self.rows.length = None
        return super().forward(self.rows.join(state), last_layer)


SEQUENCE_PARALLEL: tuple[tuple[str, type[nn.Module]], ...] = (
    (r"layers\.\d+", EncoderLayerOfParts),
    *PARALLEL[:4],
    (r"(attention|feed_forward)_norm", NormOfParts),
    (r"embeddings\.norm", SplittingNorm),
    (r"(layers\.\d+|embeddings)\.dropout", DropoutOfParts),
    (r"mask_decoder", MaskDecoderOfParts),
)
"""Rows as in `PARALLEL`, for a model that keeps only parts of rows between its cut regions."""


def apply_sequence_parallel(model: nn.Module, ranks: Ranks) -> None:
    """Make a model that `apply_tensor_parallel` has cut keep only parts of rows between its cut regions, in place.

    This is sequence parallelism (Korthikanti et al., arXiv:2205.05198). Between the cut regions, tensor parallelism
    keeps whole hidden states on all T ranks. With it each rank keeps a T-th of every row there, `[batch, seq / T,
    hidden]`; LayerNorms, residual sums and dropout work on that part and store only it.

        embeddings → split ┐ ┌→ enter → attention    → leave ┐ ┌→ enter → feed-forward → leave ┐ ┌→ join → heads
                           └─┴──────────────── + ────────────┴─┴──────────────── + ────────────┴─┘

        forward                            backward
        split   own part                     all-gather
        enter   all-gather                   reduce-scatter       where tensor parallelism has f
        leave   reduce-scatter               all-gather           where it has g
        join    all-gather                   own part

    An all-reduce is a reduce-scatter and an all-gather, so a layer exchanges as much as before. Code inside, before and
    after the regions sees whole rows and does not change: attention with HCD, embeddings, notes, TCD, heads. Parameters
    used on parts get the sum of the ranks' gradients. If T does not divide a row, zeros pad the last part. Gathered
    states are kept for the backward pass; the paper keeps only the part and gathers again.
    """
    rows = SharedRows(ranks)
    specialise(model, SEQUENCE_PARALLEL, rows=rows)
    for module in model.modules():
        if isinstance(module, Embeddings):
            specialise(module, ((r"projection", LinearOfParts),), rows=rows)
