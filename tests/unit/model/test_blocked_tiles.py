"""Tiles of query rows against whole matrices: every offset range, tile size and source of position terms."""

from __future__ import annotations

import pytest
import torch

from megatron_ddrp.model.attention import cpu as blocks
from megatron_ddrp.model.attention.backends import eager_attention
from megatron_ddrp.model.attention.cpu import blocked_attention
from megatron_ddrp.model.attention.logits import Attending
from megatron_ddrp.model.positions.contract import PositionTerms
from tests.reference.tensors import random

HEADS, DIM = 4, 4


@pytest.mark.parametrize("lowest, highest", [(-2, 2), (-4, 3), (0, 0), (-9, 9), (-20, 19)])
@pytest.mark.parametrize(
    "num_keys, tile_rows, window",
    [
        *((1, 1, None), (7, 3, None), (7, 1, None), (16, 8, None), (16, 2, None), (16, 5, None), (40, 5, None)),
        *((40, 40, None), (40, 5, 7), (40, 16, 3)),
    ],
)
def test_every_range_of_offsets_is_served_in_tiles_of_every_size(
    monkeypatch, lowest, highest, num_keys, tile_rows, window
):
    torch.manual_seed(0)
    monkeypatch.setattr(blocks, "TILE_ELEMENTS", 1)
    monkeypatch.setattr(blocks, "SMALLEST_TILE", tile_rows)
    inputs = [random(2, HEADS, num_keys, DIM) for _ in range(3)]
    rows = highest - lowest + 1
    tables = [random(HEADS, rows, DIM), random(1, rows, DIM), None]
    terms = PositionTerms(0.5, *tables, lowest=lowest, highest=highest, offset_bias=random(HEADS, rows))
    document_ids = torch.ones(2, num_keys, dtype=torch.long)
    weight = torch.randn(2, HEADS, num_keys, DIM, dtype=torch.float64)
    learned = [*inputs, *(x for x in terms.tensors if x is not None)]
    answers = []
    for attend in (blocked_attention, eager_attention):
        context, cosine = attend(Attending(*inputs, terms, document_ids, torch.arange(2), window=window))
        loss = (context * weight).sum() + (cosine.sum() if num_keys > 1 else 0)
        answers.append((context, cosine, *torch.autograd.grad(loss, learned)))
    for got, expected in zip(*answers, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("tile_rows", [1, 3, 5])
@pytest.mark.parametrize("numbers", [[], [1, 3], [0, 1, 3]], ids=str)
@pytest.mark.parametrize("table_heads", [1, HEADS])
@pytest.mark.parametrize("kept_length", [0, 9], ids=["computed again", "kept"])
@pytest.mark.parametrize("window", [None, 2])
def test_tiled_attention_equals_eager(monkeypatch, tile_rows, numbers, table_heads, kept_length, window):
    torch.manual_seed(1)
    monkeypatch.setattr(blocks, "KEPT_LENGTH", kept_length)
    monkeypatch.setattr(blocks, "TILE_ELEMENTS", 1)
    monkeypatch.setattr(blocks, "SMALLEST_TILE", tile_rows)
    monkeypatch.setattr(blocks, "BLOCK_ELEMENTS", 1)
    document_ids = torch.tensor([[1, 1, 1, 1, 2, 2, 2, 0, 0], [1] * 9])
    query, key, value = (random(2, 9, HEADS, DIM).transpose(1, 2) for _ in range(3))
    tables = [random(table_heads, 6, DIM) for _ in range(2)]
    bias, offset_bias = random(1, HEADS, 9, 9), random(table_heads, 6)
    terms = PositionTerms(0.5, *tables, bias, lowest=-3, highest=2, offset_bias=offset_bias)
    heads = torch.tensor(numbers, dtype=torch.long)
    inputs = [query, key, value, *tables, bias, offset_bias]

    def run(attend):
        counted = torch.tensor([[1.0, 2.0], [3.0, 0.0]])  # row 1 has one document only
        context, cosine = attend(Attending(query, key, value, terms, document_ids, heads, 0.0, counted, window=window))
        loss = (context * (document_ids > 0)[:, None, :, None]).sin().sum()
        if cosine is not None:
            loss = loss + cosine
        return loss, torch.autograd.grad(loss, inputs)

    loss, gradients = run(blocked_attention)
    expected_loss, expected = run(eager_attention)
    torch.testing.assert_close(loss, expected_loss, rtol=0, atol=1e-11)
    for got, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-11)


def test_keys_out_of_reach_are_neither_read_nor_kept():
    length, window, rows = 400, 20, blocks.SMALLEST_TILE
    query, key, value = (random(1, HEADS, length, DIM) for _ in range(3))
    kept = []
    with torch.no_grad():
        key[:, :, 200:], value[:, :, 200:] = torch.nan, torch.nan
    attending = Attending(
        query, key, value, PositionTerms(0.5), torch.ones(1, length, dtype=torch.long), torch.arange(0), window=window
    )
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()), lambda _: None):
        context, _ = blocked_attention(attending)
    assert context[:, :, : 200 - rows - window].isfinite().all() and context[:, :, 200:].isnan().all()
    inputs = 3 * HEADS * length * DIM + length
    assert sum(kept) - inputs <= HEADS * length * (rows + 2 * window) < HEADS * length**2 // 5


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_second_backward_pass_finds_what_the_first_one_used(dropout):
    torch.manual_seed(2)
    document_ids, heads = torch.tensor([[1, 1, 1, 1, 2, 2, 2, 0, 0], [1] * 9]), torch.tensor([0, 2])
    query, key, value = (random(2, 9, HEADS, DIM).transpose(1, 2) for _ in range(3))
    tables = [random(1, 6, DIM) for _ in range(2)]
    terms = PositionTerms(0.5, *tables, lowest=-3, highest=2)
    inputs = [query, key, value, *tables]
    context, cosine = blocked_attention(
        Attending(query, key, value, terms, document_ids, heads, dropout, torch.ones(2, 2))
    )
    loss = context.sin().sum() + cosine
    once, again = (torch.autograd.grad(loss, inputs, retain_graph=True) for _ in range(2))
    for first, second in zip(once, again, strict=True):
        torch.testing.assert_close(second, first, rtol=0, atol=1e-12)


def test_hcd_keeps_no_pairs_of_its_own():
    length = 40
    document_ids = torch.ones(2, length, dtype=torch.long)
    inputs = [random(2, HEADS, length, DIM) for _ in range(3)]
    terms = PositionTerms(0.5, random(1, 6, DIM), random(1, 6, DIM), lowest=-3, highest=2)

    def kept(*numbers: int) -> int:
        sizes: list[int] = []
        heads = torch.tensor(numbers, dtype=torch.long)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()), lambda _: None):
            blocked_attention(Attending(*inputs, terms, document_ids, heads))
        return sum(sizes)

    assert kept() > 2 * HEADS * length**2
    assert kept(0, 2) < kept() + length**2 / 2


def test_training_goes_on_after_scoring_in_inference_mode():
    document_ids, heads = torch.ones(1, 9, dtype=torch.long), torch.tensor([0, 2])
    inputs = [random(1, HEADS, 9, DIM) for _ in range(3)]
    tables = [random(1, 6, DIM) for _ in range(2)]

    def run():
        terms = PositionTerms(0.5, *tables, lowest=-3, highest=2)
        context, cosine = blocked_attention(Attending(*inputs, terms, document_ids, heads))
        return context.sum() + cosine.sum()

    with torch.inference_mode():
        scored = run()
    assert torch.equal(run(), scored)
    assert all(x.isfinite().all() for x in torch.autograd.grad(run(), [*inputs, *tables]))


@pytest.mark.parametrize("kept_length, pairs", [(8, 0), (9, 2 * HEADS * 9 * 9)])
def test_pairs_wait_for_the_backward_pass_up_to_a_length_only(monkeypatch, kept_length, pairs):
    monkeypatch.setattr(blocks, "KEPT_LENGTH", kept_length)
    inputs = [random(2, HEADS, 9, DIM) for _ in range(3)]
    ids, none = torch.ones(2, 9, dtype=torch.long), torch.empty(0, dtype=torch.long)
    saved = []

    def run():
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
            blocked_attention(Attending(*inputs, PositionTerms(0.5), ids, none))

    run()
    assert sum(x.numel() for x in saved if x.shape[-1] == 9 and x.is_floating_point()) == pairs
    with torch.no_grad():
        saved.clear()
        run()
    assert not saved
