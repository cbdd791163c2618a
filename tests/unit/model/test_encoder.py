"""Whole layers and whole models against the loop twin, in sums, hidden states and every parameter's gradient."""

import math
from typing import ClassVar

import pytest
import torch

from megatron_ddrp.config import ENCODINGS
from megatron_ddrp.model import build_model
from megatron_ddrp.model.attention.backends import BACKENDS
from megatron_ddrp.model.positions import LayerPositions, PositionEncoding, PositionTerms
from megatron_ddrp.model.stages import Draws
from tests.reference.positions import clip, dot
from tests.unit.model import twins
from tests.unit.model.tiny import (
    encode,
    gradients,
    packed_batch,
    some_draws,
    tiny_batch,
    tiny_config,
    tiny_model,
)
from tests.unit.model.twins import twin_hidden, twin_sums


def assert_same(got, expected, rtol=1e-9, atol=1e-9):
    """Two dictionaries of gradients by parameter name."""
    for name, gradient in got.items():
        torch.testing.assert_close(
            gradient, expected[name], rtol=rtol, atol=atol, msg=lambda text, n=name: f"{n}: {text}"
        )


def assert_every_backend_equals(expected, model, batch, draws):
    """Hold the sums of a model, and every parameter's gradient, against those of its twin."""
    expected_gradients = gradients(model, expected)
    for backend in BACKENDS:
        for layer in model.layers:
            layer.attention.backend = backend
        sums = model(batch, draws).sums
        torch.testing.assert_close(sums, expected, rtol=1e-10, atol=1e-10, msg=lambda text, b=backend: f"{b}: {text}")
        assert_same(gradients(model, sums), expected_gradients)


@pytest.mark.parametrize("order, relative_table", [("post", "shared"), ("pre", "per-layer")])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_model_equals_the_twin(encoding, order, relative_table):
    """DeBERTa with its decoder, as it comes; the longest row has offsets on both sides of r_s = 4."""
    model = tiny_model(position_encoding=encoding, layernorm_position=order, relative_table=relative_table)
    batch = tiny_batch(lengths=(6, 1, 3), seq=6)
    draws = some_draws(batch)
    expected = twin_sums(model, batch, draws)
    assert expected[:3].abs().min() > 1e-3
    assert_every_backend_equals(expected, model, batch, draws)


class Turn(LayerPositions):
    """Turns the first two numbers of each head by 0.7 per position."""

    def rotate(self, states, position_ids):
        cos, sin = (f(0.7 * position_ids.double())[:, None] for f in (torch.cos, torch.sin))  # [batch, 1, seq]
        first, second, *rest = states.unbind(-1)
        return torch.stack([first * cos - second * sin, second * cos + first * sin, *rest], -1)


class Turned(PositionEncoding):
    """Queries and keys that a layer turns by their positions, and a bias by offset and head."""

    layer_part = Turn
    by_head: ClassVar = {"table": 1}

    def __init__(self, config):
        super().__init__(config)
        self.table = torch.nn.Parameter(torch.randn(4, config.num_attention_heads))

    def forward(self, position_ids):
        return (self.table.T,)

    @staticmethod
    def terms(config, tensors):
        return PositionTerms(0.5, lowest=-2, highest=1, offset_bias=tensors[0])


def turned_twin(name, encoding, layer_part, places, maps):
    """The logits of `Turned`, pair by pair."""

    def turned(vector, place):
        (a, b, *rest), cos, sin = vector, math.cos(0.7 * place), math.sin(0.7 * place)
        return torch.stack([a * cos - b * sin, b * cos + a * sin, *rest])

    def scores(query, key):
        pairs = [
            0.5 * dot(turned(query[h, a], i), turned(key[h, b], j)) + encoding.table[clip(i - j, -2, 1) + 2, h]
            for h in range(len(query))
            for a, i in enumerate(places)
            for b, j in enumerate(places)
        ]
        return torch.stack(pairs).reshape(len(query), len(places), len(places))

    return scores


@pytest.mark.parametrize("relative_table", ["shared", "per-layer"])
@pytest.mark.parametrize("emd", [False, True], ids=["", "mask decoder"])
def test_rotation_and_offset_bias_act_in_every_backend_and_in_the_mask_decoder(emd, relative_table, monkeypatch):
    monkeypatch.setitem(ENCODINGS, "turned", f"{__name__}:Turned")
    monkeypatch.setattr(twins, "twin_scores", turned_twin)
    model = tiny_model(position_encoding="turned", deberta_emd=emd, relative_table=relative_table)
    batch = packed_batch(tiny_batch(lengths=(4, 1, 3), seq=4), [[0, 2], [1]])
    draws = some_draws(batch)
    assert_every_backend_equals(twin_sums(model, batch, draws), model, batch, draws)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_hidden_states_of_the_valid_tokens_equal_the_twin(encoding):
    model = tiny_model(position_encoding=encoding)
    batch = tiny_batch(lengths=(5, 2), seq=6)
    hidden = encode(model, batch)
    for row, length in enumerate((5, 2)):
        expected = twin_hidden(model, batch, row)
        torch.testing.assert_close(hidden[row, :length], expected[:length], rtol=0, atol=1e-10)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_packed_row_gives_the_hidden_states_of_its_documents(encoding):
    model = tiny_model(position_encoding=encoding).eval()
    batch = tiny_batch(lengths=(4, 2, 3), seq=4)
    packed = encode(model, packed_batch(batch, [[0, 1], [2]]))
    alone = encode(model, batch)
    for (row, start), document, length in zip([(0, 0), (0, 4), (1, 0)], range(3), (4, 2, 3), strict=True):
        torch.testing.assert_close(packed[row, start : start + length], alone[document, :length], rtol=0, atol=1e-11)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("rows", [[[0, 2], [4, 3], [1]], [[0, 3], [1], [2], [4]]], ids=["many", "one-token"])
def test_packing_changes_neither_sums_nor_gradients(encoding, backend, rows):
    """Every document keeps its own [CLS], its own places and its own share of TCD and HCD."""
    model = tiny_model(position_encoding=encoding, attention_backend=backend)
    batch = tiny_batch(lengths=(4, 2, 3, 1, 5), seq=7)
    expected = model(batch, some_draws(batch)).sums
    packed = packed_batch(batch, rows)
    sums = model(packed, some_draws(packed)).sums
    torch.testing.assert_close(sums, expected, rtol=1e-11, atol=1e-11)
    assert_same(gradients(model, sums), gradients(model, expected), atol=1e-10)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_packed_batch_equals_the_twin(encoding):
    model = tiny_model(position_encoding=encoding)
    batch = packed_batch(tiny_batch(lengths=(4, 2), seq=4), [[0, 1]])
    draws = some_draws(batch)
    torch.testing.assert_close(model(batch, draws).sums, twin_sums(model, batch, draws), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_sums_do_not_depend_on_how_the_batch_is_cut_or_padded(encoding):
    model = tiny_model(position_encoding=encoding)
    batch = tiny_batch(lengths=(7, 4, 2, 1))
    draws = some_draws(batch)
    whole = model(batch, draws).sums
    parts = torch.zeros_like(whole)
    for row, length in enumerate((7, 4, 2, 1)):
        alone = batch.map(lambda field, row=row, length=length: field[row : row + 1, :length])
        parts = parts + model(alone, Draws(draws.token_mask[row : row + 1, :, :length], draws.heads)).sums
    torch.testing.assert_close(parts, whole, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("relative_table", ["shared", "per-layer"])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_activation_checkpointing_changes_nothing(encoding, relative_table, dropout):
    variant = {"position_encoding": encoding, "relative_table": relative_table}
    config = tiny_config(hidden_dropout=dropout, attention_dropout=dropout, **variant)
    batch = tiny_batch()
    draws = some_draws(batch)
    results = []
    for checkpoint_activations in (False, True):
        model = build_model(config, checkpoint_activations).double()
        model.load_state_dict(tiny_model(**variant).state_dict())
        torch.manual_seed(3)
        sums = model(batch, draws).sums
        results.append((sums, gradients(model, sums)))
    (plain, plain_gradients), (recomputed, recomputed_gradients) = results
    assert torch.equal(plain, recomputed)
    for name, gradient in plain_gradients.items():
        assert torch.equal(gradient, recomputed_gradients[name]), name


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_stages_compute_with_copies_of_the_weights(encoding, recomputes):
    """float64 weights and copies in fp32 give what a model in fp32 does, and gradients in float64."""
    model, rounded = (tiny_model(position_encoding=encoding) for _ in range(2))
    rounded.float()
    model.checkpoint_activations, model.compute_dtype = recomputes, torch.float32
    batch = tiny_batch()
    draws = some_draws(batch)
    sums, expected = model(batch, draws).sums, rounded(batch, draws).sums
    torch.testing.assert_close(sums, expected, rtol=1e-5, atol=1e-5)
    got = gradients(model, sums)
    assert {gradient.dtype for gradient in got.values()} == {torch.float64}
    own = {name: gradient.double() for name, gradient in gradients(rounded, expected).items()}
    assert_same(got, own, rtol=1e-4, atol=1e-4)
    model.compute_dtype = None
    assert (model(batch, draws).sums - sums).abs().max() > 1e-8


@pytest.mark.parametrize("encoding, passes", [("ddrp", 1), ("deberta", 3)])
def test_activation_checkpointing_really_recomputes(encoding, passes, monkeypatch):
    """DeBERTa's decoder goes through the last layer twice more."""
    model = build_model(tiny_config(position_encoding=encoding), checkpoint_activations=True)
    calls = []
    block = model.layers[-1].feed_forward
    original = block.forward
    monkeypatch.setattr(block, "forward", lambda hidden: calls.append(1) or original(hidden))
    batch = tiny_batch()
    model(batch, some_draws(batch)).sums.sum().backward()
    assert len(calls) == 2 * passes


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_one_token_count_for_nothing(backend):
    """One token's heads are single numbers, whose cosines of 1 or -1 must not enter; row by row, lest they cancel."""
    model = tiny_model(attention_backend=backend)
    for seed in range(4):
        batch = tiny_batch(lengths=(1,), seed=seed, predicted=0)
        assert model(batch, some_draws(batch)).sums.eq(0).all()


def test_terms_that_are_switched_off_are_zero():
    model, batch = tiny_model(), tiny_batch()
    sums = model(batch, Draws.none(3, 2)).sums
    assert sums[0] > 0 and sums[1] == 0 and sums[2] == 0
    torch.testing.assert_close(sums, twin_sums(model, batch, Draws.none(3, 2)), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("encoding", ["deberta", "deberta-v2", "alibi"])
def test_model_with_local_layers_equals_the_twin(encoding):
    """In the last of two layers a token attends to two others on either side; the mask decoder applies it too."""
    model = tiny_model(position_encoding=encoding, local_attention=5, global_every=2, deberta_emd=True)
    assert [layer.attention.window for layer in model.layers] == [None, 2]
    assert [layer.layer_position.is_local for layer in model.layers] == [False, True]
    batch = packed_batch(tiny_batch(lengths=(6, 1, 4)), [[0, 1], [2]])
    draws = some_draws(batch)
    assert_every_backend_equals(twin_sums(model, batch, draws), model, batch, draws)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_local_layer_acts_and_reaches_as_far_as_its_window(backend):
    model = tiny_model(num_layers=3, local_attention=4, attention_backend=backend)
    batch = tiny_batch(lengths=(7,))
    before = encode(model, batch)
    for layer in model.layers[1:]:
        window, layer.attention.window = layer.attention.window, None
        assert window == 2 and not torch.allclose(encode(model, batch), before)
        layer.attention.window = window
    # The first layer looks everywhere; without it, two local ones reach four places.
    model.layers[0].attention.window = 0
    changed = batch._replace(input_ids=batch.input_ids.index_add(1, torch.tensor([0]), torch.tensor([[1]])))
    differs = (encode(model, batch) - encode(model, changed)).abs().amax(-1)[0] > 1e-9
    assert differs.tolist() == [True] * 5 + [False] * 2
