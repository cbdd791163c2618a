"""Measurements inside engines, and what tests change there: proofs of gradients, waits for the device, bytes in memory,
CUDA graphs on an emulator, and a rank that computes wrong once.

A wait is a number read from a tensor, or DeepSpeed's `synchronize`, under a GPU's settings on a CPU's tensors, counted
by the file that waits; what our own model could wait for is refused in `tests/unit/test_loop.py`. A rank computes wrong
when a mantissa bit flips in an activation, a gradient or a weight.
"""

import contextlib
import gc
import io
import itertools
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ddrp.arguments import parse_arguments
from megatron_ddrp.config import Config
from megatron_ddrp.corpus import Corpus
from megatron_ddrp.data.batches.loader import BatchLoader
from megatron_ddrp.engine import build, layout, nonfinite
from megatron_ddrp.engine.build import build_engine
from megatron_ddrp.engine.layout import Setup
from megatron_ddrp.engine.proofs import GradientProof
from megatron_ddrp.engine.step import train_step, training_inputs
from megatron_ddrp.errors import UserError
from megatron_ddrp.model import build_model, graphs
from megatron_ddrp.parallel.pipeline import local_parameters, whole_name
from megatron_ddrp.parallel.process_group import place_in_grid
from tests.emulated_graphs import Emulator, Graph, captured_shapes
from tests.integration.launch import json_file
from tests.integration.training_runs import forget_layout, train_run


def opened(words: list[str]) -> tuple[Config, BatchLoader, Setup]:
    """Return the configuration with the size of the vocabulary, this rank's samples and the setup."""
    config = parse_arguments(words).config
    ranks = place_in_grid(torch.device("cpu"), config.parallel)
    corpus = Corpus.open(config)
    config = config.replace(model={"vocab_size": corpus.tokenizer.vocab_size})
    return config, corpus.loader("train", ranks.data_rank, ranks.data_size), Setup.of(config, ranks)


def built(words: list[str]) -> tuple[Any, BatchLoader, Setup]:
    """Return the engine of this rank, its samples and the setup."""
    config, loader, setup = opened(words)
    torch.manual_seed(0)
    return build_engine(build_model(config.model, objective=config.objective), setup), loader, setup


class Proved(NamedTuple):
    """Words of a proof about a step, and about the next one, in which one gradient was changed."""

    lines: list[str]
    error: str
    compared: list[str]
    """Names of this rank's compared parameters."""


def proofs(run: tuple[list[str], str]) -> Proved:
    """Return what a rank's proof says of a run: its command line and the parameter to change."""
    words, changed = run
    engine, loader, setup = built(words)
    ranks, inputs = setup.ranks, training_inputs(loader.step(0), setup, 1)
    is_serial = type(engine.optimizer).__name__ == "BF16_Optimizer"
    assert is_serial == (ranks.pipeline_size > 1), "only a pipeline has the optimizer that overlaps nothing"
    parameters, lines = local_parameters(engine.module), []
    hooks = {name: len(parameter._backward_hooks or ()) for name, parameter in parameters.items()}
    proof = GradientProof(engine, setup, lines.append)
    train_step(engine, inputs, setup, 1)
    assert "_take_model_step" not in vars(engine) or engine._take_model_step == proof.take_step
    assert hooks == {name: len(parameter._backward_hooks or ()) for name, parameter in parameters.items()}
    GradientProof(engine, setup, lines.append)
    seen: list[int] = []

    def lose_a_tenth(gradient: Tensor) -> Tensor:
        """Change the first micro-batch's gradient, as an engine might; the proof's own hook has run before."""
        seen.append(1)
        return gradient * 0.9 if len(seen) == 1 else gradient

    if changed in parameters and ranks.rank == ranks.world_size - 1:
        parameters[changed].register_hook(lose_a_tenth)
    error = ""
    try:
        train_step(engine, inputs, setup, 2)
    except UserError as refusal:
        error = str(refusal) if refusal.agreed else ""
    forget_layout(engine)
    return Proved(lines, error, list(proof.parameters))


ATEN = torch.ops.aten
READS = (ATEN._local_scalar_dense.default, ATEN.equal.default, ATEN.masked_fill_.Tensor, ATEN.masked_fill.Tensor)
"""Operations that read a number; a kernel of CUDA takes the value of `masked_fill` as one."""
WARM_UP_STEPS = 3
"""DeepSpeed's throughput timer waits from the third step on."""

Waits = dict[str, int]
"""`read FILE` or `synchronize FILE` → number per step."""


class Waiting(TorchDispatchMode):
    """Counter of the numbers that the host reads."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS:
            self.count("read")
        return func(*args, **(kwargs or {}))

    def count(self, what: str, *_: object) -> None:
        frames = [frame.filename for frame in traceback.extract_stack() if Path(__file__).name not in frame.filename]
        places = [name for name in frames if "/deepspeed/" in name or "/megatron_ddrp/" in name]
        self.waits[f"{what} {Path(places[-1]).name}"] += 1


class Stream:
    """A stream of a device that has one queue, and an event in it."""

    def __init__(self, waiting: Waiting) -> None:
        self.waiting = waiting

    def wait_stream(self, _other: object) -> None: ...

    wait_event = record = wait_stream

    def synchronize(self) -> None:
        self.waiting.count("synchronize")


def waits_of_step(words: list[str]) -> Waits:
    """Return the waits of the step after `WARM_UP_STEPS` of `pretrain_bert.py WORDS`.

    DeepSpeed trains on the CPU in any half precision, with the settings for a GPU.
    """
    from deepspeed.accelerator import get_accelerator

    config, loader, setup = opened(words)
    accelerator, waiting = type(get_accelerator()), Waiting()
    answers = {"is_fp16_supported": True, "resolves_data_dependency": False, "current_stream": Stream(waiting)}
    answers |= {"supported_dtypes": [torch.float, torch.half, torch.bfloat16], "Event": Stream(waiting)}

    with (
        mock.patch.object(build, "deepspeed_settings", settings_of_gpu),
        mock.patch.multiple(accelerator, **{name: mock.Mock(return_value=each) for name, each in answers.items()}),
        mock.patch.object(accelerator, "synchronize", lambda *_: waiting.count("synchronize")),
        mock.patch.object(torch.Tensor, "record_stream", lambda *_: None),
    ):
        engine = build.build_engine(build_model(config.model, objective=config.objective), setup)
        engine.optimizer.reduction_stream = Stream(waiting)
        for step in range(1, WARM_UP_STEPS + 1):
            _take(engine, loader, setup, step)
        waiting.waits.clear()
        with waiting:
            _take(engine, loader, setup, WARM_UP_STEPS + 1)
        waits = dict(waiting.waits)
        forget_layout(engine)
    return waits


SETTINGS = build.deepspeed_settings


def settings_of_gpu(setup: Setup, parameters: int) -> dict[str, Any]:
    return SETTINGS(replace(setup, ranks=setup.ranks._replace(device=torch.device("cuda"))), parameters)


def _take(engine: Any, loader: Any, setup: Setup, step: int) -> None:
    micro_batches = loader.step((step - 1) * setup.config.training.global_batch_size)
    train_step(engine, training_inputs(micro_batches, setup, step), setup, step)


Held = dict[str, int]
"""Bytes by kind: weights, gradients, optimizer; `all` counts every tensor that came since before the model."""


def held_in_second_step(words: list[str]) -> Held:
    """Train two steps; in the second, the most that is held after any micro-batch's backward pass."""
    config, loader, setup = opened(words)
    before = settled_size()
    model = build_model(config.model, config.parallel.checkpoint_activations, config.objective)
    engine = build_engine(model, setup)
    del model
    held: Held = {}

    def count_before(action: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*arguments: Any, **named: Any) -> Any:
            now = held_now(engine) | {"all": settled_size() - before}
            held.update({kind: max(held.get(kind, 0), now[kind]) for kind in now})
            return action(*arguments, **named)

        return counting

    for step in (1, 2):
        if step == 2:
            engine.step, engine._take_model_step = count_before(engine.step), count_before(engine._take_model_step)
        _take(engine, loader, setup, step)
    forget_layout(engine)
    return held


def settled_size() -> int:
    """Return the bytes of all tensors, without those that a thread of gloo is about to let go after a collective."""
    sizes = []
    for _ in range(20):
        gc.collect()
        sizes.append(size(item for item in gc.get_objects() if issubclass(type(item), Tensor)))
        time.sleep(0.01)
    return min(sizes)


def size(tensors: Iterable[Tensor]) -> int:
    """Bytes of their storages, each once."""
    there = [tensor.untyped_storage() for tensor in tensors if tensor.device.type == "cpu"]
    return sum({storage.data_ptr(): storage.nbytes() for storage in there}.values())


def held_now(engine: Any) -> Held:
    """Return the bytes of each kind that an engine holds, where DeepSpeed keeps them."""
    parameters = list(engine.module.parameters())
    weights = [p.data for p in parameters] + [p.ds_tensor for p in parameters if hasattr(p, "ds_tensor")]
    zero = engine.optimizer
    gradients = [grad for p in parameters for grad in (p.grad, getattr(p, "grad_accum", None)) if grad is not None]
    for kept in ("averaged_gradients", "all_grad_tensors"):
        gradients += [part for parts in getattr(zero, kept, {}).values() for part in parts or []]
    if getattr(zero, "grad_partitions_flat_buffer", None) is not None:
        gradients.append(zero.grad_partitions_flat_buffer)
    adam = getattr(zero, "optimizer", zero)
    state = [x for of_one in adam.state.values() for x in of_one.values() if isinstance(x, Tensor)]
    own = {id(p) for p in parameters}
    masters = [p for group in adam.param_groups for p in group["params"] if id(p) not in own]
    masters += list(getattr(zero, "fp32_partitioned_groups_flat", []))
    return {"weights": size(weights), "gradients": size(gradients), "optimizer": size(state + masters)}


def train_emulated(words: list[str]) -> list[Any]:
    """Train `pretrain_bert.py WORDS` with the settings for GPUs.

    Return the steps' rows, the number of captured shapes, how often gradients of a layer were added by its graphs, and
    the steps in which this rank replayed some.
    """
    made: list[graphs.ModelGraphs] = []
    train_step, replayed = nonfinite.train_step, list[int]()

    def noting(engine: Any, micro_batches: Any, setup: Any, step: int, *others: Any) -> Any:
        with mock.patch.object(Graph, "replay", autospec=True, side_effect=Graph.replay) as replaying:
            result = train_step(engine, micro_batches, setup, step, *others)
        replayed.extend([step] * replaying.called)
        return result

    def make(sums: Any) -> graphs.ModelGraphs:
        made.append(graphs.ModelGraphs(Emulator, sums))
        return made[-1]

    add = layout.GradientSums.add
    with (
        mock.patch.object(graphs, "why_not_graphs", lambda *_: None),  # as on a GPU
        mock.patch.object(build, "ModelGraphs", make),
        mock.patch.object(build, "deepspeed_settings", settings_of_gpu),
        mock.patch.object(nonfinite, "train_step", noting),
        mock.patch.object(layout.GradientSums, "add", autospec=True, side_effect=add) as adding,
    ):
        rows = train_run(parse_arguments(words).config)
    return [rows, [captured_shapes(each) for each in made], adding.call_count, replayed]


def scaling(path: Path, **settings: int) -> Path:
    """Write a DeepSpeed file with settings of the dynamic loss scale, and return its path."""
    return json_file(path, {"fp16": settings})


def allow_fp16_on_the_cpu(change: Callable[..., None] = setattr) -> None:
    """Change what DeepSpeed refuses for its speed alone; its arithmetic is what tests need."""
    from deepspeed.accelerator import get_accelerator

    change(type(get_accelerator()), "is_fp16_supported", lambda self: True)


STEP = 2
"""Step in which the bit flips."""


class Fault(NamedTuple):
    """One flipped bit: what of (`activation`, `gradient` or a weight's name), on which rank, in which pass.

    Pass 0 is the training's, pass 1 the replay's.
    """

    kind: str
    rank: int
    number: int = 0


class Seen(NamedTuple):
    """Lines that a rank's run printed, its gradient norms, its error, and whether the faulty step kept the weights."""

    lines: list[str]
    norms: list[float]
    error: str
    kept: bool


def run_with_fault(run: tuple[list[str], Fault]) -> Seen:
    """Train a command line with a fault and return what this rank saw."""
    allow_fp16_on_the_cpu()
    words, fault = run[0], Fault(*run[1])
    kept: list[bool] = []
    with (
        mock.patch.object(nonfinite, "train_step", faulty(fault, kept)),
        contextlib.redirect_stdout(io.StringIO()) as said,
    ):
        rows, error = [], ""
        try:
            rows = train_run(parse_arguments(words).config)
        except UserError as refusal:
            error = str(refusal) if refusal.agreed else ""
            forget_layout()
    return Seen(said.getvalue().splitlines(), [row["grad_norm"] for row in rows], error, kept[STEP - 1])


def faulty(fault: Fault, kept: list[bool]) -> Callable[..., Any]:
    """Return `train_step` with a fault; it notes in `kept` whether each step left this rank's weights as they were."""
    train_step = nonfinite.train_step

    def step_with_fault(engine: Any, micro_batches: Any, setup: Any, step: int, *others: Any) -> Any:
        hook: Any = contextlib.nullcontext()
        if step == STEP and setup.ranks.rank == fault.rank:
            hook = flipped(engine.module, fault)
        before = weights_of(engine.module)
        try:
            with hook:
                return train_step(engine, micro_batches, setup, step, *others)
        finally:
            after = weights_of(engine.module)
            kept.append(all(torch.equal(after[name], weight) for name, weight in before.items()))

    return step_with_fault


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of this rank's weights, or of its parts of them."""
    return {name: getattr(p, "ds_tensor", p).detach().clone() for name, p in local_parameters(module).items()}


@contextlib.contextmanager
def flipped(module: nn.Module, fault: Fault) -> Any:
    """Flip the fault's bit within the context."""
    if fault.kind not in ("activation", "gradient"):
        flip(local_parameters(module)[fault.kind])
        yield
        return
    passes = itertools.count()

    def look(inner: nn.Module, given: Any, output: Tensor) -> None:
        if next(passes) != fault.number:
            return
        if fault.kind == "activation":
            flip(output)
        else:
            output.register_hook(flip)

    named = {whole_name(inner): inner for inner in module.modules()}
    with named["layers.0.feed_forward.output"].register_forward_hook(look):
        yield


def flip(tensor: Tensor) -> Tensor:
    """Flip the highest bit of the mantissa of a tensor's first number, in place, and return the tensor."""
    integers, bit = (torch.int32, 22) if tensor.dtype == torch.float32 else (torch.int16, 6)
    numbers = tensor.data.view(integers)
    numbers[(0,) * tensor.dim()] ^= 1 << bit
    return tensor
