"""Tiles of query rows against whole matrices: every offset range, tile size and source of position terms."""

from __future__ import annotations

import pytest
import torch

from megatron_ddrp.model import blocked
from megatron_ddrp.model.attention import eager_attention
from megatron_ddrp.model.positions.contract import PositionTerms
from megatron_ddrp.model.relative import BandTile, spread_values

HEADS, DIM = 3, 4


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("lowest, highest", [(-2, 2), (-4, 3), (0, 0), (-9, 9), (-20, 19)])
@pytest.mark.parametrize("num_keys, start, rows", [(1, 0, 1), (7, 0, 3), (7, 3, 3), (7, 6, 1), (16, 8, 8), (16, 5, 2)])
def test_a_tile_adds_the_rows_that_spreading_gives(lowest, highest, num_keys, start, rows):
    torch.manual_seed(0)
    num_relative = highest - lowest + 1
    per_query, per_key = (torch.randn(2, num_keys, num_relative, dtype=torch.float64) for _ in range(2))  # by offset
    padded = torch.nn.functional.pad(per_key.flip(-1), (0, 0, highest, -lowest))
    tile = BandTile(start, rows, num_keys, lowest, highest, per_query.device)
    logits = torch.zeros(2, rows, num_keys, dtype=torch.float64)
    here = slice(start, start + rows)
    tile.add(logits, per_query.flip(-1)[:, here], padded)
    by_key = spread_values(per_key.flip(-1), -lowest).transpose(-1, -2)
    torch.testing.assert_close(logits, (spread_values(per_query, highest) + by_key)[:, here], rtol=0, atol=1e-13)

    # The adjoint: <add(q, k), w> = <q, collect(w)> + <k, collect(w)>.
    weight = torch.randn_like(logits)
    key_gradient = torch.zeros_like(padded)
    query_gradient = tile.collect(weight, key_gradient, wants_query=True)
    pairs = (per_query.flip(-1)[:, here] * query_gradient).sum() + (padded * key_gradient).sum()
    torch.testing.assert_close((logits * weight).sum(), pairs, rtol=0, atol=1e-11)


@pytest.mark.parametrize("tile_rows", [1, 3, 5])
@pytest.mark.parametrize("num_heads_of_hcd", [0, 2, 3])
@pytest.mark.parametrize("table_heads", [1, HEADS])
def test_tiled_attention_equals_eager(monkeypatch, tile_rows, num_heads_of_hcd, table_heads):
    torch.manual_seed(1)
    monkeypatch.setattr(blocked, "TILE_ELEMENTS", 1)
    monkeypatch.setattr(blocked, "SMALLEST_TILE", tile_rows)
    monkeypatch.setattr(blocked, "BLOCK_ELEMENTS", 1)
    document_ids = torch.tensor([[1, 1, 1, 1, 2, 2, 2, 0, 0], [1] * 9])
    query, key, value = (random(2, 9, HEADS, DIM).transpose(1, 2) for _ in range(3))
    tables = [random(table_heads, 6, DIM) for _ in range(2)]
    bias = random(1, HEADS, 9, 9)
    terms = PositionTerms(0.5, *tables, bias, lowest=-3, highest=2)
    heads = torch.arange(num_heads_of_hcd)
    inputs = [query, key, value, *tables, bias]

    def run(attend):
        context, cosine = attend(query, key, value, terms, document_ids, heads, 0.0, 2)
        loss = (context * (document_ids > 0)[:, None, :, None]).sin().sum()
        if cosine is not None:
            loss = loss + (cosine * torch.tensor([[1.0, 2.0], [3.0, 0.0]])).sum()  # row 1 has one document only
        return loss, torch.autograd.grad(loss, inputs)

    loss, gradients = run(blocked.blocked_attention)
    expected_loss, expected = run(eager_attention)
    torch.testing.assert_close(loss, expected_loss, rtol=0, atol=1e-11)
    for got, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-11)
