"""How often Triton compiles each attention kernel over the rows of a run, by its own dispatch on an absent device."""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron_ddrp.config import ModelConfig, encoding_class
from megatron_ddrp.data.batches.loader import ROW_MULTIPLE
from megatron_ddrp.model.attention.gpu import triton_attention
from megatron_ddrp.model.attention.gpu.triton_attention import LENGTHS
from megatron_ddrp.model.attention.logits import Attending
from tests.absent_gpu import triton_without_gpu

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

LONGEST = 512
HEADS, LAYERS, COMPARED = 12, 5, 3
STEP = ROW_MULTIPLE["cuda"]
PADDED = [(1 + seq % 3, seq, 1) for seq in (*range(STEP, 161, STEP), 320, LONGEST)]
PACKED = [(rows, LONGEST, documents) for rows, documents in ((1, 16), (16, 1), (5, 7), (3, 17))]
FULL = [(8, LONGEST, 1)]
"""Rows, tokens per row and documents per row of micro-batches."""


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, list[Any]]]:
    """Kernel → the signatures that Triton compiled."""
    found: dict[str, list[Any]] = defaultdict(list)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with triton_without_gpu(lambda name, signature: found[name].append(signature)):
        yield found


def attend(encoding: str, rows: int, seq: int, documents: int, dropout: float, layer: int) -> None:
    """Launch the kernels of one layer's attention, forward and backward."""
    config = ModelConfig(
        position_encoding=encoding, hidden_size=HEADS * 64, num_attention_heads=HEADS, num_layers=1, seq_length=LONGEST
    )
    module = encoding_class(encoding)(config)
    terms = module.terms(config, module(torch.arange(seq)[None]))
    query, key, value = (
        torch.zeros(rows, seq, HEADS, 64, dtype=torch.bfloat16).transpose(1, 2).requires_grad_() for _ in range(3)
    )
    heads = torch.arange(LAYERS * COMPARED).view(LAYERS, COMPARED)[layer] % HEADS
    ids, counted = torch.ones(rows, seq, dtype=torch.long), torch.ones(rows, documents)
    context, cosine = triton_attention.triton_attention(
        Attending(query, key, value, terms, ids, heads, dropout, counted)
    )
    assert cosine is not None
    (context.sum() + cosine).backward()


@pytest.mark.parametrize(("encoding", "most"), [("ddrp", 2), ("absolute", 1), ("alibi", LONGEST // LENGTHS)])
def test_the_variants_of_a_kernel_over_padded_packed_and_full_rows(
    encoding: str, most: int, compilations: dict[str, list[Any]]
) -> None:
    for number, (rows, seq, documents) in enumerate(PADDED + PACKED + FULL):
        attend(encoding, rows, seq, documents, 0.1, number % LAYERS)
    assert len(compilations) >= 3 and {len(found) for found in compilations.values()} == {most}


def test_the_least_dropout_is_no_constant(compilations: dict[str, list[Any]]) -> None:
    # As a constant, 1 would fail to compile.
    for dropout in (1e-5, 1e-9, 0.1):
        attend("ddrp", 2, 64, 1, dropout, 0)
    kinds = {signature.get("drop_below", "none") for found in compilations.values() for signature in found}
    assert kinds == {"i32", "none"} and {len(found) for found in compilations.values()} == {1}
