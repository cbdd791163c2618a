"""Triton attention where there is no GPU: its maths under Triton's interpreter, its refusals, and that it compiles.

How often Triton compiles each kernel over the rows of a run is counted by its own dispatch on an absent device. No
tensor of `[batch, heads, seq, seq]` or `[batch, 1, seq, seq]` arises on the path of the kernels.
"""

import ast
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import kernels
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_ddrp.config import ENCODINGS, ModelConfig, encoding_class
from megatron_ddrp.data.batches.loader import ROW_MULTIPLE
from megatron_ddrp.model import fused
from megatron_ddrp.model.attention.backends import resolve_backend
from megatron_ddrp.model.attention.gpu import triton_attention
from megatron_ddrp.model.attention.gpu.triton_attention import LENGTHS
from megatron_ddrp.model.attention.logits import Attending, Demand
from tests.absent_gpu import triton_without_gpu
from tests.unit.model.attention_cases import make_case
from tests.unit.model.tiny import some_draws, tiny_batch, tiny_model

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def run(arguments, **environment):
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "TRITON_"))} | environment
    root, words = Path(__file__).parents[3], [sys.executable, *arguments]
    return subprocess.run(words, cwd=root, env=variables, capture_output=True, text=True, timeout=500, check=False)


@needs_triton
def test_maths_under_the_interpreter():
    """All checks of triton_kernels.py pass, and there are 100 or more."""
    checks = str(Path(__file__).with_name("triton_kernels.py"))
    result = run(["-m", "pytest", checks, "-p", "no:cacheprovider"], TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    assert result.returncode == 0, result.stdout + result.stderr
    passed = re.search(r"(\d+) passed", result.stdout)
    assert passed and int(passed[1]) >= 100, result.stdout


def test_package_needs_no_triton():
    script = "import sys; sys.modules['triton'] = None; import megatron_ddrp.model.attention.gpu.triton_attention"
    result = run(["-c", script])
    assert result.returncode == 0, result.stderr


@pytest.fixture
def machine(monkeypatch):
    """Return a function that sets what Triton finds: a GPU's capability, the package, a C compiler, the interpreter."""

    def show(capability=None, package=True, compiler=True, interpreter=False):
        fused.missing_for_triton.cache_clear()
        for name in ("TRITON_INTERPRET", "CC"):
            monkeypatch.delenv(name, raising=False)
        if interpreter:
            monkeypatch.setenv("TRITON_INTERPRET", "1")
        monkeypatch.setenv(*(("CC", "cc") if compiler else ("PATH", "")))
        monkeypatch.setattr(fused.importlib.util, "find_spec", lambda name: name if package else None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)

    return show


def test_reasons_not_to_serve_are_lines_and_auto_takes_another_backend_without_a_c_compiler(machine):
    """Triton builds its launcher with one; a GPU machine may have none."""
    half, interpreted = torch.bfloat16, {"interpreter": True}
    for shown, device, dtype, dropout, head_dim, expected in (
        ({}, "cpu", half, 0.1, 64, "needs an NVIDIA GPU, got cpu"),
        ({"capability": (7, 0)}, "cuda", torch.float16, 0.1, 64, "capability 8.0 .* this GPU has 7.0: use sdpa"),
        ({"capability": (8, 0)}, "cuda", torch.float64, 0.1, 64, "takes bfloat16, float16 or float32, got float64"),
        ({"capability": (9, 0)}, "cuda", half, 0.1, 256, "heads up to 128 wide, got 256"),
        ({"capability": (8, 0)}, "cuda", half, 0.1, 128, None),
        (interpreted, "cpu", torch.float32, 1.0, 64, "dropout below 1, got 1.0"),
        (interpreted | {"package": False}, "cpu", torch.float32, 0.0, 64, "needs the package triton"),
        ({"capability": (8, 0), "compiler": False}, "cuda", half, 0.1, 64, "needs a C compiler"),
    ):
        machine(**shown)
        demand = Demand(torch.device(device), dtype, dropout, head_dim)
        reason = triton_attention.why_not_triton(demand)
        assert (reason is None) == (expected is None), (reason, expected)
        assert expected is None or (re.search(expected, reason) and "\n" not in reason), reason
    assert resolve_backend("auto", demand, True)[0] != "triton"
    with pytest.raises(ValueError, match="use another backend"):
        triton_attention.triton_attention(make_case([[1] * 4], -1, 1).attending())


def constants(seq, window, *causal):
    """The constants of the kernels of one row of bfloat16 on an H100."""
    shapes = ((1, 128, 64), None, None, None)
    call = (1, seq, 1, 64), torch.bfloat16, (9, 0), 0.125, -64, 63
    return triton_attention.plan_of(triton_attention.Facts(*call, shapes, window, 0.0, 0, False, *causal)).constants


def test_kernels_look_through_the_places_of_a_tile_and_its_window_on_both_sides_and_causal_rows_share_theirs():
    """The widest tile of these kernels has 128 queries; the number of places is a power of two from 512 on.

    The places begin a window before the tile, also where the row begins later.
    """
    for seq, window, covered in (
        *((8192, 0, 512), (8192, 192, 512), (8192, 193, 1024), (8192, 448, 1024), (8192, 449, 2048), (8192, 960, 2048)),
        *((512, 192, 512), (512, 256, 1024), (512, 510, 2048), (512, 511, 512), (8192, None, 8192), (100, None, 512)),
    ):
        assert constants(seq, window)["S_PAD"] == covered, (seq, window)
    plans = {str(constants(seq, None, True)) for seq in range(272, 512, 16)}
    assert len(plans) == 1 and "'WINDOW': (512, 0)" in plans.pop()


COMPILED_HERE = [
    *("absolute, 64, forward, sm_90", "bert-r hcd, 64, forward, sm_90", "ddrp, 64, key_gradient, sm_90"),
    *("ddrp, 64, query_gradient, sm_90", "ddrp hcd, 64, key_gradient, sm_80", "bert-r hcd, 64, pull, sm_80"),
    *("ddrp packed, 64, query_gradient, sm_80", "deberta, 64, forward, sm_90", "deberta, 64, key_gradient, sm_90"),
    *("tupe-a, 64, key_gradient, sm_80", "alibi, 64, key_gradient, sm_90", "ddrp hcd local, 64, key_gradient, sm_90"),
]
"""Of the shipped kernels those that the suite compiles; `python benchmarks/kernels.py --write` compiles all."""


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or importlib.metadata.version("triton") != kernels.TRITON,
    reason=f"the bounds are those of triton {kernels.TRITON}",
)
@pytest.mark.slow
def test_kernels_compile_within_their_bounds(tmp_path, monkeypatch):
    """For GPUs that are not there: type errors that the interpreter forgives show here, and so does a spill."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    bounds = json.loads(kernels.BOUNDS.read_text(encoding="utf-8"))
    shipped = {name: rest for name, *rest in kernels.cases(list(ENCODINGS), kernels.HEAD_SIZES, (0, 2))}
    assert list(bounds) == list(shipped), "python benchmarks/kernels.py --write compiles them anew"
    for name in COMPILED_HERE:
        capability, launch = shipped[name]
        got, bound = kernels.compile_launch(launch, capability), kernels.Compiled(**bounds[name])
        assert got.instruction == bound.instruction and got.two_bytes == 0, name
        assert got.spilled <= bound.spilled and got.shared <= bound.shared, (name, got, bound)
        assert got.per_pair <= bound.per_pair, (name, got, bound)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("capability", kernels.CAPABILITIES)
def test_the_kernels_of_the_loss_compile_and_read_logits_in_groups(capability, tmp_path, monkeypatch):
    from megatron_ddrp.model import triton_loss

    found = list[kernels.Launch]()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton_loss, "launch", lambda kernel, _, *rest: found.append(kernels.Launch(kernel, *rest)))
    logits = torch.empty(48, 30592, dtype=torch.bfloat16, device="meta", requires_grad=True)
    triton_loss.sum_of_losses(logits, torch.empty(48, dtype=torch.long, device="meta")).backward()
    compiled = [kernels.compile_launch(launch, capability) for launch in found]
    assert [(x.spilled, x.two_bytes) for x in compiled] == [(0, 1), (0, 0)]  # one: the label's logit
    assert all(x.registers <= 64 for x in compiled)  # four programs of eight warps at a time on a multiprocessor


def test_few_kernels_spill_none_gathers_and_those_of_ddrp_need_few_instructions_and_registers():
    """What spills: kernels that are held to 128 registers, so that two programs run at a time, where HCD or packed rows
    add to them, and kernels at the limit of 255. DDRP's: the counts of full rows that make attention with learned
    offsets as fast as attention without them. Matrices are multiplied by the fastest instruction."""
    bounds = json.loads(kernels.BOUNDS.read_text(encoding="utf-8"))
    spilled = {name: row["spilled"] for name, row in bounds.items() if row["spilled"]}
    assert len(spilled) <= 34 and max(spilled.values(), default=0) <= 184, spilled
    assert not any(row["two_bytes"] for row in bounds.values())
    for name, row in bounds.items():
        kernel, device = name.split(", ")[2:]
        fastest = {"sm_90": "wgmma", "sm_80": "mma.sync"}[device]
        assert row["instruction"] == ("none" if kernel == "rows" else fastest), name
    for kernel, registers, per_pair in (("bert-r, 64, forward", 128, 20), ("ddrp, 64, key_gradient", 255, 24)):
        row = bounds[f"{kernel}, sm_90"]
        assert row["registers"] <= registers and row["per_pair"] <= per_pair and not row["spilled"], row


def test_no_helper_of_the_kernels_returns_nothing():
    """Triton 3.6 cannot compile that; the version that is installed here can."""
    files = Path(triton_attention.__file__).parent.glob("triton_*.py")
    trees = [ast.walk(ast.parse(file.read_text("utf-8"))) for file in files]
    functions = [x for nodes in trees for x in nodes if isinstance(x, ast.FunctionDef)]
    own = [x for x in functions if any("jit" in ast.unparse(y) for y in x.decorator_list)]
    returned = [(x.name, ast.unparse(y)) for x in own for y in ast.walk(x) if isinstance(y, ast.Return)]
    empty = [name for name, text in returned if re.match(r"return None|.* else None$", text)]
    assert len(returned) > 10 and not empty, empty


LONGEST, HEADS, LAYERS, COMPARED = 512, 12, 5, 3
STEP = ROW_MULTIPLE["cuda"]
PADDED = [(1 + seq % 3, seq, 1) for seq in (*range(STEP, 161, STEP), 320, LONGEST)]
PACKED = [(rows, LONGEST, documents) for rows, documents in ((1, 16), (16, 1), (5, 7), (3, 17))]
FULL = [(8, LONGEST, 1)]
"""Rows, tokens per row and documents per row of micro-batches."""


@pytest.fixture
def compilations(monkeypatch):
    """Kernel → the signatures that Triton compiled."""
    found = defaultdict(list)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with triton_without_gpu(lambda name, signature: found[name].append(signature)):
        yield found


def attend(encoding, rows, seq, documents, dropout, layer):
    """Launch the kernels of one layer's attention, forward and backward."""
    sizes = {"hidden_size": HEADS * 64, "num_attention_heads": HEADS, "num_layers": 1, "seq_length": LONGEST}
    config = ModelConfig(position_encoding=encoding, **sizes)
    module = encoding_class(encoding)(config)
    terms = module.terms(config, module(torch.arange(seq)[None]))
    states = [torch.zeros(rows, seq, HEADS, 64, dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    heads = torch.arange(LAYERS * COMPARED).view(LAYERS, COMPARED)[layer] % HEADS
    ids, counted = torch.ones(rows, seq, dtype=torch.long), torch.ones(rows, documents)
    attending = Attending(*(x.transpose(1, 2) for x in states), terms, ids, heads, dropout, counted)
    context, cosine = triton_attention.triton_attention(attending)
    assert cosine is not None
    (context.sum() + cosine).backward()


@needs_triton
@pytest.mark.parametrize(("encoding", "most"), {"ddrp": 2, "absolute": 1, "alibi": 512 // LENGTHS}.items())
def test_the_variants_of_a_kernel_over_padded_packed_and_full_rows(encoding, most, compilations):
    for number, (rows, seq, documents) in enumerate(PADDED + PACKED + FULL):
        attend(encoding, rows, seq, documents, 0.1, number % LAYERS)
    assert len(compilations.pop("rows_kernel")) == 1  # it reads no offsets
    assert len(compilations) >= 3 and {len(found) for found in compilations.values()} == {most}


@needs_triton
def test_the_least_dropout_is_no_constant(compilations):
    """As a constant, 1 would fail to compile."""
    for dropout in (1e-5, 1e-9, 0.1):
        attend("ddrp", 2, 64, 1, dropout, 0)
    kinds = {signature.get("drop_below", "none") for found in compilations.values() for signature in found}
    assert kinds == {"i32", "none"} and {len(found) for found in compilations.values()} == {1}


BATCH, SEQ = 2, 23


class Work(TorchDispatchMode):
    """Collects the shapes of all results, and in their order the names of operations that compute."""

    def __init__(self):
        super().__init__()
        self.shapes, self.names = set(), []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results, name = function(*args, **(kwargs or {})), function.overloadpacket.__name__
        self.shapes |= {tuple(x.shape) for x in tree_leaves(results) if isinstance(x, torch.Tensor)}
        if not function.is_view and "empty" not in name:
            self.names.append(name)
        return results


def pairs_of_rows(backend, encoding, **options):
    """Return the shapes with an entry for each pair of tokens of each row, in a training step with HCD."""
    options |= {"attention_dropout": 0.1, "seq_length": SEQ, "position_encoding": encoding}
    model, batch = tiny_model(attention_backend=backend, **options).float().train(), tiny_batch((SEQ, SEQ - 2), SEQ)
    with Work() as work:
        model(batch, some_draws(batch)).sums.sum().backward()
    return {shape for shape in work.shapes if len(shape) > 3 and shape[0] == BATCH and shape[-2:] == (SEQ, SEQ)}


IN_LOGITS = [(name, {}) for name in ENCODINGS if encoding_class(name).in_logits]
LOCAL = {"local_attention": 4, "global_every": 2}


@needs_triton
@pytest.mark.parametrize("encoding, options", [*IN_LOGITS, ("ddrp", LOCAL)])
def test_no_logits_are_stored(encoding, options, monkeypatch):
    monkeypatch.setattr(triton_attention, "why_not_triton", lambda *_: None)
    monkeypatch.setattr(triton_attention, "launch", lambda *_: None)  # the kernels work on tiles
    assert pairs_of_rows("triton", encoding, **options) == set()
    assert pairs_of_rows("eager", encoding, **options)


@needs_triton
def test_a_table_takes_few_operations_beside_the_kernels(monkeypatch):
    """The forward pass copies its rows once, for the backward pass too."""
    case, work = make_case([[1] * 32], -4, 3, tables="q", heads=2), Work()
    monkeypatch.setattr(triton_attention, "why_not_triton", lambda *_: None)
    monkeypatch.setattr(triton_attention, "launch", lambda kernel, *_: work.names.append(kernel.fn.__name__))
    attending = case.attending()
    triton_attention.triton_attention(attending)  # it makes what all calls share
    work.names.clear()
    with work:
        context, _ = triton_attention.triton_attention(attending)
        torch.autograd.grad(context, case.inputs, torch.ones_like(context))
    forward, backward = " ".join(work.names).split(" ones_like ")
    assert forward == "index _to_copy bmm forward_kernel"  # the copy: document numbers as int32
    kernels = "rows_kernel key_gradient_kernel query_gradient_kernel"
    assert backward == f"bmm {kernels} baddbmm_ bmm sum sum add_ add_ flip"
