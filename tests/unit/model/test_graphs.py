"""Compiled regions, and CUDA graphs of the layers on an emulator.

Regions: no break in a graph, the modules' numbers, dropout that repeats; when `--compile` acts. Graphs: the sums and
gradients of many micro-batches are those without graphs.
"""

import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_ddrp.config import ENCODINGS, Config, ModelConfig, ObjectiveConfig, TrainingConfig, encoding_class
from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.engine.layout import GradientSums, Setup, WeightedLoss
from megatron_ddrp.engine.step import MicroBatch
from megatron_ddrp.model import fused, graphs
from megatron_ddrp.model.bert import build_model
from megatron_ddrp.model.graphs import ModelGraphs
from megatron_ddrp.model.positions.absolute import set_theta
from megatron_ddrp.parallel.process_group import Ranks
from tests.emulated_graphs import Capture, Emulator, captured_shapes
from tests.refusals import refused
from tests.unit.model.tiny import encode, gradients, own_draws, packed_batch, tiny_batch, tiny_model

ROWS, SEQ, VOCABULARY = 2, 8, 40
CPU, GPU = torch.device("cpu"), torch.device("cuda")
Rows = Callable[..., Batch]
"""Rows by `seed` and the number of predicted tokens."""
assert_same_answers = partial(torch.testing.assert_close, rtol=0, atol=0)


def config_of(encoding: str, objective: str = "mth", **model: Any) -> Config:
    """Return a model of two layers with dropout."""
    sizes: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 2, "num_layers": 2, "seq_length": SEQ}
    if encoding_class(encoding).relative_distance is not None:
        sizes["relative_distance"] = 4
    settings = sizes | {"vocab_size": VOCABULARY, "attention_backend": "eager", "position_encoding": encoding} | model
    batch = TrainingConfig(micro_batch_size=ROWS, global_batch_size=ROWS)
    return Config(model=ModelConfig(**settings), objective=ObjectiveConfig(objective=objective), training=batch)


def rows_of(*lengths: int) -> Rows:
    """Return rows of one document each."""
    return partial(tiny_batch, lengths, SEQ, VOCABULARY)


def packed_rows(**settings: int) -> Batch:
    """Return two rows of two documents each, the second with padding."""
    return packed_batch(tiny_batch((3, 5, 4, 2), SEQ, VOCABULARY, **settings), [[0, 1], [2, 3]])


FULL, PADDED, PACKED = rows_of(8, 8), rows_of(8, 5), packed_rows


def micro_batch(config: Config, step: int, rows: Rows) -> MicroBatch:
    """Return rows for a step; the number of predicted tokens differs from step to step."""
    arrays = rows(seed=step, predicted=1 + step % 2).map(Tensor.numpy)
    return MicroBatch.of(arrays, Setup(config, Ranks(0, 1, CPU)).at(step), step)


def model_of(config: Config) -> Any:
    torch.manual_seed(1)
    return build_model(config.model, objective=config.objective).train()


def training(model: Any, config: Config, steps: list[MicroBatch], model_graphs: ModelGraphs | None) -> list[Any]:
    """Return the sums of all micro-batches, and the gradients after each second one: they add up over two."""
    model.graphs = model_graphs
    found: list[Tensor | None] = []
    for number, step in enumerate(steps):
        torch.manual_seed(number)
        output = model(*step.inputs)
        WeightedLoss(torch.linspace(1, 2, len(output.sums)) / 10)(output).backward()
        found.append(output.sums.detach().clone())
        if number % 2:
            found += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
            model.zero_grad()
    return found


def assert_equal_with_graphs(config: Config, rows: list[Rows], shapes: list[int]) -> None:
    """Compare micro-batches of these rows with and without graphs, bit for bit; `shapes` were captured."""
    model, model_graphs = model_of(config), ModelGraphs(Emulator)
    steps = [micro_batch(config, number, each) for number, each in enumerate(rows)]
    answers = [training(model, config, steps, used) for used in (None, model_graphs)]
    assert captured_shapes(model_graphs) == shapes
    assert_same_answers(*answers)


def test_the_gradients_of_all_micro_batches_but_the_last_are_added_without_autograd() -> None:
    """A hook of a parameter still sees each of them, and what it returns is added."""
    config = config_of("ddrp")
    model, seen = model_of(config), list[Tensor]()
    weight = model.layers[0].attention.query.weight
    weight.register_hook(lambda gradient: seen.append(gradient.clone()) or 2 * gradient)
    engine = SimpleNamespace(is_gradient_accumulation_boundary=lambda: weight.grad is not None)
    sums = GradientSums(engine, "grad", torch.float32)
    steps = [micro_batch(config, number, FULL) for number in range(6)]
    with mock.patch.object(sums, "add", wraps=sums.add) as add:
        assert_same_answers(*(training(model, config, steps, used) for used in (None, ModelGraphs(Emulator, sums))))
    assert all(map(torch.equal, seen[:6], seen[6:])) and len(seen) == 12
    assert add.call_count == 2 * config.model.num_layers  # in micro-batches 3 and 5; the first has no graphs yet


Case = tuple[str, str, dict[str, Any], list[int]]
"""Encoding, objective, changes of the model, and the shapes that are captured."""
REPEATED: list[Case] = [(encoding, "mth", {"attention_backend": "sdpa"}, [2]) for encoding in ENCODINGS]
PACKED_TOO: list[Case] = [
    ("ddrp", "electra", {}, [2, 2]),
    ("tupe-r", "rtd", {"num_layers": 4}, [2, 2]),
    ("rope", "token-contrast", {"local_attention": 4, "global_every": 2}, [2]),
    ("ddrp", "mth", {"layernorm_position": "pre", "ffn": "geglu", "relative_table": "per-layer"}, [2]),
    ("ddrp", "mth", {"norm": "rmsnorm", "bias": False}, [2]),
]


@pytest.mark.parametrize("case", REPEATED + PACKED_TOO, ids=lambda case: "-".join(case[:2]))
def test_graphs_repeat_sums_and_gradients_to_the_last_bit(case: Case) -> None:
    encoding, objective, changes, shapes = case
    rows = [PACKED, PADDED, PADDED, PACKED, PACKED, PADDED]
    rows = rows if case in PACKED_TOO else [FULL, FULL, PADDED, FULL, PADDED, PADDED]
    assert_equal_with_graphs(config_of(encoding, objective, **changes), rows, shapes)


@pytest.mark.parametrize(("encoding", "backend"), [("deberta", "eager"), ("alibi", "sdpa"), ("tupe-r", "eager")])
def test_graphs_are_captured_anew_at_the_end_of_a_causal_phase(encoding: str, backend: str) -> None:
    """Two shapes occur in the phase and one after it; only the last one has graphs."""
    config = config_of(encoding, attention_backend=backend)
    config = config.replace(objective={"objective_phases": "clm:0.5"}, training={"train_iters": 10})
    rows = [FULL, FULL, PADDED, PADDED, FULL, PADDED, *[FULL] * 4]  # steps 1 to 5 are in the phase
    assert_equal_with_graphs(config, rows, [1])


def one_model(encoding: str = "ddrp", seen: int = 0, **changes: Any) -> tuple[Config, Any, list[MicroBatch]]:
    """Return a model with graphs and some micro-batches of one shape, of which it has seen some."""
    config = config_of(encoding, **changes)
    model = model_of(config)
    model.graphs = ModelGraphs(Emulator)
    steps = [micro_batch(config, number, FULL) for number in range(4)]
    for step in steps[:seen]:
        model(*step.inputs).sums.sum().backward()
    return config, model, steps


def test_a_shape_is_captured_when_it_occurs_again_and_few_shapes_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs in use outlive those that rest longer: of two models one uses the shape of one row on and on."""
    monkeypatch.setattr(graphs, "IDLE_PASSES", 6)
    config, model, _ = one_model()

    def take(model: Any, *counts: int) -> list[int]:
        """Return the numbers of rows of the shapes that have graphs then."""
        for number, count in enumerate(counts):
            model(*micro_batch(config, number, rows_of(*[SEQ] * count)).inputs)
        (part,) = model.graphs.parts.values()
        return sorted(captured.state.hidden.shape[0] for captured in part.captured.values())

    for count, captured in ((1, 0), (1, 1), (2, 1), (2, 2), (3, 2), (3, 3), (4, 3), (4, 4)):
        assert len(take(model, count)) == captured
    assert take(model, 5) == [1, 2, 3, 4]  # the shape of one row was last used in pass 2, now it is pass 9
    assert [take(model, 5) for _ in range(3)] == [[2, 3, 4, 5]] * 3
    other = one_model()[1]
    assert take(other, 1, 1, 2, 2, 3, 3, 4, 4, *[1] * 7, 5, 5) == [1, 3, 4, 5]


def test_an_output_without_a_gradient_gets_none_of_the_last_step() -> None:
    """The loss of a step may leave outputs out, here all but the first, that the loss of the step before read."""
    _, model, _ = one_model(seen=2)
    (part,) = model.graphs.parts.values()
    (captured,) = part.captured.values()
    graph = captured.graphs[-1]
    first, *others = [x for x in graph.gradients if x is not None]
    outputs = graphs._Replay.apply(graph, *captured.state.learned, *graph.parameters)
    for mine in others:
        mine.fill_(7)
    next(out for out, mine in zip(outputs, graph.gradients, strict=True) if mine is first).sum().backward()
    assert bool((first == 1).all()) and others and not any(bool(mine.any()) for mine in others)


def test_evaluation_and_hooks_run_without_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    _, model, steps = one_model(seen=2)
    monkeypatch.setattr(graphs.Captured, "replay", lambda *_: pytest.fail("replayed"))
    with torch.no_grad():
        model(*steps[2].inputs)
    seen: list[str] = []
    with model.layers[1].attention.output.register_forward_hook(lambda *_: seen.append("output")):
        model(*steps[2].inputs)
    assert seen == ["output"]
    model.eval()(*steps[2].inputs)
    with pytest.raises(pytest.fail.Exception, match="replayed"):
        model.train()(*steps[2].inputs)


def test_graphs_are_captured_anew_when_the_base_of_rope_changes_or_a_weight_moves() -> None:
    _, model, steps = one_model("rope")

    def answer(step: MicroBatch) -> Tensor:
        torch.manual_seed(3)
        return model(*step.inputs).sums.detach()

    answers = [answer(step) for step in steps]
    set_theta(model, 100.0)
    changed = answer(steps[3])
    assert not torch.equal(changed, answers[3])
    model.graphs, used = None, model.graphs
    assert torch.equal(answer(steps[3]), changed)
    model.graphs = used
    weight = model.layers[0].attention.query.weight
    weight.data = weight.data * 2
    moved = answer(steps[3])
    assert not torch.equal(moved, changed) and captured_shapes(used) == [1]
    model.graphs = None
    assert torch.equal(answer(steps[3]), moved)


def test_a_layer_that_waits_for_the_device_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _, model, steps = one_model()
    project = model.layers[1].attention.project
    monkeypatch.setattr(model.layers[1].attention, "project", lambda x, *maps: project(x * float(x.sum() != 7), *maps))
    model(*steps[0].inputs)
    refused("^no CUDA graph holds layer 1: .*; use --cuda-graphs off$", model, *steps[1].inputs)


def test_a_capture_stays_away_from_the_weights_own_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's hooks keep those nodes on another stream, which a capture on a GPU must not reach."""
    _, model, steps = one_model()
    weights, given = {id(weight): weight for weight in model.parameters()}, list[Tensor]()
    differentiate = torch.autograd.grad

    def noting(outputs: Any, inputs: Any, *rest: Any, **options: Any) -> Any:
        given.extend(inputs if isinstance(torch.utils._python_dispatch._get_current_dispatch_mode(), Capture) else ())
        return differentiate(outputs, inputs, *rest, **options)

    monkeypatch.setattr(torch.autograd, "grad", noting)
    for step in steps[:2]:
        model(*step.inputs)
    of_weights = {x.data_ptr() for x in given} & {weight.data_ptr() for weight in model.layers.parameters()}
    assert len(of_weights) == len(list(model.layers.parameters())) and not {id(x) for x in given} & weights.keys()


def test_runs_of_varlen_attention_differ_so_it_has_no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    config, model, steps = one_model("rope", attention_backend="sdpa", attention_dropout=0.0)
    monkeypatch.setattr("megatron_ddrp.model.attention.backends.why_not_varlen", lambda _: None)
    monkeypatch.setattr("megatron_ddrp.model.attention.backends.varlen_attention", lambda attending: attending.query)
    for number in range(3):
        model(*micro_batch(config, number, PADDED).inputs)
        assert captured_shapes(model.graphs) == [0]
    for step in steps[:2]:
        model(*step.inputs)
    assert captured_shapes(model.graphs) == [1]


def test_packed_rows_have_sixteen_documents_under_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("ddrp").replace(data={"packing": True}, parallel={"cuda_graphs": "auto"})
    assert micro_batch(config, 1, PACKED).inputs.draws.token_mask.shape == (ROWS, 2, SEQ)
    monkeypatch.setattr(graphs, "why_not_graphs", lambda *_: None)
    draws = micro_batch(config, 1, PACKED).inputs.draws
    assert draws.token_mask.shape == (ROWS, 16, SEQ) and draws.token_mask[:, 2:].sum() == 0
    without = micro_batch(config.replace(data={"packing": False}), 1, PACKED).inputs.draws
    assert torch.equal(draws.token_mask[:, :2], without.token_mask)
    off = micro_batch(config.replace(objective={"tcd_weight": 0.0}), 1, PACKED).inputs.draws
    assert off.token_mask.shape == (ROWS, 16, 0)


@pytest.fixture
def traced(monkeypatch, request):
    """Trace regions with autograd, fail at a break in a graph, and run them by torch's own kernels, or as asked."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    compiled = partial(torch.compile, fullgraph=True, backend=getattr(request, "param", "aot_eager"))
    monkeypatch.setattr(fused, "compile_region", cache(compiled))


@pytest.mark.parametrize("read", [slice(3), slice(1, 3), slice(2), slice(1, 2)], ids=["all", "maps", "input", "one"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_maps_of_one_input_have_the_gradients_of_maps_apart(with_bias, read):
    """What nobody reads has no gradient, as the value of a layer that HCD alone reads."""
    torch.manual_seed(0)
    maps = [torch.nn.Linear(4, width) for width in (4, 6)]
    parameters = [parameter for each in maps for parameter in (each.weight, each.bias)]
    x = torch.randn(2, 3, 4, requires_grad=True)
    apart = x, *(torch.nn.functional.linear(x, each.weight, each.bias if with_bias else None) for each in maps)
    answers = []
    for readers in (fused.maps_of(x, maps, with_bias), apart):
        loss = sum((part * part.sin()).sum() for part in readers[read])
        answers.append((*readers, *torch.autograd.grad(loss, [x, *parameters], allow_unused=True)))
    torch.testing.assert_close(*answers)


SMALL_ELECTRA = ObjectiveConfig(objective="electra", generator_size=1.0, tcd_weight=1.0, hcd_weight=0.01)
COMPILED = {
    "post": {"position_encoding": "deberta", "layernorm_position": "post"},  # its mask decoder decodes places
    # The width of the feed-forward maps is the generator's: one graph serves both.
    "pre": {"objective": SMALL_ELECTRA, "layernorm_position": "pre", "ffn_hidden_size": 48},
    "modern": {"layernorm_position": "pre", "ffn": "geglu", "bias": False, "norm": "rmsnorm", "first_norm": False},
    "no bias": {"layernorm_position": "post", "bias": False},
}


@pytest.mark.parametrize("changes", COMPILED.values(), ids=COMPILED)
def test_a_compiled_model_has_the_sums_and_gradients_of_the_other_and_drops_nothing_in_evaluation(changes, traced):
    batch = tiny_batch()
    answers = []
    for setting in ("off", "on"):
        model = tiny_model(compile=setting, **{"objective": ObjectiveConfig()} | changes)
        sums = model(batch, own_draws(model, batch)).sums
        weights = range(1, 1 + len(sums))
        answers.append({"sums": sums, **gradients(model, sums, weights, retain_graph=False)})
    torch.testing.assert_close(answers[1], answers[0])
    stats = torch._dynamo.utils.counters["stats"]
    found = stats["unique_graphs"]
    for shorter in (tiny_batch((5, 4), 5), tiny_batch((6, 3, 1, 2), 6)):  # rows of every length share the graphs
        gradients(model, model(shorter, own_draws(model, shorter)).sums, retain_graph=False)
    assert stats["unique_graphs"] == found > 0
    dropping = (tiny_model(compile=setting, **changes, hidden_dropout=0.5).eval() for setting in ("on", "off"))
    torch.testing.assert_close(*(encode(model, batch) for model in dropping))


@pytest.mark.parametrize("traced", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)], indirect=True)
def test_dropout_of_a_region_has_one_mask_for_both_passes_and_repeats_when_a_layer_is_computed_again(traced):
    generator, answers = torch.Generator().manual_seed(0), []
    states = tuple(torch.randn(2, 50, 6, generator=generator).requires_grad_() for _ in range(2))
    for recompute in (False, True, False):
        run = partial(fused.run_compiled, fused.add, states, 0.5)
        torch.manual_seed(len(answers) // 2)  # 0, 0, 1
        result = checkpoint(run, use_reentrant=False) if recompute else run()
        answers.append((result, *torch.autograd.grad(result.sum(), states)))
    assert all(map(torch.equal, *answers[:2]))
    assert not torch.equal(answers[0][0], answers[2][0])
    for result, _, scale in answers:
        torch.testing.assert_close(result, states[0] + states[1] * scale)
        assert set(scale.unique().tolist()) == {0.0, 2.0} and 0.3 < (scale == 0).float().mean() < 0.7


def test_models_of_many_widths_share_no_code_and_beyond_the_limit_of_variants_a_region_runs_plainly(monkeypatch):
    """A sweep over encoders or a comparison holds more than torch's 8 variants of one function in a process."""
    compiled = []

    def backend(graph, inputs):  # that needs no compiler
        compiled.append(graph)
        return graph

    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    monkeypatch.setattr(fused, "compile_region", cache(fused.compile_region.__wrapped__))
    monkeypatch.setattr(fused, "own_copy", cache(fused.own_copy.__wrapped__))
    for width in range(4, 16):
        states = (torch.randn(2, 3, width), torch.randn(2, 3, width))
        for dropout in (0.1, 0.1, 0.0, 0.0):
            fused.run_compiled(fused.add_norm, states, dropout, torch.ones(width), None, 1e-5, False)
    assert len(compiled) == 24
    with torch._dynamo.config.patch(recompile_limit=2):
        for grad in ((True, True), (True, False), (False, True), (False, False), (True, True)):
            hidden, added = (torch.randn(2, 3, 4, requires_grad=needed) for needed in grad)
            assert torch.equal(fused.run_compiled(fused.add, (hidden, added), 0.0), hidden + added)
    assert len(compiled) == 26


def test_compile_acts_by_setting_device_and_triton(monkeypatch, tmp_path):
    (tmp_path / "Python.h").touch()
    compiles = fused.compiles.__wrapped__
    monkeypatch.setattr(fused.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setenv("CC", "cc")
    monkeypatch.setattr(fused, "_headers", lambda: tmp_path)
    for setting, device, capability, expected in (
        *(("on", CPU, None, True), ("auto", CPU, None, False), ("on", GPU, (7, 0), True)),
        *(("auto", GPU, (7, 0), False), ("auto", GPU, (8, 0), True), ("off", GPU, (9, 0), False)),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, answer=capability: answer)
        assert compiles(setting, device) is expected, (setting, device, capability)

    def assert_refused(words):
        fused.missing_for_triton.cache_clear()
        assert compiles("auto", GPU) is False and words in fused.why_not_compile(GPU)

    monkeypatch.setattr(fused, "_headers", lambda: Path("no headers"))
    assert_refused("needs Python.h, which is not in no headers")
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", "")
    assert_refused("needs a C compiler, and neither gcc nor clang is found")
    monkeypatch.setattr(fused.importlib.util, "find_spec", lambda name: None)
    assert_refused("needs the package triton")
    monkeypatch.setenv("CXX", sys.executable)
    assert fused.why_not_compile(CPU) is None
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no-such-compiler is not found" in fused.why_not_compile(CPU)
