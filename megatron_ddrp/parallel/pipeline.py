"""One rank's part of the pipeline: consecutive stages of the model's one list, and what is sent between two parts.

A `StageState` holds several floats and several integers. Between ranks it travels as two flat tensors, one of floats
and one of integers. One float tensor means one backward pass through a part: DeepSpeed runs one for each float tensor
of a tuple, through layers that all of them came from. Shapes stand at the head of the integers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from megatron_ddrp.model.bert import run_stage
from megatron_ddrp.model.encoder import EncoderLayer
from megatron_ddrp.model.heads import DecodingStage

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32)

HEADER = 128
"""Integers that describe the tensors: their number, then for each its type, rank and shape."""


def split_stages(stages: Sequence[nn.Module], num_parts: int) -> list[list[nn.Module]]:
    """Cut the model's stages into parts of equally many layers; inner parts take one more where some must.

    What is no layer goes with the layer after it, and the head with the last.
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

    def __init__(self, stages: Sequence[nn.Module], first: bool, last: bool, recompute: bool) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)
        self.first, self.last, self.recompute = first, last, recompute
        self.seed: Callable[[int], None] = lambda number: None
        self.number = 0

    def begin_step(self, seed: Callable[[int], None]) -> None:
        """Call `seed(number)` before each of the coming micro-batches in training, counted from 0."""
        self.seed, self.number = seed, 0

    def forward(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...] | Tensor:
        """The ids of a micro-batch, or what the part before sent → what the next part takes, or the model's output."""
        if self.training:
            self.seed(self.number)
            self.number += 1
        tensors = tensors if self.first else receive(*tensors)
        for stage in self.stages:
            tensors = run_stage(stage, tensors, self.recompute)
        return tensors if self.last else send(tensors)


def send(tensors: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Floats, then integers → (flat floats, flat integers with the shapes at their head)."""
    floats = [x for x in tensors if x.is_floating_point()]
    integers = [x for x in tensors if not x.is_floating_point()]
    header = [len(tensors)]
    for x in (*floats, *integers):
        header += [DTYPES.index(x.dtype), x.dim(), *x.shape]
    assert len(header) <= HEADER, f"{len(tensors)} tensors need {len(header)} numbers, {HEADER} are there"
    described = torch.tensor(header + [0] * (HEADER - len(header)), device=integers[0].device)
    return _Flatten.apply(*floats), torch.cat([described, *(x.flatten() for x in integers)])


def receive(flat_floats: Tensor, flat_integers: Tensor) -> tuple[Tensor, ...]:
    """The inverse of `send`."""
    header = flat_integers[:HEADER].tolist()
    shapes, dtypes, place = [], [], 1
    for _ in range(header[0]):
        dtype, rank = header[place : place + 2]
        shapes.append(tuple(header[place + 2 : place + 2 + rank]))
        dtypes.append(DTYPES[dtype])
        place += 2 + rank
    count = sum(dtype.is_floating_point for dtype in dtypes)
    floats = _Unflatten.apply(flat_floats, shapes[:count], dtypes[:count])
    sizes = [torch.Size(shape).numel() for shape in shapes[count:]]
    integers = zip(flat_integers[HEADER:].split(sizes), shapes[count:], dtypes[count:], strict=True)
    return (*floats, *(x.view(shape).to(dtype) for x, shape, dtype in integers))


def _flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Bit for bit, in the narrowest of their types."""
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
