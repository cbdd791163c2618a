"""CUDA graphs of the layers: a micro-batch launches two graphs per layer, forward and backward, instead of kernels.

The CPU needs longer to launch a layer's kernels one by one than a GPU to run them. A graph replays them from fixed
memory, so it serves micro-batches of one shape. Dropout still draws from torch's generator in the same order, so a
run with graphs repeats a run without. Embeddings and head, whose shapes differ between micro-batches, stay outside.

One pool of memory serves the graphs of all shapes, because a micro-batch ends before the next one begins. Layer i
writes its output where layer i + 1 reads its input; only the first input and the last gradient are copied.

The weights' gradients of a step's micro-batches go from there into the sums that DeepSpeed steps with (`Sums`), those
of the last one by autograd, whose hooks DeepSpeed reduces in.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron_ddrp.config import Config
from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.errors import UserError
from megatron_ddrp.model.encoder import EncoderLayer
from megatron_ddrp.model.fused import is_nvidia
from megatron_ddrp.model.stages import Inputs, Layout, State, copies_of_weights, run_stage

MOST_SHAPES = 4
"""Shapes of micro-batches that have graphs at the same time; all others run without."""
IDLE_PASSES = 1000
"""Micro-batches without use after which a shape's graphs make room for another shape."""
WARM_UP = 2
"""Passes on the stream of the capture before it: libraries allocate what they keep per stream."""


def why_not_graphs(config: Config, device: torch.device) -> str | None:
    """Return the reason why a run has no CUDA graphs, in one line, or None if it can have them."""
    if config.graphs_fault is not None:
        return f"no graph holds the layers of {config.graphs_fault}"
    if not is_nvidia(device):
        return f"CUDA graphs need an NVIDIA GPU, got {device.type}"
    return None


def uses_graphs(config: Config, device: torch.device) -> bool:
    """Return whether a run replays its layers as CUDA graphs; `auto` does so wherever it is possible."""
    return config.parallel.cuda_graphs != "off" and why_not_graphs(config, device) is None


class Recorder:
    """Capture of work on a GPU. Tests replace this class."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream()  # one for all captures: a pool gives memory back to its stream alone

    def graph(self) -> Any:
        """Return an empty graph; `replay()` runs it once it is captured."""
        return torch.cuda.CUDAGraph()

    def capture(self, graph: Any) -> Any:
        """Return the context in which work becomes part of `graph`, not run. The loader's thread may pin memory."""
        return torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local")

    @contextlib.contextmanager
    def aside(self, device: torch.device) -> Iterator[None]:
        """Work on the stream of the captures, and restore the state of the random generator."""
        draws = torch.cuda.get_rng_state(device)
        self.stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self.stream):
            yield
        torch.cuda.current_stream(device).wait_stream(self.stream)
        torch.cuda.set_rng_state(draws, device)


def read(state: State) -> list[Tensor]:
    """Return all tensors that a layer reads."""
    batch = state.inputs.batch
    return [batch.document_ids, batch.position_ids, state.heads, state.counted, *state.learned]


def in_fixed_memory(state: State) -> State:
    """Return a copy of a state that holds only what layers read; reading anything else fails."""
    copies = (x.detach().clone().requires_grad_(x.requires_grad) for x in read(state))
    document_ids, position_ids, heads, counted, hidden, cosine, *position = copies
    batch, nothing, layout = Batch(None, None, document_ids, position_ids, None, None), None, state.inputs.layout
    of_rows = layout.full, layout.restarts, layout.causal
    layout = Layout(nothing, nothing, nothing, nothing, 0, *of_rows)  # type: ignore[arg-type]
    inputs = Inputs(batch, nothing, nothing, layout)  # type: ignore[arg-type]
    return State(inputs, hidden, tuple(position), heads, counted, cosine)


class Sums(Protocol):
    """Sums of the gradients of a step's micro-batches (`engine/layout.py`)."""

    @property
    def are_open(self) -> bool:
        """True if the gradients of this micro-batch may be added without autograd."""

    def add(self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> None:
        """Add the gradients of some parameters; None is a gradient of 0."""


class LayerGraph:
    """The two graphs of one layer, with the fixed memory of its inputs, outputs and gradients."""

    def __init__(self, part: LayerGraphs, layer: EncoderLayer, state: State, is_first: bool) -> None:
        """Capture the forward pass on the memory of `state` and of the weights."""
        self.parameters, self.sums = tuple(layer.parameters()), part.sums
        leaves = copies_of_weights(layer)
        self.inputs, self.leaves, self.is_first = state.learned, tuple(leaves.values()), is_first
        self.kept = [part.buffer(name, leaf) for name, leaf in leaves.items()]
        self.forward, self.backward = part.recorder.graph(), part.recorder.graph()
        with part.recorder.capture(self.forward):
            after = run_stage(layer, state, part.compute_dtype, leaves)
        # Positions are passed on unchanged, so that their gradients add up on the way.
        self.outputs = after.learned
        self.gradients: list[Tensor | None] = []
        """Gradients of the outputs; the backward pass reads them."""
        self.found: list[Tensor | None] = []
        """Gradients of the inputs and of the parameters; the backward pass writes them."""

    def capture_backward(self, part: LayerGraphs, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Capture the backward pass from the outputs' gradients; return the gradients of the inputs."""
        self.gradients = [g if out.requires_grad else None for out, g in zip(self.outputs, gradients, strict=True)]
        pairs = [(out, g) for out, g in zip(self.outputs, self.gradients, strict=True) if g is not None]
        ends, theirs = zip(*pairs, strict=True)
        leaves = [*self.inputs, *self.leaves]
        with part.recorder.capture(self.backward):
            given = iter(torch.autograd.grad(ends, [x for x in leaves if x.requires_grad], theirs, allow_unused=True))
            found = [next(given) if x.requires_grad else None for x in leaves]
            passed, of_weights = found[: len(self.inputs)], found[len(self.inputs) :]
            kept = [None if x is None else buffer for x, buffer in zip(of_weights, self.kept, strict=True)]
            if any(x is not None for x in kept):
                torch._foreach_copy_([x for x in kept if x is not None], [x for x in of_weights if x is not None])
        self.found = [*passed, *kept]
        self.outputs = [x.detach() for x in self.outputs]  # without the history of the capture
        return passed


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx, graph: LayerGraph, *inputs: Tensor):  # type: ignore[override]
        graph.forward.replay()  # it reads the inputs in its own memory
        ctx.graph, ctx.adds = graph, len(inputs) == len(graph.inputs)
        ctx.set_materialize_grads(False)
        outputs = [x.detach() for x in graph.outputs]
        ctx.mark_non_differentiable(*(x for x, g in zip(outputs, graph.gradients, strict=True) if g is None))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients: Tensor | None):  # type: ignore[override]
        graph: LayerGraph = ctx.graph
        for mine, given in zip(graph.gradients, gradients, strict=True):
            if mine is None:
                continue
            if given is None:
                mine.zero_()
            elif mine.data_ptr() != given.data_ptr():
                mine.copy_(given)
        graph.backward.replay()
        passed, of_parameters = graph.found[: len(graph.inputs)], graph.found[len(graph.inputs) :]
        passed = _copies(passed) if graph.is_first else [None if x is None else x.detach() for x in passed]
        if ctx.adds:
            graph.sums.add(graph.parameters, of_parameters)  # type: ignore[union-attr]
            return None, *passed
        return None, *passed, *_copies(of_parameters)


def _copies(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return copies of gradients that leave the graphs, by one launch; the next replay overwrites the originals."""
    given = [x for x in gradients if x is not None]
    copies = iter(torch._foreach_mul(given, 1) if given else ())
    return [None if x is None else next(copies) for x in gradients]


@dataclass
class Captured:
    """Graphs of consecutive layers for one shape of micro-batches."""

    state: State
    """Input of the first layer, in fixed memory."""
    graphs: list[LayerGraph]
    last_use: int
    """Number of the last micro-batch that replayed them."""

    def replay(self, state: State) -> State:
        """Run the layers on the input `state`, by its copy in fixed memory."""
        with torch.no_grad():
            for mine, given in zip(read(self.state), read(state), strict=True):
                mine.copy_(given)
        tensors: Sequence[Tensor] = state.learned
        sums = self.graphs[0].sums
        adds = sums is not None and sums.are_open and state.hidden.requires_grad  # else no backward pass would run
        for graph in self.graphs:
            tensors = _Replay.apply(graph, *tensors, *(() if adds else graph.parameters))
        return state.with_learned(tensors)


class LayerGraphs:
    """Graphs of consecutive layers, for the shapes of micro-batches that occur more than once."""

    def __init__(
        self, layers: Sequence[EncoderLayer], recorder: Recorder, compute_dtype: torch.dtype | None, sums: Sums | None
    ) -> None:
        self.layers, self.recorder, self.compute_dtype, self.sums = list(layers), recorder, compute_dtype, sums
        modules = [module for layer in layers for module in layer.modules()]
        self.hooks = [hooks for m in modules for hooks in (m._forward_pre_hooks, m._forward_hooks, m._backward_hooks)]
        self.tensors = [x for layer in layers for x in (*layer.parameters(), *layer.buffers())]
        self.constants: Any = None
        """Addresses of weights and numbers that are part of the captured graphs."""
        self.seen: set[Any] = set()
        self.captured: dict[Any, Captured] = {}
        self.buffers: dict[Any, Tensor] = {}
        """Gradients of the weights: one memory for all layers and shapes."""
        self.passes = 0

    def run(self, state: State) -> State:
        """Run all layers on the input state of the first one."""
        if not self.layers[0].training or not torch.is_grad_enabled() or any(self.hooks):
            return self._run_plainly(state)
        self.passes += 1
        layout = state.inputs.layout
        self._forget_if_changed(layout.causal)
        tensors = tuple((x.shape, x.dtype, x.requires_grad) for x in read(state))
        shape = (tensors, layout.full, layout.restarts, layout.causal)
        if shape in self.captured:
            self.captured[shape].last_use = self.passes
            return self.captured[shape].replay(state)
        if shape not in self.seen:  # the first pass compiles its kernels
            self.seen.add(shape)
        elif self._make_room() and not any(layer.attention.reads_runs(state.hidden, layout) for layer in self.layers):
            self.captured[shape] = Captured(*self._capture(state), last_use=self.passes)
            return self.captured[shape].replay(state)
        return self._run_plainly(state)

    def _forget_if_changed(self, causal: bool) -> None:
        """Drop all graphs if a weight has moved, a number has changed that is part of them, or a causal phase ends."""
        numbers = [layer.layer_position.constants for layer in self.layers]
        constants = ([x.data_ptr() for x in self.tensors], numbers, causal)
        if constants != self.constants:
            self.constants = constants
            self.captured.clear()

    def _make_room(self) -> bool:
        """Return whether one more shape may have graphs; drop those of a shape that no longer occurs."""
        if len(self.captured) < MOST_SHAPES:
            return True
        oldest = min(self.captured, key=lambda shape: self.captured[shape].last_use)
        if self.passes - self.captured[oldest].last_use < IDLE_PASSES:
            return False
        del self.captured[oldest]
        return True

    def buffer(self, name: str, weight: Tensor) -> Tensor:
        """Return memory for a weight's gradient, which leaves before another layer or shape writes there."""
        return self.buffers.setdefault((name, weight.shape, weight.dtype), torch.empty_like(weight.detach()))

    def _run_plainly(self, state: State) -> State:
        """Run all layers without graphs."""
        for layer in self.layers:
            state = run_stage(layer, state, self.compute_dtype)
        return state

    def _warm_up(self, fixed: State) -> None:
        """Run a forward and a backward pass without effects."""
        after, leaves = fixed, [x for x in fixed.learned if x.requires_grad]
        for layer in self.layers:  # on copies: hooks of the weights themselves would run
            copies = copies_of_weights(layer)
            leaves += (x for x in copies.values() if x.requires_grad)
            after = run_stage(layer, after, self.compute_dtype, copies)
        torch.autograd.grad(after.hidden.sum() + after.head_cosine, leaves, allow_unused=True)

    def _capture(self, state: State) -> tuple[State, list[LayerGraph]]:
        """Return `state` in fixed memory and the captured graphs of all layers."""
        fixed, device = in_fixed_memory(state), state.hidden.device
        graphs: list[LayerGraph] = []
        with self.recorder.aside(device), refused_in_one_line(graphs):
            for _ in range(WARM_UP):
                self._warm_up(fixed)
            given = fixed
            for layer in self.layers:
                graphs.append(LayerGraph(self, layer, given, is_first=not graphs))
                given = given.with_learned([x.detach().requires_grad_(x.requires_grad) for x in graphs[-1].outputs])
            gradients: list[Tensor | None] = [torch.zeros_like(x) for x in graphs[-1].outputs]
            for graph in reversed(graphs):
                gradients = graph.capture_backward(self, gradients)
        return fixed, graphs


@contextlib.contextmanager
def refused_in_one_line(graphs: list[LayerGraph]) -> Iterator[None]:
    """Name the layer whose work cannot be captured, such as that of a plug-in which waits for the GPU."""
    try:
        yield
    except torch.cuda.OutOfMemoryError:
        raise
    except RuntimeError as error:
        first: BaseException = error
        while first.__context__ is not None:  # the end of a failed capture raises once more
            first = first.__context__
        cause = str(first).partition("\n")[0]
        raise UserError(f"no CUDA graph holds layer {len(graphs)}: {cause}; use --cuda-graphs off") from error


class ModelGraphs:
    """Graphs of all layers of a model: those on either side of another stage have graphs of their own."""

    def __init__(self, make_recorder: Callable[[], Recorder] = Recorder, sums: Sums | None = None) -> None:
        """Begin without graphs; without `sums` all gradients of the weights leave by autograd."""
        self.make_recorder, self.sums = make_recorder, sums
        self.parts: dict[EncoderLayer, LayerGraphs] = {}
        """First of some consecutive layers → their graphs."""

    def run(self, layers: Sequence[EncoderLayer], state: State, compute_dtype: torch.dtype | None = None) -> State:
        """Run consecutive layers; `compute_dtype` is the `Encoder`'s."""
        if layers[0] not in self.parts:
            self.parts[layers[0]] = LayerGraphs(layers, self.make_recorder(), compute_dtype, self.sums)
        return self.parts[layers[0]].run(state)
