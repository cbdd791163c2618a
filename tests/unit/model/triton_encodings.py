"""Every encoding's terms in the Triton kernels at every length, and the kernels in CUDA graphs: run by
test_triton_encodings.py under Triton's interpreter."""

from itertools import combinations

import pytest
import torch

from megatron_ddrp.config import ModelConfig, encoding_class
from megatron_ddrp.config.registry import ENCODINGS
from megatron_ddrp.model import graphs
from megatron_ddrp.model.attention.gpu import triton_attention as plan
from megatron_ddrp.model.attention.gpu.triton_attention import Tile, Tiles, triton_attention
from tests.unit.model.attention_cases import answer, make_case, reference
from tests.unit.model.test_graphs import PADDED, assert_equal_with_graphs, config_of

pytest_plugins = ["tests.unit.model.triton_interpreter"]

TILE = 256
LENGTHS = (1, 17, TILE - 1, TILE, TILE + 1, 2 * TILE + 1)
HEAD_SIZES = (64, 80, 96, 128)
LAYOUTS = {
    "whole": lambda seq: [1] * seq,
    "left padding": lambda seq: [0] * (seq // 3) + [1] * (seq - seq // 3),
    "packed": lambda seq: [1] * (seq - seq // 2) + [2] * (seq // 3) + [0] * (seq // 2 - seq // 3),
}


def terms_of(encoding, seq, head_dim):
    """The terms of one head of an encoding, for a row of `seq` tokens."""
    config = ModelConfig(
        position_encoding=encoding, num_layers=1, hidden_size=head_dim, num_attention_heads=1, seq_length=max(3, seq)
    )
    positions = encoding_class(encoding)(config)
    maps = [torch.nn.Linear(head_dim, head_dim) for _ in range(2)]
    tensors = positions.layer_part(config).of_layer(positions(torch.arange(seq)[None]), *maps)
    return positions.terms(config, tensors)


def kernels_of(encoding):
    """Return the terms of an encoding and their shapes; encodings that agree in them are the same to the kernels."""
    terms = terms_of(encoding, 17, 64).by_offset
    return terms.lowest, terms.highest, *(None if x is None else x.shape for x in terms.tensors)


DISTINCT = list({kernels_of(name): name for name in reversed(ENCODINGS)}.values())
"""The first encoding of each group that is the same to the kernels."""


def pairwise():
    """(encoding, length, head size, layout): every encoding at every length, the rest in turns."""
    for i, encoding in enumerate(DISTINCT):
        for j, seq in enumerate(LENGTHS):
            yield encoding, seq, HEAD_SIZES[(i + j) % 4], tuple(LAYOUTS)[(i + j // 2) % 3]


def test_every_two_values_meet():
    met = {(a, b, *pair) for row in pairwise() for (a, b) in combinations(range(4), 2) for pair in [(row[a], row[b])]}
    values = (tuple(DISTINCT), LENGTHS, HEAD_SIZES, tuple(LAYOUTS))
    wanted = {(a, b, x, y) for a, b in combinations(range(4), 2) for x in values[a] for y in values[b]}
    assert met == wanted, sorted(wanted - met, key=str)
    assert {kernels_of(name) for name in DISTINCT} == {kernels_of(name) for name in ENCODINGS}


@pytest.mark.parametrize("encoding, seq, head_dim, layout", pairwise())
def test_every_encoding_at_every_length(encoding, seq, head_dim, layout, monkeypatch):
    """Each encoding's own terms, with random numbers in them, against eager attention in float64."""
    monkeypatch.setattr(plan, "tiles", lambda *_: Tiles(*(Tile(TILE, TILE, 4, 1),) * 4))
    terms = terms_of(encoding, seq, head_dim)
    case = make_case([LAYOUTS[layout](seq)], 0, 0, head_dim=head_dim)
    generator = torch.Generator().manual_seed(seq)
    case.terms = terms.map(lambda x, _: torch.randn(x.shape, generator=generator).requires_grad_())
    got, expected = answer(case, triton_attention), reference(case)
    for x, y in zip((got[0], *got[1]), (expected[0], *expected[1]), strict=True):
        torch.testing.assert_close(x.double(), y, rtol=0, atol=1e-5 * max(1.0, y.abs().max().item()))


@pytest.mark.parametrize("encoding", ["ddrp", "tupe-a"])
def test_graphs_repeat_the_kernels_to_the_last_bit(encoding, monkeypatch):
    """On the emulator of graphs, which notes launches too."""
    monkeypatch.setattr(graphs, "WARM_UP", 0)
    config = config_of(encoding, attention_backend="triton", num_layers=1)
    assert_equal_with_graphs(config, [PADDED[1:]] * 4, [1])
