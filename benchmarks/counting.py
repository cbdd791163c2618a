"""Count on a CPU what a training step would do on a GPU: launches, bytes, FLOP, and waits for the device.

`Counting`, a `TorchDispatchMode`, sees each operation of the fake GPU of `fake_gpu.py`, forward and backward:

    gpu = fake_device()
    with fake_tensors(), Counting() as counting, gpu_kernels():
        model = on_device(on_meta_device(config), gpu)
        model(batch, draws).sums.sum().backward()
    counting.launches, counting.waits

A launch is each operation that is neither a view nor an allocation. Its bytes are the extents of its inputs and outputs
that it touches: dimensions of stride 0 once, of a table the gathered rows; what an operation changes in place is read
and written. FLOP are those of matrix products and attention, by torch's own formulas.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from measure import benchmark_parser  # noqa: F401  (puts the repository on the import path)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

import megatron_ddrp

DEVICE_NAME = "gpu"
PACKAGE = Path(megatron_ddrp.__file__).parent

NOT_LAUNCHED = {
    "empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "resize_", "set_",
    "_unsafe_view", "lift_fresh", "is_same_size", "is_pinned", "record_stream",
}  # fmt: skip
"""Operations without a kernel that their schemas do not show to be views: allocations, and looks at the outside."""

ONLY_WRITING = {"copy_", "zero_", "fill_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_"}
"""In-place operations that read nothing of what they overwrite."""

GATHERING = {"embedding", "index_select", "gather", "index"}
"""Operations that read as many elements of their first argument as they return."""

SCATTERING = {"index_add_", "index_copy_", "index_put_", "scatter_", "scatter_add_"}
"""In-place operations that touch as many elements of their first argument as their last one has."""

WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim", "bincount"}
"""Operations whose results the host needs before it goes on."""


class Launch(NamedTuple):
    """One kernel."""

    name: str
    """The operation's name in `torch.ops.aten`, the Triton kernel's, or the compiled function's."""
    bytes: int
    flop: int
    kind: str
    """Type of its arithmetic: "half" or "single" (precision of a matrix product), "attention", or "pointwise"."""
    is_backward: bool


class Wait(NamedTuple):
    """One place where the host waits for the device."""

    operation: str
    place: str
    """`file:line function` of the innermost frame of this package; "backward" where autograd runs torch's own code."""


@dataclass
class Totals:
    """Sums over some launches."""

    launches: int = 0
    bytes: int = 0
    flop: int = 0

    @classmethod
    def of(cls, launches: Iterable[Launch]) -> Totals:
        """Return the sums of some launches."""
        launches = list(launches)
        return cls(len(launches), sum(x.bytes for x in launches), sum(x.flop for x in launches))


class Counting(TorchDispatchMode):
    """Records `launches` and `waits`.

    `rows` and `predicted` (tokens per row) stand in for what only data would tell: reading an integer gives
    `predicted`, reading a truth value False, and a mask keeps rows · predicted of its elements.
    """

    active: Counting | None = None
    """The one that counts now; stubs of kernels report to it."""

    def __init__(self, rows: int = 1, predicted: int = 1) -> None:
        super().__init__()
        self.rows, self.predicted = rows, predicted
        self.launches: list[Launch] = []
        self.waits: list[Wait] = []
        self._paused = 0

    def __enter__(self) -> Counting:
        Counting.active = self
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        Counting.active = None
        super().__exit__(*error)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing inside."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def add(self, name: str, num_bytes: int, flop: int = 0, kind: str = "pointwise") -> None:
        """Record one launch, as of the backward pass if autograd is at work."""
        if not self._paused:
            self.launches.append(Launch(name, num_bytes, flop, kind, in_backward()))

    def wait(self, operation: str) -> None:
        """Record one wait at the place that the stack shows."""
        if not self._paused:
            self.waits.append(Wait(operation, _place()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if func.namespace == "prim" or not self._on_device(inputs, kwargs):
            return self._run(func, name, args, kwargs)
        args = self._without_masks(name, args)
        if name in WAITING or self._copies_between(name, inputs, kwargs):
            self.wait(name)
        result = self._run(func, name, args, kwargs)
        if not func.is_view and name not in NOT_LAUNCHED:
            outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
            formula = flop_registry.get(func.overloadpacket)
            flop = int(formula(*args, **kwargs, out_val=result)) if formula else 0
            self.add(name, _bytes(func, name, args, inputs, outputs), flop, _kind(name, flop, outputs))
        return result

    @staticmethod
    def _on_device(inputs: list[Tensor], kwargs: dict[str, Any]) -> bool:
        made_there = torch.device(kwargs.get("device") or "cpu").type == DEVICE_NAME
        return made_there or any(x.device.type == DEVICE_NAME for x in inputs)

    @staticmethod
    def _copies_between(name: str, inputs: list[Tensor], kwargs: dict[str, Any]) -> bool:
        """Return whether a copy between host and device makes the host wait."""
        if name == "_to_copy":
            ends = {inputs[0].device.type, torch.device(kwargs.get("device") or inputs[0].device).type}
        else:
            ends = {x.device.type for x in inputs} if name == "copy_" else set()
        to_host = name == "copy_" and inputs[0].device.type == "cpu"
        to_host |= name == "_to_copy" and torch.device(kwargs.get("device") or DEVICE_NAME).type == "cpu"
        return len(ends) > 1 and (to_host or not kwargs.get("non_blocking"))

    def _kept(self, mask: Tensor) -> int:
        return min(self.rows * self.predicted, mask.numel())

    def _without_masks(self, name: str, args: Any) -> Any:
        """Replace each boolean index by one int64 index per dimension, and record its wait and its launch."""
        if name not in ("index", "index_put", "index_put_", "_unsafe_index"):
            return args
        indices: list[Tensor | None] = []
        for index in args[1]:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                indices.append(index)
                continue
            self.wait(f"{name} by a mask")
            self.add("nonzero", extent(index) + 8 * index.dim() * self._kept(index))
            with self.paused():
                indices += [index.new_empty(self._kept(index), dtype=torch.long) for _ in range(index.dim())]
        return (args[0], indices, *args[2:])

    def _run(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Run an operation, or return a stand-in where its result depends on data."""
        if name in ("_local_scalar_dense", "equal"):
            is_truth = name == "equal" or args[0].dtype == torch.bool
            number = 1.0 if args[0].is_floating_point() else self.predicted
            return False if is_truth else number
        if name == "nonzero":
            return args[0].new_empty(self._kept(args[0]), args[0].dim(), dtype=torch.long)
        if name == "masked_select":
            return args[0].new_empty(self._kept(args[1]))
        return func(*args, **kwargs)


def in_backward() -> bool:
    """Return whether autograd is running a backward pass."""
    return torch._C._current_graph_task_id() != -1


def extent(x: Tensor) -> int:
    """Return the bytes of a tensor's elements, those that a stride of 0 repeats once."""
    elements = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        elements *= size if stride else min(size, 1)
    return elements * x.element_size()


def _bytes(func: Any, name: str, args: Any, inputs: list[Tensor], outputs: list[Tensor]) -> int:
    """Return the bytes that an operation reads and writes."""
    touched = {id(x): extent(x) for x in (*inputs, *outputs)}
    changed = tree_leaves(args[0]) if func._schema.is_mutable else []
    if name in GATHERING:
        touched[id(args[0])] = sum(map(extent, outputs))
    if name in SCATTERING:
        touched[id(args[0])] = 2 * extent(next(x for x in reversed(inputs) if x.is_floating_point()))
    elif name not in ONLY_WRITING:
        touched |= {id(x): 2 * extent(x) for x in changed}
    return sum(touched.values())


def _kind(name: str, flop: int, outputs: list[Tensor]) -> str:
    if "attention" in name:
        return "attention"
    if not flop:
        return "pointwise"
    return "single" if outputs[0].dtype.itemsize >= 4 else "half"


def _place() -> str:
    """Return the innermost frame of the package on the stack."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if path.is_relative_to(PACKAGE):
            return f"{path.relative_to(PACKAGE)}:{frame.lineno} {frame.name}"
    return "backward" if in_backward() else "outside of the package"
