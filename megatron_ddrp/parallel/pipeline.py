"""One rank's part of the pipeline: consecutive stages of the model's one list, and the messages between two parts.

`Inputs` and `State` are nested named tuples (`model/stages.py`). They travel between ranks as two flat tensors: the
floats that receive gradients (`LEARNED`), bit for bit, and the bytes of all the rest. With one float tensor, a part
runs one backward pass; DeepSpeed would run one per float tensor of a tuple, each through layers that all of them came
from. A header describes the nesting, types and shapes, and holds Python's numbers. It travels from host to host
(`Mail`), so no rank has to ask its GPU for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.errors import UserError
from megatron_ddrp.model.bert import run_stages
from megatron_ddrp.model.encoder import EncoderLayer
from megatron_ddrp.model.heads import DecodingStage
from megatron_ddrp.model.stages import LEARNED, Draws, Inputs, Layout, NoteInputs, Output, State
from megatron_ddrp.parallel.process_group import Ranks

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

    def forward(self, sent: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor] | Output:
        """Return the next part's input, or the model's output, from the two tensors of the previous part."""
        if self.training:
            self.seed(self.number)
            self.number += 1
        received = self.courier.receive(*sent)
        given = run_stages(self.stages, received, self.recompute, compute_dtype=self.compute_dtype)
        return given if self.last else self.courier.send(given)

    def again(self, sent: tuple[Tensor, Tensor], header: Tensor) -> tuple[Tensor, Tensor] | Output:
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
    """Converter between `Inputs` or `State` and two flat tensors."""

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
