"""CUDA graphs on a CPU: a graph is the list of operations and launches of its capture; a replay runs them on the same
memory. As on a GPU, whatever reads a number fails in a capture, and a replay sees only the captured addresses.

Not emulated: streams, the reuse of memory inside a pool, philox offsets, and compiled regions inside a capture.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from megatron_ddrp.model import graphs
from megatron_ddrp.model.attention.gpu import triton_attention

WAITS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.equal.default)


class Graph:
    """A captured list of calls."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], object]] = []

    def replay(self) -> None:
        with torch.no_grad():
            for call in self.calls:
                call()


def tensors_of(value: Any) -> list[Tensor]:
    return [x for x in tree_leaves(value) if isinstance(x, Tensor)]


class Capture(TorchDispatchMode):
    """Runs operations and notes them in a graph; on a GPU they would only be noted."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in WAITS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        result = func(*args, **kwargs)
        given = {x.untyped_storage()._cdata for x in tensors_of((args, kwargs))}
        made = tensors_of(result)
        fresh = [(i, x.detach()) for i, x in enumerate(made) if x.untyped_storage()._cdata not in given]
        writes = any(argument.alias_info and argument.alias_info.is_write for argument in func._schema.arguments)
        if fresh or writes or not made:  # anything else is a view

            def repeat() -> None:
                again = tensors_of(func(*args, **kwargs))
                for i, x in fresh:
                    x.copy_(again[i])

            self.graph.calls.append(repeat)
        return result

    def launch(self, *arguments: Any) -> None:
        """Run and note a launch of a Triton kernel, which torch does not see."""
        with _disable_current_modes():
            LAUNCH(*arguments)
        self.graph.calls.append(lambda: LAUNCH(*arguments))


LAUNCH = triton_attention.launch


class Emulator(graphs.Recorder):
    """`Recorder` of a GPU that is not there."""

    def __init__(self) -> None:
        pass

    def graph(self) -> Graph:
        return Graph()

    @contextlib.contextmanager
    def capture(self, graph: Graph) -> Iterator[None]:
        with self.aside(), Capture(graph) as capture, pytest.MonkeyPatch.context() as patch:
            patch.setattr(triton_attention, "launch", capture.launch)
            yield

    @contextlib.contextmanager
    def aside(self, device: torch.device | None = None) -> Iterator[None]:
        draws = torch.get_rng_state()
        yield
        torch.set_rng_state(draws)


def captured_shapes(model_graphs: graphs.ModelGraphs) -> list[int]:
    """Return the number of captured shapes of each part of the model."""
    return [len(part.captured) for part in model_graphs.parts.values()]
