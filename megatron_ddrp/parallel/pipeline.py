"""Exchange between ranks: collectives inside of autograd, the cut of weights, and the pipeline's messages.

f and g are those of arXiv:1909.08053: g is a sum over the tensor-parallel ranks (`sum_of_ranks`); f has such a sum as
its gradient (`enter`).

One table, `SPLIT`, names the cut parameters of the layers that every model has; `by_head` of an encoding names its own
parameters and buffers. Every tensor-parallel rank holds all others whole. Rank t of T holds block t of T equal blocks
along the cut dimension. The vocabulary is padded to a multiple of 128 first, in every layout.

Parameters are known by their names in the whole model on one device: `layers.3.attention.query.weight`. A pipeline
stage holds a part of the model under other names; `local_parameters` returns them by the names of the whole.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.errors import UserError
from megatron_ddrp.model.attention.logits import Attending, attention_logits, sum_of_counted
from megatron_ddrp.model.bert import run_stages
from megatron_ddrp.model.embeddings import (
    content_gram,
    content_total,
    cosine_of_gram,
    cosine_of_total,
    document_mask,
    logits_cosine,
    logits_total,
)
from megatron_ddrp.model.encoder import EncoderLayer
from megatron_ddrp.model.fused import gradient_of_input, gradients_of_parameters
from megatron_ddrp.model.heads import DecodingStage
from megatron_ddrp.model.positions import PositionEncoding, PositionTerms
from megatron_ddrp.model.stages import LEARNED, Draws, Inputs, Layout, ModelOutput, NoteInputs, State, wide
from megatron_ddrp.parallel.process_group import Ranks


class Exchange(torch.autograd.Function):
    """A function of a tensor that exchanges with other ranks, and another one of the gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:  # type: ignore[override]
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[override]
        return ctx.back(gradient), None, None


def sum_of_ranks(x: Tensor, ranks: Ranks) -> Tensor:
    """Return x summed over the tensor-parallel ranks (g). All ranks use it alike, so each x has the sum's gradient."""
    return Exchange.apply(x, partial(all_reduce, ranks=ranks), lambda gradient: gradient)


def all_reduce(x: Tensor, ranks: Ranks, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Return a new tensor outside of autograd: x summed, or its maximum, over the tensor-parallel ranks."""
    result = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(result, operation, group=ranks.tensor_group)
    return result


Wait = Callable[[], Tensor]
"""Function that waits for a running exchange and returns its result."""


class Entrance(NamedTuple):
    """Entry of a tensor into a region whose ranks use it differently, so that their gradients must be summed."""

    there: Callable[[Tensor], Tensor]
    """Function that returns the tensor for use on the ranks."""
    back: Callable[[Tensor], Wait]
    """Function that starts to sum that tensor's gradients into the original's gradient. May overwrite its argument."""


def replicated_entrance(ranks: Ranks) -> Entrance:
    """Return the entrance of a tensor that is equal on all tensor-parallel ranks (f in the paper)."""
    return Entrance(lambda x: x.view_as(x), partial(_start_sum, ranks=ranks))


def _start_sum(gradient: Tensor, ranks: Ranks) -> Wait:
    gradient = gradient.contiguous()
    work = dist.all_reduce(gradient, group=ranks.tensor_group, async_op=True)

    def wait() -> Tensor:
        work.wait()
        return gradient

    return wait


class _ColumnMaps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, entrance: Entrance, *weights_and_biases: Tensor):  # type: ignore[override]
        weights, biases = weights_and_biases[::2], weights_and_biases[1::2]
        entered = entrance.there(x)
        ctx.entrance, ctx.has_bias = entrance, [bias is not None for bias in biases]
        ctx.save_for_backward(entered, *weights)
        return tuple(F.linear(entered, weight, bias) for weight, bias in zip(weights, biases, strict=True))

    @staticmethod
    def backward(ctx, *gradients: Tensor):  # type: ignore[override]
        entered, *weights = ctx.saved_tensors
        flat = [gradient.flatten(0, -2) for gradient in gradients]  # [tokens, out] each
        of_input = gradient_of_input(None, flat, weights)
        assert of_input is not None
        wait = ctx.entrance.back(of_input.view_as(entered))
        of_parameters = gradients_of_parameters(entered.flatten(0, -2), flat, ctx.has_bias)
        return wait(), None, *of_parameters


def enter(x: Tensor, entrance: Entrance) -> Tensor:
    """Return the tensor that the ranks use of `x`, for any use."""
    return Exchange.apply(x, entrance.there, lambda gradient: entrance.back(gradient.clone())())


def column_map(x: Tensor, entrance: Entrance, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return this rank's part of a linear map's output; `x` `[.., in]`, `weight` `[out / tensor_size, in]`."""
    return _ColumnMaps.apply(x, entrance, weight, bias)[0]


def column_maps(x: Tensor, entrance: Entrance, maps: Sequence[nn.Linear]) -> tuple[Tensor, ...]:
    """Return this rank's part of the outputs of maps that share an input.

    The maps exchange the gradient of their input beside the weights' gradients:

        forward     x → whole rows (f, or an all-gather) → x Wᵢᵀ + bᵢ           for all maps i of one input
        backward    dx = Σᵢ gᵢ Wᵢ;  start to sum dx over the ranks;  dWᵢ = gᵢᵀ x, dbᵢ = Σ gᵢ;  wait for dx

    They are one node of the graph (query, key and value, for example), so dx is one tensor that is exchanged once. On
    GPUs the exchange runs beside the products of dWᵢ, half of the backward pass's work in these maps.
    """
    if any(hasattr(each.weight, "ds_id") for each in maps):  # ZeRO 3 gathers weights only for a module's own call
        entered = enter(x, entrance)
        return tuple(each(entered) for each in maps)
    return _ColumnMaps.apply(x, entrance, *(parameter for each in maps for parameter in (each.weight, each.bias)))


def seed_draws(seed: int, device: torch.device) -> None:
    """Seed torch's draws on the CPU and on `device`, as `torch.manual_seed(seed)` does.

    `torch.manual_seed` seeds every kind of device that torch knows, and keeps a stack trace for each kind that this
    machine lacks. That takes a millisecond, enough time to compute a small layer.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed_all(seed)


class CosineOfAllRanks:
    """HCD over heads of all tensor-parallel ranks (eq. 18): exact, with the same draw of heads in every layout.

    If HCD samples heads, they are exchanged: each rank contributes the queries and keys of its own, `[2, b, m′, s, d]`
    in total, and their part of the tables or of the bias if these are per head; then every rank computes the same
    cosine. If HCD compares all heads, Σ_a A_a/‖A_a‖ is exchanged instead, one `[b, s, s]` sum for any number of heads.

    Gradients need no communication: the result is replicated, so each rank's part of its gradient is the slice of its
    own heads. Tables that all heads share are replicated already. `tensor_parallel` sums their gradient over the ranks,
    so only one rank may count the cosine's share of it.
    """

    def __init__(self, ranks: Ranks, terms_by_head: bool) -> None:
        """Keep `terms_by_head`: true if the position terms have a part per head, false if all heads share one."""
        self.ranks, self.terms_by_head = ranks, terms_by_head

    def __call__(self, attending: Attending) -> Tensor:
        """Return the cosine summed over the counted documents.

        `attending` has this rank's queries and keys; its `heads` are global numbers.
        """
        return sum_of_counted(self._by_document(attending), attending)

    def _by_document(self, attending: Attending) -> Tensor:
        query, key, heads, terms = attending.query, attending.key, attending.heads, attending.terms.compared
        documents = document_mask(attending.document_ids, attending.num_documents)
        num_heads = query.shape[1] * self.ranks.tensor_size
        if len(heads) == num_heads:
            total = sum_of_ranks(self._total(attending, documents), self.ranks)
            return cosine_of_total(total, documents, num_heads)
        own = torch.stack([self._own(x, heads, 1) for x in (query, key)])  # [2, b, m′, s, d]
        query, key = wide(sum_of_ranks(own, self.ranks))
        if attending.compares_content:
            return cosine_of_gram(content_gram(query, key, documents, terms.scale))
        terms = self._terms_of(heads, terms, query.dtype)
        return logits_cosine(attention_logits(query, key, terms), attending.allowed, documents)

    @staticmethod
    def _total(attending: Attending, documents: Tensor) -> Tensor:
        """Return Σ_a A_a/‖A_a‖ over this rank's heads, `[b, s, s]`."""
        query, key = wide(attending.query), wide(attending.key)
        if attending.compares_content:
            return content_total(query, key, documents)
        terms = attending.terms.compared.map(lambda x, _: x.to(query.dtype))
        return logits_total(attention_logits(query, key, terms), attending.allowed, documents)

    def _terms_of(self, heads: Tensor, terms: PositionTerms, dtype: torch.dtype) -> PositionTerms:
        """Return the terms of `heads`: exchanged if they are per head, else shared, with a gradient on rank 0 only."""

        def choose(tensor: Tensor, dimension: int) -> Tensor:
            if self.terms_by_head:
                tensor = sum_of_ranks(self._own(tensor, heads, dimension), self.ranks)
            elif self.ranks.tensor_rank:
                tensor = tensor.detach()
            return tensor.to(dtype)

        return terms.map(choose)

    def _own(self, tensor: Tensor, heads: Tensor, dimension: int) -> Tensor:
        """Return `heads` along `dimension`, with zeros in place of the heads of other ranks."""
        own = heads - self.ranks.tensor_rank * tensor.shape[dimension]
        here = (own >= 0) & (own < tensor.shape[dimension])
        chosen = tensor.index_select(dimension, torch.where(here, own, 0))
        return chosen * here.view([-1 if d == dimension else 1 for d in range(chosen.dim())])


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


def split_dimension(name: str, encoding: type[PositionEncoding]) -> int | None:
    """Return the dimension along which tensor parallelism cuts a parameter or buffer; None if it stays whole."""
    for module, by_head in (("position", encoding.by_head), ("layer_position", encoding.layer_part.by_head)):
        for parameter, dimension in by_head.items():
            if name.endswith(f".{module}.{parameter}"):
                return dimension
    for pattern, dimension in SPLIT:
        if re.search(rf"(^|\.){pattern}$", name):
            return dimension
    return None


def uncut_shape(name: str, local: Sequence[int], encoding: type[PositionEncoding], ranks: Ranks) -> tuple[int, ...]:
    """Return the shape of the whole tensor of which a tensor of shape `local` is this rank's `own_part`."""
    shape, dimension = list(local), split_dimension(name, encoding)
    if dimension is not None:
        shape[dimension] *= ranks.tensor_size
    return tuple(shape)


def own_part(name: str, whole: Tensor, encoding: type[PositionEncoding], ranks: Ranks) -> Tensor:
    """Return this rank's part of a whole parameter, or of a tensor of its shape (gradient, Adam moment), as a view."""
    dimension = split_dimension(name, encoding)
    if dimension is None or ranks.tensor_size == 1:
        return whole
    return whole.chunk(ranks.tensor_size, dimension)[ranks.tensor_rank]


def gather_whole(name: str, local: Tensor, encoding: type[PositionEncoding], ranks: Ranks) -> Tensor:
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


DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool)

HEADER = 256
"""Length of a header, in integers."""

IN_FLIGHT = 64
"""Most headers that a rank has sent and the next one may not have taken."""

NONE, TENSOR, TUPLE, NAMED, INTEGER, TRUTH = range(6)
"""Kinds of items: the first number of each item in the header."""


def split_stages(stages: Sequence[nn.Module], num_parts: int) -> list[list[nn.Module]]:
    """Cut the model's stages into parts with equally many layers; if some need one more, inner parts come first.

    A stage that is not a layer goes with the layer after it; the head goes with the last layer.
    """
    places = [place for place, stage in enumerate(stages) if isinstance(stage, (EncoderLayer, DecodingStage))]
    size, rest = divmod(len(places), num_parts)
    takers = [*range(1, num_parts - 1), 0, num_parts - 1][:rest]
    ends, taken = [], 0
    for part in range(num_parts):
        taken += size + (part in takers)
        ends.append(places[taken - 1] + 1)
    ends[-1] = len(stages)
    return [list(stages[begin:end]) for begin, end in zip([0, *ends], ends, strict=False)]


class PipelinePart(nn.Module):
    """Consecutive stages on one rank."""

    def __init__(
        self,
        stages: Sequence[nn.Module],
        last: bool,
        recompute: bool,
        courier: Courier,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)
        self.last, self.recompute, self.courier, self.compute_dtype = last, recompute, courier, compute_dtype
        self.seed: Callable[[int], None] = lambda number: None
        self.number = 0

    def begin_step(self, seed: Callable[[int], None]) -> None:
        """Call `seed(number)` before each coming micro-batch in training; `number` counts from 0."""
        self.seed, self.number = seed, 0

    def forward(self, sent: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor] | ModelOutput:
        """Return the next part's input, or the model's output, from the two tensors of the previous part."""
        if self.training:
            self.seed(self.number)
            self.number += 1
        received = self.courier.receive(*sent)
        given = run_stages(self.stages, received, self.recompute, compute_dtype=self.compute_dtype)
        return given if self.last else self.courier.send(given)

    def again(self, sent: tuple[Tensor, Tensor], header: Tensor) -> tuple[Tensor, Tensor] | ModelOutput:
        """Repeat the step's first micro-batch from what came with `header`; the next part gets no header for it."""
        mail, self.courier.mail, self.number = self.courier.mail, Mail(), 0
        self.courier.mail.post(header, is_first=True)
        try:
            return self(sent)
        finally:
            self.courier.mail = mail


class Mail:
    """Headers in the order of the micro-batches, within one process: each `post` is read by the next `take`."""

    def __init__(self) -> None:
        self._here: deque[Tensor] = deque()

    def post(self, header: Tensor, is_first: bool) -> None:
        """Send a header, int64 `[HEADER]` on the CPU; `is_first` is true if it describes the first part's input."""
        self._here.append(header)

    def take(self) -> Tensor:
        """Return the next header, int64 `[HEADER]`."""
        return self._here.popleft()


class MailOfRanks(Mail):
    """Headers from each rank of a pipeline to the next. The first rank sends the header of its input to itself.

    Before header i a rank waits until header i − `IN_FLIGHT` is taken. The wait ends: the next rank takes headers in
    order and needs only earlier messages for it, and the last rank sends none.
    """

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks
        self._under_way: deque[tuple[Any, Tensor]] = deque()

    def post(self, header: Tensor, is_first: bool) -> None:
        if is_first:
            return super().post(header, is_first)
        if len(self._under_way) >= IN_FLIGHT:  # gloo calls a message complete only once it was waited for
            self._under_way.popleft()[0].wait()
        group, number = self.ranks.pipeline_group, self.ranks.pipeline_rank + 1
        self._under_way.append((dist.isend(header, group=group, group_dst=number), header))

    def take(self) -> Tensor:
        if self.ranks.pipeline_rank == 0:
            return super().take()
        header = torch.empty(HEADER, dtype=torch.int64)
        dist.recv(header, group=self.ranks.pipeline_group, group_src=self.ranks.pipeline_rank - 1)
        return header


class Courier:
    """Converter between `Inputs` or `State` and two flat tensors.

    `Inputs` and `State` are nested named tuples (`model/stages.py`). Both travel between ranks as two flat tensors: the
    floats that receive gradients (`LEARNED`), bit for bit, and the bytes of all the rest. With one float tensor, a part
    runs one backward pass; DeepSpeed would run one per float tensor of a tuple, each through layers that all of them
    came from. A header describes the nesting, types and shapes, and holds Python's numbers. It travels from host to
    host (`Mail`), so no rank has to ask its GPU for it.
    """

    def __init__(self, travelling: tuple[type, ...] = (), mail: Mail | None = None) -> None:
        """Keep `travelling`, the objective's named tuples (equal on all ranks), and `mail`, which carries headers."""
        self.named: tuple[Any, ...] = (Inputs, State, Batch, Draws, NoteInputs, Layout, *travelling)
        self.mail = mail or Mail()
        self.header: Tensor | None = None
        """Header that was taken last."""

    def send(self, given: Inputs | State) -> tuple[Tensor, Tensor]:
        """Return (floats that receive gradients, flat; all the rest as bytes), and post the header."""
        leaves = list(_leaves(given))
        header = [len(leaves)]
        for x, is_learned in leaves:
            header += [is_learned, DTYPES.index(x.dtype), x.dim(), *x.shape]
        header += self._nesting(given)
        if len(header) > HEADER:
            raise UserError(
                f"what travels between pipeline stages takes a header of {len(header)} numbers, at most {HEADER} are "
                "allowed: let the plug-in send fewer tensors, or use --pipeline-model-parallel-size 1"
            )
        self.mail.post(torch.tensor(header + [0] * (HEADER - len(header))), isinstance(given, Inputs))
        learned = [x for x, is_learned in leaves if is_learned]
        rest = [x for x, is_learned in leaves if not is_learned]
        floats = _Flatten.apply(*learned) if learned else torch.zeros(0, device=leaves[0][0].device)
        return floats, torch.cat([x.contiguous().flatten().view(torch.uint8) for x in rest])

    def receive(self, floats: Tensor, rest: Tensor) -> Any:
        """Return the `Inputs` or `State` from which `send` made the two tensors."""
        self.header = self.mail.take()
        header = iter(self.header.tolist())
        described = []
        for _ in range(next(header)):
            is_learned, dtype, rank = next(header), DTYPES[next(header)], next(header)
            described.append((is_learned, tuple(next(header) for _ in range(rank)), dtype))
        shapes = [shape for is_learned, shape, _ in described if is_learned]
        dtypes = [dtype for is_learned, _, dtype in described if is_learned]
        learned = iter(_Unflatten.apply(floats, shapes, dtypes) if shapes else ())
        others = [(shape, dtype) for is_learned, shape, dtype in described if not is_learned]
        others_there = iter(_unflatten(rest, [s for s, _ in others], [d for _, d in others]))
        return self._build(header, (next(learned) if d[0] else next(others_there) for d in described))

    def _nesting(self, value: Any) -> list[int]:
        """Return numbers that describe the nesting of tensors, None and numbers in named tuples and tuples."""
        if value is None or isinstance(value, Tensor):
            return [NONE if value is None else TENSOR]
        if isinstance(value, int):
            return [TRUTH if isinstance(value, bool) else INTEGER, value]
        is_named = type(value) in self.named
        assert is_named or type(value) is tuple, f"{type(value).__name__} is not in the objective's `travelling`"
        numbers = [NAMED, self.named.index(type(value))] if is_named else [TUPLE, len(value)]
        return numbers + [number for item in value for number in self._nesting(item)]

    def _build(self, numbers: Iterator[int], tensors: Iterator[Tensor]) -> Any:
        """Return the value that `_nesting` described as `numbers`, filled with its tensors in order."""
        kind = next(numbers)
        if kind in (NONE, TENSOR):
            return None if kind == NONE else next(tensors)
        which = next(numbers)
        if kind in (INTEGER, TRUTH):
            return which if kind == INTEGER else bool(which)
        if kind == TUPLE:
            return tuple(self._build(numbers, tensors) for _ in range(which))
        return self.named[which](*(self._build(numbers, tensors) for _ in self.named[which]._fields))


def _leaves(value: Any, is_learned: bool = False) -> Iterator[tuple[Tensor, bool]]:
    """Yield every tensor inside nested tuples, with true if it is a float that receives a gradient."""
    if isinstance(value, Tensor):
        yield value, is_learned and value.is_floating_point()
    elif isinstance(value, State):
        for name, item in zip(value._fields, value, strict=True):
            yield from _leaves(item, name in LEARNED)
    elif isinstance(value, tuple):
        for item in value:
            yield from _leaves(item, is_learned)


def _flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Return the bits of all tensors, one after the other, in the narrowest of their dtypes."""
    carrier = min((x.dtype for x in tensors), key=lambda dtype: dtype.itemsize)
    return torch.cat([x.contiguous().flatten().view(carrier) for x in tensors])


def _unflatten(flat: Tensor, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype]) -> tuple[Tensor, ...]:
    sizes = [
        torch.Size(shape).numel() * dtype.itemsize // flat.dtype.itemsize
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    parts = zip(flat.split(sizes), shapes, dtypes, strict=True)
    return tuple(part.clone().view(dtype).view(shape) for part, shape, dtype in parts)


class _Flatten(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *tensors: Tensor) -> Tensor:  # type: ignore[override]
        ctx.shapes, ctx.dtypes = [x.shape for x in tensors], [x.dtype for x in tensors]
        return _flatten(tensors)

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[override]
        return _unflatten(gradient, ctx.shapes, ctx.dtypes)


class _Unflatten(torch.autograd.Function):
    @staticmethod
    def forward(ctx, flat: Tensor, shapes, dtypes):  # type: ignore[no-untyped-def, override]
        return _unflatten(flat, shapes, dtypes)

    @staticmethod
    def backward(ctx, *gradients: Tensor):  # type: ignore[override]
        return _flatten(gradients), None, None
