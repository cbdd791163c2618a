"""Which attention `auto` takes, varlen attention's runs, dropout in every backend, and GPUs that torch has no code for:
they are refused wherever a command takes a device; torch's answers are set."""

import importlib.util
import sys
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn import attention

from megatron_ddrp.commands.dry_run import dry_run
from megatron_ddrp.commands.planning import PresentDevice
from megatron_ddrp.config import Config, ObjectiveConfig
from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.encoders.text_encoder import load_encoder
from megatron_ddrp.engine.build import choices
from megatron_ddrp.model.attention import backends
from megatron_ddrp.model.attention import cpu as blocks
from megatron_ddrp.model.attention.backends import BACKENDS, eager_attention, refusal, resolve_backend, sdpa_attention
from megatron_ddrp.model.attention.cpu import _draw_kept
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
        ((9, 0), {"head_dim": 256}, True, True, "sdpa", "heads up to 128 wide, got 256"),
        ((9, 0), {"dtype": torch.float64}, True, True, "sdpa", "got float64"),
        ((9, 0), {}, False, True, "sdpa", "flash for full rows, triton for padded and packed ones"),
        ((9, 0), {}, False, False, "triton", "flash for full rows, triton for padded and packed ones"),
        ((9, 0), {"dropout": 0.0}, False, False, "sdpa", "flash for full rows, varlen for padded and packed ones"),
        ((9, 0), {"head_dim": 160}, False, False, "sdpa", "flash for full rows, a mask for padded and packed ones"),
        ((9, 0), {"dtype": torch.float32}, False, False, "sdpa", "works on every GPU"),
        ((7, 0), {"dtype": torch.float16}, False, False, "sdpa", "works on every GPU"),
        ((9, 0), {"window": 64}, True, True, "triton", "stores no logits"),
        ((9, 0), {"causal": True}, True, True, "triton", "stores no logits"),
        ((9, 0), {"causal": True}, False, True, "sdpa", "flash for full rows"),
        ((9, 0), {"causal": True}, False, False, "triton", "triton for padded and packed ones"),
        ((9, 0), {"window": 64}, False, True, "triton", "skips pairs outside the window"),
        ((9, 0), {"window": 64, "dropout": 0.0}, False, True, "sdpa", "varlen for local layers"),
        ((8, 0), {"window": 64, "dtype": torch.float32}, False, True, "triton", "skips pairs"),
        ((7, 0), {"window": 64, "dtype": torch.float16}, False, True, "sdpa", "a mask for local layers"),
    ],
)
def test_auto_chooses_on_gpus(capability, changes, in_logits, full, backend, why, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
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
    borders, (left, right) = begins.tolist(), window_size
    assert borders[-1] == len(query) and longest == max(b - a for a, b in pairwise(borders))
    runs = []
    for begin, end in pairwise(borders):
        offset = torch.arange(end - begin)[:, None] - torch.arange(end - begin)
        mask = ((offset <= left) | (left < 0)) & ((-offset <= right) | (right < 0))
        vectors = (x[begin:end].transpose(0, 1) for x in (query, key, value))
        runs.append(F.scaled_dot_product_attention(*vectors, attn_mask=mask).transpose(0, 1))
    return torch.cat(runs)


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
    assert [(given["is_causal"], given["attn_mask"] is None) for given in called] == [
        (True, True),
        *[(False, False)] * 2,
    ]


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
        assert _draw_kept(torch.empty(100_000), share).float().mean() < 5e-4


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
    identity = nn.Identity()  # so that both projections of the table are the table

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
    dropping = tiny_model(attention_backend=backend, **{which: 0.5})
    dropping.load_state_dict(plain.state_dict())
    results = []
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
