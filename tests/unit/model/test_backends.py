"""Which attention `auto` takes, varlen attention's runs, dropout in every backend, and GPUs that torch has no code for:
they are refused wherever a command takes a device; torch's answers are set.

Triton attention where there is no GPU: its maths under Triton's interpreter, its refusals, that it compiles, in how
many variants over the rows of a run, and that no tensor with an entry for each pair of tokens arises.
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
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import kernels
import pytest
import torch
import torch.nn.functional as F
from torch.nn import attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_ddrp.commands.dry_run import dry_run
from megatron_ddrp.commands.planning import PresentDevice
from megatron_ddrp.config import ENCODINGS, Config, ModelConfig, ObjectiveConfig, encoding_class
from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.data.batches.loader import ROW_MULTIPLE
from megatron_ddrp.encoders.text_encoder import load_encoder
from megatron_ddrp.engine.build import choices
from megatron_ddrp.model import fused
from megatron_ddrp.model.attention import backends
from megatron_ddrp.model.attention import cpu as blocks
from megatron_ddrp.model.attention.backends import BACKENDS, eager_attention, refusal, resolve_backend, sdpa_attention
from megatron_ddrp.model.attention.gpu import triton_attention
from megatron_ddrp.model.attention.gpu.triton_attention import LENGTHS
from megatron_ddrp.model.attention.logits import Attending, Demand
from megatron_ddrp.model.fused import missing_code, missing_for_triton, named_device
from megatron_ddrp.model.positions import PositionTerms
from megatron_ddrp.model.stages import layout_of
from megatron_ddrp.parallel.process_group import own_device
from megatron_ddrp.tasks.jobs import device_of
from tests.refusals import refused
from tests.unit.model.attention_cases import make_case
from tests.unit.model.tiny import some_draws, tiny_batch, tiny_config, tiny_model


def demand(device="cuda", dtype=torch.bfloat16, dropout=0.1, head_dim=64, window=None, causal=False):
    return Demand(torch.device(device), dtype, dropout, head_dim, window, causal)


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


def test_auto_chooses_on_cpus_by_encoding_dropout_and_precision_and_the_run_names_another_choice_for_local_layers():
    for dtype, in_logits, dropout, window, expected in (
        (torch.float32, True, 0.0, None, "blocked"),
        (torch.float32, False, 0.1, None, "blocked"),
        (torch.float32, False, 0.0, None, "sdpa"),
        (torch.float32, False, 0.0, 64, "blocked"),
        (torch.bfloat16, False, 0.0, None, "blocked"),
    ):
        assert resolve_backend("auto", demand("cpu", dtype, dropout, window=window), in_logits)[0] == expected
    assert resolve_backend("eager", demand("cpu"), True) == ("eager", "as asked for")
    whole = tiny_config(position_encoding="rope", hidden_size=24, num_layers=4)
    cpu, local = torch.device("cpu"), {"local_attention": 4}
    fastest = "sdpa attention (fastest on CPUs in fp32 without terms in the logits and without dropout)"
    of_local, of_causal = "fastest on CPUs for local layers", "computes no pairs with following tokens"
    causal = ObjectiveConfig(objective_phases="clm:0.5")
    assert choices(Config(model=whole), cpu) == f"{fastest}, fp32"
    said = choices(Config(model=replace(whole, **local)), cpu)
    assert said == f"{fastest}, in local layers blocked attention ({of_local}), fp32"
    said = choices(Config(model=whole, objective=causal), cpu)
    assert said == f"{fastest}, in the causal phase blocked attention ({of_causal}), fp32"
    assert "local" not in choices(Config(model=replace(whole, attention_backend="eager", **local)), cpu)


@pytest.mark.parametrize(
    "capability, changes, in_logits, full, backend, why",
    [
        ((9, 0), {}, True, True, "triton", "stores no logits"),
        ((8, 0), {"dtype": torch.float32}, True, False, "triton", "stores no logits"),
        ((7, 0), {"dtype": torch.float16}, True, True, "sdpa", "8.0 (A100) or newer, this GPU has 7.0"),
        ((9, 0), {}, False, True, "sdpa", "flash for full rows, triton for padded and packed ones"),
        ((9, 0), {}, False, False, "triton", "flash for full rows, triton for padded and packed ones"),
        ((9, 0), {"dropout": 0.0}, False, False, "sdpa", "flash for full rows, varlen for padded and packed ones"),
        ((9, 0), {"head_dim": 160}, False, False, "sdpa", "flash for full rows, a mask for padded and packed ones"),
        ((9, 0), {"dtype": torch.float32}, False, False, "sdpa", "works on every GPU"),
        ((7, 0), {"dtype": torch.float16}, False, False, "sdpa", "works on every GPU"),
        ((9, 0), {"window": 64}, False, True, "triton", "skips pairs outside the window"),
        ((9, 0), {"window": 64, "dropout": 0.0}, False, True, "sdpa", "varlen for local layers"),
        ((7, 0), {"window": 64, "dtype": torch.float16}, False, True, "sdpa", "a mask for local layers"),
    ],
)
def test_auto_chooses_on_gpus(capability, changes, in_logits, full, backend, why, machine):
    machine(capability)
    chosen, reason = resolve_backend("auto", demand(**changes), in_logits, full)
    assert chosen == backend and why in reason


def test_the_machine_is_searched_once_and_not_by_every_layer_and_auto_takes_sdpa_without_triton(monkeypatch):
    searched, found = [], [object()]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: searched.append(name) or found[0])
    for _ in range(3):
        resolve_backend("auto", demand(), True)
        refusal("triton", demand())
    assert searched == ["triton"]
    found[0] = None
    missing_for_triton.cache_clear()
    why = "works on every GPU; triton attention needs the package triton, which torch installs for CUDA"
    assert resolve_backend("auto", demand(), True) == ("sdpa", why)


def attention_of_runs(query, key, value, begins, _, longest, __, *, window_size=(-1, -1)):
    """What `varlen_attn` computes: each run of `[tokens, heads, d]` attends to itself, within the window."""
    assert begins[-1] == len(query) and longest == begins.diff().max()
    place, (left, right) = torch.arange(len(query)), window_size
    run, offset = torch.bucketize(place, begins, right=True), place[:, None] - place
    mask = (run[:, None] == run) & ((offset <= left) | (left < 0)) & ((-offset <= right) | (right < 0))
    vectors = (x.transpose(0, 1) for x in (query, key, value))
    return F.scaled_dot_product_attention(*vectors, attn_mask=mask).transpose(0, 1)


def test_whether_runs_are_read_follows_the_hidden_states_also_where_weights_are_fp32(monkeypatch):
    """At ZeRO 0 layers compute in bf16 with fp32 weights; a graph holds no runs, whose number differs."""
    monkeypatch.setattr(backends, "is_nvidia", lambda device: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    model = tiny_model(position_encoding="rope", attention_dropout=0.0, hidden_size=24).float()
    attention, hidden = model.layers[0].attention, torch.zeros(1, 8, 24)
    layout = SimpleNamespace(causal=False, full=False)
    attention.backend = "sdpa"
    assert attention.query.weight.dtype == torch.float32
    assert attention.reads_runs(hidden.bfloat16(), layout) and not attention.reads_runs(hidden, layout)


@pytest.mark.parametrize("document_ids", [[[1] * 7, [1] * 4 + [0] * 3, [0] * 7], [[1, 1, 2, 2, 2, 3, 0]]], ids=len)
@pytest.mark.parametrize("window, causal", [(None, False), (0, False), (2, False), (None, True), (2, True)])
def test_varlen_attention_is_that_of_the_mask(document_ids, window, causal, monkeypatch):
    module = SimpleNamespace(varlen_attn=attention_of_runs)
    monkeypatch.setattr(attention, "varlen", module, raising=False)
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", module)
    monkeypatch.setattr(backends, "why_not_varlen", lambda demand: None)
    ids = torch.tensor(document_ids)
    nothing = torch.zeros_like(ids)
    layout = layout_of(Batch(ids, nothing - 100, ids, nothing, nothing, nothing))
    attending = make_case(document_ids, 0, 0).attending()._replace(layout=layout, window=window, causal=causal)
    (context, _), (expected, _) = sdpa_attention(attending), eager_attention(attending)
    valid = (ids > 0)[:, None, :, None]
    torch.testing.assert_close(context * valid, expected * valid)


def test_full_causal_rows_need_no_mask(monkeypatch):
    called = []
    fused = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *x, **o: (called.append(o), fused(*x, **o))[1])
    full = make_case([[1] * 7], 0, 0, causal=True).attending()._replace(layout=SimpleNamespace(full=True))
    for attending in (full, full._replace(window=2), make_case([[1] * 7], -1, 1, "q", causal=True).attending()):
        torch.testing.assert_close(sdpa_attention(attending)[0], eager_attention(attending)[0])
    given = [(options["is_causal"], options["attn_mask"] is None) for options in called]
    assert given == [(True, True), (False, False), (False, False)]


@pytest.mark.parametrize("rate", [0.1, 0.5])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_share_is_dropped_and_the_rest_rescaled_and_the_cosine_of_logits_knows_no_dropout(backend, rate):
    torch.manual_seed(0)
    zeros = torch.zeros(4, 4, 32, 32)
    identity = torch.eye(32).expand(4, 4, 32, 32)  # the context is then the probabilities, 1/32 before dropout
    ids, none = torch.ones(4, 32, dtype=torch.long), torch.empty(0, dtype=torch.long)
    context, _ = BACKENDS[backend](Attending(zeros, zeros, identity, PositionTerms(1.0), ids, none, rate))
    dropped = context == 0
    torch.testing.assert_close(context[~dropped], torch.full_like(context[~dropped], 1 / 32 / (1 - rate)))
    count = dropped.numel()
    assert abs(dropped.sum().item() - rate * count) < 5 * (count * rate * (1 - rate)) ** 0.5
    for left, right in ((dropped[0], dropped[1]), (dropped[:, 0], dropped[:, 1]), (dropped[..., 0], dropped[..., 1])):
        assert not torch.equal(left, right)  # rows, heads and keys draw their own
    query, key, value = (torch.randn(2, 3, 5, 4, dtype=torch.float64) for _ in range(3))
    ids, heads = torch.ones(2, 5, dtype=torch.long), torch.tensor([0, 2])
    compared = (Attending(query, key, value, PositionTerms(0.5), ids, heads, share) for share in (0.0, rate))
    assert torch.equal(*(BACKENDS[backend](attending)[1] for attending in compared))
    for share in (0.9999, 0.99999, 0.9999999):  # a rate just below one keeps almost nothing
        assert blocks._draw_kept(torch.empty(100_000), share).float().mean() < 5e-4


@pytest.mark.parametrize("heads", [[], [0, 1]], ids=str)
@pytest.mark.parametrize("backend, kept_length", [*((name, 512) for name in BACKENDS), ("blocked", 0)])
def test_the_gradient_is_that_of_the_mask_drawn_in_the_forward_pass(backend, kept_length, heads, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_ELEMENTS", 1)
    monkeypatch.setattr(blocks, "KEPT_LENGTH", kept_length)
    torch.manual_seed(0)
    ids = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    inputs = [torch.randn(2, 2, 4, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    table = torch.randn(1, 5, 3, dtype=torch.float64, requires_grad=True)

    def attend(query, key, value, table):
        torch.manual_seed(7)  # finite differences must meet the same mask
        terms = PositionTerms(0.5, query_table=table, lowest=-2, highest=2)
        context, cosine = BACKENDS[backend](Attending(query, key, value, terms, ids, torch.tensor(heads).long(), 0.4))
        context = context * (ids > 0)[:, None, :, None]
        return context if cosine is None else (context, cosine)

    assert torch.autograd.gradcheck(attend, (*inputs, table))


@pytest.mark.parametrize("encoding", ["deberta", "deberta-v2"])
def test_dropout_acts_on_debertas_table_in_every_layer_and_in_training_alone(encoding):
    model = tiny_model(position_encoding=encoding, hidden_dropout=0.25, seq_length=64, relative_distance=32)
    shared = model.embeddings.position(torch.zeros(1, 64, dtype=torch.long))
    identity = torch.nn.Identity()  # so that both projections of the table are the table

    def projected(layer):
        part = layer.layer_position
        part.key = part.query = identity  # version 1; version 2 is given the maps
        found = [x.transpose(0, 1).flatten(1) for x in part.of_layer(shared, identity, identity)[:2]]
        assert torch.equal(*found)
        return found[0]

    for layer in model.layers:
        dropped = projected(layer)
        torch.testing.assert_close(dropped, torch.where(dropped == 0, 0, shared[0] * 4 / 3))
        assert 0.15 < (dropped == 0).double().mean() < 0.35
        assert not torch.equal(projected(layer), dropped)
        layer.eval()
        assert torch.equal(projected(layer), shared[0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("which", ["hidden_dropout", "attention_dropout"])
def test_dropout_acts_in_training_and_not_in_evaluation_and_a_seed_repeats_it(which, backend):
    batch = tiny_batch()
    draws, plain = some_draws(batch), tiny_model(attention_backend=backend)
    dropping, results = tiny_model(attention_backend=backend, **{which: 0.5}), []
    with torch.no_grad():
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            results.append(dropping(batch, draws).sums)
        assert torch.equal(results[0], results[1]) and not torch.allclose(results[0], results[2])
        assert torch.equal(dropping.eval()(batch, draws).sums, plain(batch, draws).sums)


CUDA_13 = "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120"


@pytest.fixture
def host(monkeypatch):
    """Return a function that sets the compute capability of each GPU, and what torch was built for."""

    def show(capabilities, built=CUDA_13):
        def capability(device):
            return capabilities[torch.device(device).index or 0]

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100")
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: built.split())

    return show


CODE = [
    *(("sm_70", (7, 0), True), (CUDA_13, (7, 0), False), (CUDA_13, (12, 1), True), (CUDA_13, (11, 0), False)),
    *((CUDA_13, (8, 9), True), ("sm_86", (8, 0), False), ("sm_90", (10, 0), False)),  # the first by sm_80 and sm_86
    *(("compute_70 sm_75", (12, 0), True), ("compute_80", (7, 5), False), ("sm_90a", (9, 0), True)),
    *(("compute_90a", (10, 0), False), ("sm_100a", (10, 3), False), ("sm_100f", (10, 3), True)),
    *(("compute_100f", (12, 0), False), ("", (7, 0), True)),  # of the last one torch does not say
]


def test_code_runs_on_the_gpus_that_nvidia_says(host):
    for built, capability, runs in CODE:
        host([capability], built)
        assert (missing_code(torch.device("cuda")) is None) == runs, (built, capability)


TAKERS = [
    *((own_device, 0), (device_of, 0), (named_device,), (named_device, "cuda", "--device cuda")),
    *((load_encoder, "nowhere"), (partial(load_encoder, device="cuda:0"), "nowhere"), (PresentDevice, 100)),
]


@pytest.mark.parametrize("take", TAKERS)
def test_every_command_refuses_a_gpu_without_code_before_it_computes(host, take):
    host([(7, 0)])
    assert str(refused("", *take)) == (
        f"Tesla V100 has compute capability 7.0, and torch {torch.__version__} has code for "
        f"{CUDA_13.replace(' ', ', ')} only: pip install torch==2.13.0+cu126 --index-url "
        "https://download.pytorch.org/whl/cu126, or set CUDA_VISIBLE_DEVICES= to use the CPU"
    )


def test_a_new_gpu_needs_a_newer_build_one_rank_speaks_for_its_host_and_a_dry_run_tells(host, capsys):
    host([(12, 0)], "sm_70 sm_90")
    refused("code for sm_70, sm_90 only: pip install --upgrade torch, or set", named_device)
    for capabilities, agreed in ([(7, 0), (7, 0)], True), ([(8, 0), (7, 0)], False):
        host(capabilities)
        assert refused("", own_device, 1).agreed == agreed
    host([(7, 0)])
    dry_run(Config().replace(model={"vocab_size": 100, "num_layers": 1, "hidden_size": 8, "num_attention_heads": 2}))
    assert capsys.readouterr().out.startswith("warning: a run on this machine would be refused: Tesla V100 has compute")


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
        asked = demand(device, dtype, dropout, head_dim)
        reason = triton_attention.why_not_triton(asked)
        assert (reason is None) == (expected is None), (reason, expected)
        assert expected is None or (re.search(expected, reason) and "\n" not in reason), reason
    assert resolve_backend("auto", asked, True)[0] != "triton"
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
"""Shipped kernels that the suite compiles; `python benchmarks/kernels.py --write` compiles all."""


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
    """Kernels spill that are held to 128 registers, so that two programs run at a time, where HCD or packed rows add to
    them, and kernels at the limit of 255. The bounds of DDRP are the counts of full rows that make attention with
    learned offsets as fast as attention without them. Matrices are multiplied by the fastest instruction."""
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


def variant(kernel, arguments, constants):
    """Return what Triton compiles a kernel anew for: constants, and of arguments types, alignment, and which are 1."""
    found = [repr(constants)]
    for parameter, value in zip(kernel.params, arguments, strict=False):
        number = value.data_ptr() if isinstance(value, torch.Tensor) else value if type(value) is int else None
        is_read = number is not None and not parameter.do_not_specialize
        aligned = is_read and not parameter.do_not_specialize_on_alignment and number % 16 == 0
        found.append((getattr(value, "dtype", type(value)), aligned, is_read and number == 1))
    return tuple(found)


@pytest.fixture
def variants(monkeypatch):
    """Return the variants of each kernel that Triton would compile for an H100 that is not there."""
    found = defaultdict(set)

    def note(kernel, _, arguments, constants):
        found[kernel.fn.__name__].add(variant(kernel, arguments, constants))

    monkeypatch.setattr(triton_attention, "launch", note)
    monkeypatch.setattr(triton_attention, "why_not_triton", lambda *_: None)
    monkeypatch.setattr(triton_attention, "capability_of", lambda _: (9, 0))
    return found


def attend(encoding, rows, seq, documents, dropout, layer):
    """Launch the kernels of one layer's attention, forward and backward."""
    sizes = {"hidden_size": HEADS * 64, "num_attention_heads": HEADS, "num_layers": 1, "seq_length": LONGEST}
    config = ModelConfig(position_encoding=encoding, **sizes)
    module = encoding_class(encoding)(config)
    terms = module.terms(config, module(torch.arange(seq)[None]))
    states = [torch.zeros(rows, seq, HEADS, 64, dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    heads = (torch.arange(LAYERS * COMPARED) % HEADS).view(LAYERS, COMPARED)[layer]
    ids, counted = torch.ones(rows, seq, dtype=torch.long), torch.ones(rows, documents)
    attending = Attending(*(x.transpose(1, 2) for x in states), terms, ids, heads, dropout, counted)
    context, cosine = triton_attention.triton_attention(attending)
    assert cosine is not None
    (context.sum() + cosine).backward()


@needs_triton
@pytest.mark.parametrize(("encoding", "most"), {"ddrp": 2, "absolute": 1, "alibi": 512 // LENGTHS}.items())
def test_the_variants_of_a_kernel_over_padded_packed_and_full_rows(encoding, most, variants):
    for number, (rows, seq, documents) in enumerate(PADDED + PACKED + FULL):
        attend(encoding, rows, seq, documents, 0.1, number % LAYERS)
    assert len(variants.pop("rows_kernel")) == 1  # it reads no offsets
    assert len(variants) >= 3 and {len(found) for found in variants.values()} == {most}


@needs_triton
def test_the_least_dropout_is_no_constant(variants):
    """A constant 1 would not compile."""
    for dropout in (1e-5, 1e-9, 0.1):
        attend("ddrp", 2, 64, 1, dropout, 0)
    assert len(variants) >= 3 and {len(found) for found in variants.values()} == {1}


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
