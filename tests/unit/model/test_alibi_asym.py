"""ALiBi with learned slopes for each direction: where they start, which pairs each moves, what does not decay.

The tests over the registry compare logits, losses and gradients with `twin`, packed and not, and over ranks.
"""

import math

import pytest
import torch

from megatron_ddrp.arguments import parse_arguments
from megatron_ddrp.config import ModelConfig
from megatron_ddrp.engine.build import decays
from megatron_ddrp.errors import UserError
from megatron_ddrp.model.positions.biases import Alibi, AlibiAsym
from tests.reference.positions import dot
from tests.unit.model.tiny import tiny_config

PARAMETERS = {"left": [3], "right": [3]}
"""Position parameters of a tiny model → shape."""


def twin(encoding, _layer_part, positions):
    """A[h,i,j] = Q_i·K_j / sqrt(d) − m·|i − j| as a function of query and key `[heads, S, d]`.

    m = log(1 + e^a) is the left slope of the head for j < i, the right one for j > i.
    """

    def scores(query, key):
        pairs = []
        for h in range(len(query)):
            left, right = ((1 + a[h].exp()).log() for a in (encoding.left, encoding.right))
            for a, i in enumerate(positions):
                for b, j in enumerate(positions):
                    content = dot(query[h, a], key[h, b]) / math.sqrt(query.shape[-1])
                    pairs.append(content - (left * (i - j) if j < i else right * (j - i)))
        return torch.stack(pairs).reshape(len(query), len(positions), len(positions))

    return scores


@pytest.mark.parametrize("heads", [4, 12, 16])
def test_it_starts_as_the_symmetric_one(heads):
    places = torch.arange(100)[None]
    config = ModelConfig(position_encoding="alibi-asym", num_attention_heads=heads, hidden_size=192)
    (ours,), (symmetric,) = AlibiAsym(config)(places), Alibi(config)(places)
    assert ours.dtype == torch.float32 and ours.shape == (heads, 199) and ours[:, 99].eq(0).all()
    torch.testing.assert_close(ours, symmetric, rtol=2e-6, atol=0)


@pytest.mark.parametrize("side, sign", [("left", 1), ("right", -1)])
def test_each_slope_moves_its_own_head_and_side_in_proportion_to_the_distance(side, sign):
    encoding, places = AlibiAsym(tiny_config(position_encoding="alibi-asym")).double(), torch.arange(7)[None]
    (before,) = encoding(places)
    slope = getattr(encoding, side)
    with torch.no_grad():
        slope[1] += 0.5
    moved = encoding(places)[0] - before
    offset = torch.arange(-6, 7)
    assert moved[[0, 2]].eq(0).all() and torch.equal(moved[1] != 0, sign * offset > 0)
    far = moved[1][sign * offset > 0] / offset[sign * offset > 0].abs()
    torch.testing.assert_close(far, far[:1].expand(6), rtol=1e-12, atol=0)


def test_half_precision_slopes_give_a_bias_in_fp32():
    encoding = AlibiAsym(tiny_config(position_encoding="alibi-asym")).bfloat16()
    (bias,) = encoding(torch.arange(7)[None])
    bias.sum().backward()
    assert bias.dtype == torch.float32 and encoding.left.grad.dtype == torch.bfloat16


def test_weight_decay_does_not_act_on_slopes():
    for name in ("embeddings.position.left", "layers.1.position.right"):
        assert not decays(name, "alibi-asym")
    assert decays("embeddings.position.relative", "t5")


def test_a_distance_is_refused():
    with pytest.raises(UserError, match="^--relative-distance 64 with --position-encoding alibi-asym, .*: leave the d"):
        parse_arguments(["--position-encoding", "alibi-asym", "--relative-distance", "64"])
