"""Rotary positions: the twin judged by complex numbers, ours by transformers; only offsets count, nothing is learned.

The tests over the registry compare logits, losses and gradients with the twin, packed and not.
"""

import pytest
import torch

from megatron_ddrp.arguments import parse_arguments
from megatron_ddrp.config import ModelConfig
from megatron_ddrp.errors import UserError
from megatron_ddrp.model.attention.logits import attention_logits
from megatron_ddrp.model.positions import PositionTerms
from megatron_ddrp.model.positions.absolute import Rope, Rotation, set_theta
from tests.reference.rope import turned
from tests.unit.model.tiny import encode, tiny_batch, tiny_config, tiny_model

ROTATION = Rotation(tiny_config(position_encoding="rope"))


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def logits(query, key, places):
    query, key = (ROTATION.rotate(x, places.expand(len(x), -1)) for x in (query, key))
    return attention_logits(query, key, PositionTerms(0.5))


@pytest.mark.parametrize("place", [0, 1, 7, 511])
def test_the_twin_turns_as_complex_numbers_do(place):
    vector = random(8)
    numbers = torch.complex(vector[:4], vector[4:]) * torch.exp(1j * place * 10000.0 ** (-torch.arange(4).double() / 4))
    torch.testing.assert_close(turned(vector, place), torch.cat((numbers.real, numbers.imag)), rtol=0, atol=1e-12)


def test_one_pair_by_hand():
    """The first pair turns by a quarter at position π/2, the second, 100 times slower, hardly."""
    states = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, 2.0], dtype=torch.float64).view(1, 1, 1, 6)
    got = ROTATION.rotate(states, torch.tensor([[torch.pi / 2]], dtype=torch.float64)).flatten()
    slow = torch.tensor(torch.pi / 2 / 10000 ** (4 / 6), dtype=torch.float64)
    expected = torch.stack([x.double() for x in (*torch.zeros(2), -2 * slow.sin(), *torch.eye(2)[0], 2 * slow.cos())])
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


def test_another_base_turns_as_a_model_of_that_base():
    model, batch = tiny_model(position_encoding="rope"), tiny_batch(lengths=(9,))
    wide = tiny_model(position_encoding="rope", rope_theta=160_000.0)
    wide.load_state_dict(model.state_dict())
    set_theta(model, 160_000.0)
    before = encode(tiny_model(position_encoding="rope"), batch)
    torch.testing.assert_close(encode(model, batch), encode(wide, batch), rtol=0, atol=0)
    assert (encode(model, batch) - before).abs().max() > 1e-6


def test_a_local_layer_keeps_a_base_of_its_own():
    rotation = Rotation(tiny_config(position_encoding="rope", rope_theta=99.0))
    states, places = random(1, 1, 5, 4), torch.arange(5)[None]
    rotation.local_theta, rotation.is_local = 7.0, True
    local = rotation.rotate(states, places)
    set_theta(rotation, 5.0)
    assert torch.equal(rotation.rotate(states, places), local)
    rotation.is_local = False
    expected = torch.stack([turned(vector, place, 5.0) for place, vector in enumerate(states[0, 0])])
    torch.testing.assert_close(rotation.rotate(states, places)[0, 0], expected, rtol=0, atol=1e-12)


def test_only_offsets_count_far_beyond_any_trained_length():
    query, key = random(2, 3, 7, 4), random(2, 3, 7, 4, seed=1)
    near = logits(query, key, torch.arange(7))
    torch.testing.assert_close(logits(query, key, torch.arange(7) + 5000), near, rtol=0, atol=1e-11)
    assert (
        (logits(query, key, 2 * torch.arange(7)) - near).abs().amax((0, 1)).gt(1e-3).logical_xor(torch.eye(7) > 0).all()
    )


def test_theta_is_the_configured_one_and_that_of_local_layers_where_the_layer_is_local():
    """Training may set another after construction."""
    config = tiny_config(position_encoding="rope", rope_theta=100.0, local_rope_theta=9.0)
    rotation, vector = Rotation(config), random(1, 1, 1, 8)

    def assert_turned_by(theta):
        got = rotation.rotate(vector, torch.tensor([[3]])).flatten()
        torch.testing.assert_close(got, turned(vector.flatten(), 3, theta), rtol=0, atol=1e-12)

    assert_turned_by(100.0)
    rotation.theta = 7.0
    assert_turned_by(7.0)
    rotation.is_local = True
    assert_turned_by(9.0)
    rotation.local_theta = None
    assert_turned_by(7.0)


def test_values_are_not_turned():
    """Attention to oneself alone gives the value as it is, wherever one stands."""
    model, batch = tiny_model(position_encoding="rope"), tiny_batch(lengths=(1,))
    moved = batch._replace(position_ids=batch.position_ids + 3)
    torch.testing.assert_close(encode(model, moved), encode(model, batch), rtol=0, atol=1e-12)


def test_half_split_pairs_are_those_of_modernbert():
    modeling = pytest.importorskip("transformers.models.modernbert.modeling_modernbert")
    query, key, places = random(2, 3, 50, 8).float(), random(2, 3, 50, 8, seed=1).float(), torch.arange(50)
    angle = places[:, None] * 10000.0 ** (-torch.arange(4) / 4)
    cos, sin = (torch.cat((x, x), -1).expand(2, -1, -1) for x in (angle.cos(), angle.sin()))
    for ours, theirs in zip((query, key), modeling.apply_rotary_pos_emb(query, key, cos, sin), strict=True):
        torch.testing.assert_close(ROTATION.rotate(ours, places.expand(2, -1)), theirs, rtol=0, atol=1e-5)


def test_logits_are_those_of_roformer_with_each_head_in_its_order():
    modeling = pytest.importorskip("transformers.models.roformer.modeling_roformer")
    query, key, places = random(2, 3, 50, 8), random(2, 3, 50, 8, seed=1), torch.arange(50)
    table = modeling.RoFormerSinusoidalPositionalEmbedding(50, 8)
    table.weight = torch.nn.Parameter(table.create_weight(), requires_grad=False)
    turn = modeling.RoFormerSelfAttention.apply_rotary_position_embeddings
    theirs = attention_logits(*turn(table.weight.double()[None, None], query, key), PositionTerms(0.5))
    halves = [0, 2, 4, 6, 1, 3, 5, 7]
    torch.testing.assert_close(logits(query[..., halves], key[..., halves], places), theirs, rtol=0, atol=1e-4)
    assert (logits(query, key, places) - theirs).abs().max() > 0.1


def test_half_precision_is_turned_by_tables_in_fp32():
    states, places = random(1, 2, 512, 64).bfloat16(), torch.arange(512)[None]
    exact = ROTATION.rotate(states.double(), places)
    got = ROTATION.rotate(states, places)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), exact, rtol=2**-8, atol=1e-3)  # one rounding of the result


def test_nothing_is_learned_or_stored():
    model = tiny_model(position_encoding="rope")
    assert not [name for name in model.state_dict() if "position" in name]
    assert (Rope.in_logits, Rope.is_relative) == (False, True)


def test_a_distance_and_odd_heads_are_refused():
    with pytest.raises(
        UserError, match="^--relative-distance 64 with --position-encoding rope, .*: leave the distance"
    ):
        parse_arguments(["--position-encoding", "rope", "--relative-distance", "64"])
    with pytest.raises(UserError, match="^--position-encoding rope: turns pairs of numbers, got heads 5 wide: choose"):
        ModelConfig(position_encoding="rope", hidden_size=15, num_attention_heads=3)
