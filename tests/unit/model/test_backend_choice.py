"""Which attention `auto` takes, by device, number format, dropout, encoding and rows; varlen attention's runs."""

import importlib.util
import sys
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.nn import attention

from megatron_ddrp.config import Config
from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.engine.build import choices
from megatron_ddrp.model.attention import backends
from megatron_ddrp.model.attention.backends import eager_attention, refusal, resolve_backend, sdpa_attention
from megatron_ddrp.model.attention.logits import Demand
from megatron_ddrp.model.stages import layout_of
from tests.unit.model.attention_cases import make_case
from tests.unit.model.tiny import tiny_config


def demand(device="cuda", dtype=torch.bfloat16, dropout=0.1, head_dim=64, window=None):
    return Demand(torch.device(device), dtype, dropout, head_dim, window)


def test_auto_chooses_on_cpus_by_encoding_dropout_and_precision():
    for dtype, in_logits, dropout, window, expected in (
        (torch.float32, True, 0.0, None, "blocked"),
        (torch.float32, False, 0.1, None, "blocked"),
        (torch.float32, False, 0.0, None, "sdpa"),
        (torch.float32, False, 0.0, 64, "blocked"),
        (torch.bfloat16, False, 0.0, None, "blocked"),
    ):
        assert resolve_backend("auto", demand("cpu", dtype, dropout, window=window), in_logits)[0] == expected
    assert resolve_backend("eager", demand("cpu"), True) == ("eager", "as asked for")


def test_the_run_names_the_choice_for_local_layers_where_it_is_another():
    whole = tiny_config(position_encoding="rope", hidden_size=24, num_layers=4)
    cpu, local = torch.device("cpu"), {"local_attention": 4}
    assert choices(Config(model=whole), cpu) == (
        "sdpa attention (fastest on CPUs in fp32 without terms in the logits and without dropout), fp32"
    )
    assert choices(Config(model=replace(whole, **local)), cpu).endswith(
        "without dropout), in local layers blocked attention (fastest on CPUs for local layers), fp32"
    )
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


def test_auto_takes_sdpa_without_triton(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert resolve_backend("auto", demand(), True) == (
        "sdpa",
        "works on every GPU; triton attention needs the package triton, which torch installs for CUDA",
    )


def test_the_machine_is_searched_once_and_not_by_every_layer(monkeypatch):
    searched = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: searched.append(name) or object())
    for _ in range(3):
        resolve_backend("auto", demand(), True)
        refusal("triton", demand())
    assert searched == ["triton"]


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
@pytest.mark.parametrize("window", [None, 0, 2])
def test_varlen_attention_is_that_of_the_mask(document_ids, window, monkeypatch):
    module = SimpleNamespace(varlen_attn=attention_of_runs)
    monkeypatch.setattr(attention, "varlen", module, raising=False)
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", module)
    monkeypatch.setattr(backends, "why_not_varlen", lambda demand: None)
    ids = torch.tensor(document_ids)
    nothing = torch.zeros_like(ids)
    layout = layout_of(Batch(ids, nothing - 100, ids, nothing, nothing, nothing))
    attending = make_case(document_ids, 0, 0).attending()._replace(layout=layout, window=window)
    (context, _), (expected, _) = sdpa_attention(attending), eager_attention(attending)
    valid = (ids > 0)[:, None, :, None]
    torch.testing.assert_close(context * valid, expected * valid)
