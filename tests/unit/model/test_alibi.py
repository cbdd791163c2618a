"""ALiBi, symmetric: the slopes by hand, the bias at lengths beyond the trained one and in every precision.

The tests over the registry compare logits, losses and gradients with `twin`, packed and not, and over ranks.
"""

import math

import pytest
import torch

from megatron_ddrp.arguments import parse_arguments
from megatron_ddrp.config import ModelConfig
from megatron_ddrp.errors import UserError
from megatron_ddrp.model.attention.backends import BACKENDS, attend_from
from megatron_ddrp.model.attention.logits import Attending
from megatron_ddrp.model.positions.biases import Alibi, slopes
from tests.reference.positions import absolute_scores, dot
from tests.unit.model.tiny import encode, some_draws, tiny_batch, tiny_config, tiny_model

PARAMETERS: dict[str, list[int]] = {}
"""Position parameters of a tiny model → shape."""

NONE = torch.empty(0, dtype=torch.long)


def twin_slopes(heads):
    """The slopes of `heads` heads: the rule for powers of two, and its mixture for others."""
    power = 2 ** math.floor(math.log2(heads))
    if power == heads:
        return [2 ** (-8 * (head + 1) / heads) for head in range(heads)]
    return twin_slopes(power) + twin_slopes(2 * power)[0::2][: heads - power]


def twin(_encoding, _layer_part, positions):
    """A[h,i,j] = Q_i·K_j / sqrt(d) − m_h·|i − j| as a function of query and key `[heads, S, d]`."""

    def scores(query, key):
        pairs = [
            dot(query[h, a], key[h, b]) / math.sqrt(query.shape[-1]) - slope * abs(i - j)
            for h, slope in enumerate(twin_slopes(len(query)))
            for a, i in enumerate(positions)
            for b, j in enumerate(positions)
        ]
        return torch.stack(pairs).reshape(len(query), len(positions), len(positions))

    return scores


compared = absolute_scores
"""The logits that HCD compares: without the bias."""


def test_the_twins_slopes_by_hand():
    assert twin_slopes(2) == [2**-4, 2**-8] and twin_slopes(8) == [2**-k for k in range(1, 9)]
    rest = [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]
    assert twin_slopes(12) == pytest.approx([2**-k for k in range(1, 9)] + rest, rel=1e-15)


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 5, 6, 12, 16, 20, 25])
def test_slopes_equal_the_twins_for_whole_models_and_for_parts(heads):
    got = slopes(torch.arange(heads), heads)
    torch.testing.assert_close(got, torch.tensor(twin_slopes(heads), dtype=torch.float64), rtol=1e-14, atol=0)
    part = slopes(torch.arange(heads // 2, heads), heads)
    assert torch.equal(part.float(), got[heads // 2 :].float())


def test_the_bias_is_exact_at_any_length_and_in_every_precision_of_the_model():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        encoding = Alibi(ModelConfig(position_encoding="alibi", num_attention_heads=8, seq_length=16)).to(dtype)
        (bias,) = encoding(torch.zeros(2, 700, dtype=torch.long))
        offset = torch.arange(-699, 700)
        exact = torch.stack([-slope * offset.abs().double() for slope in twin_slopes(8)])
        assert bias.dtype == torch.float32 and torch.equal(bias.double(), exact)


@pytest.mark.parametrize("backend", [*BACKENDS, "attend_from"])
def test_every_backend_takes_the_wide_bias_with_narrow_queries(backend):
    torch.manual_seed(0)
    config = tiny_config(position_encoding="alibi", num_attention_heads=4, hidden_size=16)
    encoding, ids = Alibi(config), torch.ones(1, 300, dtype=torch.long)
    terms = encoding.terms(config, encoding(ids))
    query, key, value = (torch.randn(1, 4, 300, 4).bfloat16() for _ in range(3))
    wide = Attending(query.double(), key.double(), value.double(), terms, ids, NONE)
    expected, _ = BACKENDS["eager"](wide)
    if backend == "attend_from":
        got = attend_from(query, key, value, terms, torch.arange(300)[None], ids, 0.0)
    else:
        got, _ = BACKENDS[backend](Attending(query, key, value, terms, ids, NONE))
    assert got.dtype == torch.bfloat16
    assert (got.double() - expected).norm() < 1e-2 * expected.norm()


def test_hcd_does_not_see_the_bias():
    """Equal heads have the cosine 1 however their slopes differ."""
    model, batch = tiny_model(position_encoding="alibi"), tiny_batch(lengths=(7,))
    for layer in model.layers:
        for each in (layer.attention.query, layer.attention.key):
            with torch.no_grad():
                each.weight.copy_(each.weight[:4].repeat(3, 1))
                each.bias.copy_(each.bias[:4].repeat(3))
    cosines = model(batch, some_draws(batch)).sums[2]
    torch.testing.assert_close(cosines, torch.ones_like(cosines), rtol=0, atol=1e-12)


def test_nothing_is_learned_or_stored_and_a_longer_row_goes_on():
    model = tiny_model(position_encoding="alibi", seq_length=5)
    assert not [name for name in model.state_dict() if "position" in name]
    assert encode(model, tiny_batch(lengths=(7,))).isfinite().all()


def test_a_distance_is_refused():
    with pytest.raises(UserError, match="^--relative-distance 64 with --position-encoding alibi, .*: leave the dist"):
        parse_arguments(["--position-encoding", "alibi", "--relative-distance", "64"])
