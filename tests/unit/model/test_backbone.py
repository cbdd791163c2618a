"""The options of a modern backbone: each as its loop twin computes it, each acting, each where it says.

GEGLU, RMSNorm, no biases, narrow embeddings, fewer segments and no first norm, alone and together.
"""

import re

import pytest
import torch

from megatron_ddrp.config import Config, ModelConfig, ObjectiveConfig
from megatron_ddrp.errors import UserError
from megatron_ddrp.model import build_model, count_parameters
from megatron_ddrp.model.bert import SampleKeys
from tests.unit.model.test_encoder import assert_every_backend_equals
from tests.unit.model.tiny import (
    encode,
    named_sums,
    packed_batch,
    some_draws,
    tiny_batch,
    tiny_config,
    tiny_model,
)
from tests.unit.model.twins import twin_sums

MODERN = {
    "position_encoding": "rope",
    "layernorm_position": "pre",
    "first_norm": False,
    "ffn": "geglu",
    "bias": False,
    "num_segments": 0,
}
OPTIONS = {
    "geglu": {"ffn": "geglu"},
    "rmsnorm": {"norm": "rmsnorm"},
    "no bias": {"bias": False},
    "no key bias": {"key_bias": False, "position_encoding": "deberta-v2"},
    "key bias": {"key_bias": True, "position_encoding": "deberta", "deberta_emd": False},
    "no first norm": {"first_norm": False, "layernorm_position": "pre"},
    "narrow embeddings": {"embedding_size": 6, "position_encoding": "absolute"},
    "one segment": {"num_segments": 1},
    "no segments": {"num_segments": 0},
    "modern": MODERN,
    "modern, rmsnorm, wide embeddings": {**MODERN, "norm": "rmsnorm", "embedding_size": 20},
}


@pytest.mark.parametrize("changes", OPTIONS.values(), ids=OPTIONS)
def test_model_equals_the_twin(changes):
    model, batch = tiny_model(**changes), tiny_batch(lengths=(6, 1, 3), seq=6)
    draws = some_draws(batch)
    expected = twin_sums(model, batch, draws)
    assert expected[:3].abs().min() > 1e-3
    assert_every_backend_equals(expected, model, batch, draws)


def test_names_of_the_modern_backbone():
    """A rename loses checkpoints: these names and shapes are what folders hold."""
    names = {name: list(parameter.shape) for name, parameter in tiny_model(**MODERN).named_parameters()}
    layer = {
        **{f"attention.{part}.weight": [12, 12] for part in ("query", "key", "value", "output")},
        "feed_forward.input.weight": [10, 12],
        "feed_forward.gate.weight": [10, 12],
        "feed_forward.output.weight": [12, 10],
        "feed_forward_norm.weight": [12],
    }
    expected = {
        "embeddings.token.weight": [128, 12],
        "embeddings.norm.weight": [12],
        **{f"layers.{number}.{name}": shape for number in range(2) for name, shape in layer.items()},
        "layers.1.attention_norm.weight": [12],
        "head.final_norm.weight": [12],
        "head.dense.weight": [12, 12],
        "head.norm.weight": [12],
        "head.decoder.bias": [128],
    }
    assert names == expected


def test_names_of_narrow_embeddings():
    model = tiny_model(embedding_size=6, position_encoding="absolute")
    shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    assert shapes["embeddings.token.weight"] == [128, 6] and shapes["embeddings.norm.weight"] == [6]
    assert shapes["embeddings.absolute.weight"] == [7, 6] and shapes["embeddings.projection.weight"] == [12, 6]
    assert shapes["head.dense.weight"] == [6, 12] and shapes["head.norm.weight"] == [6]
    whole = sum(parameter.numel() for parameter in model.parameters())
    assert count_parameters(model)[0] == whole - (128 - 11) * (6 + 1)


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_a_scaled_or_shifted_input_shows_which_norm_it_is(norm):
    model = tiny_model(norm=norm, num_segments=0, position_encoding="absolute")
    batch = tiny_batch()
    before = encode(model, batch)
    with torch.no_grad():
        for table in (model.embeddings.token, model.embeddings.absolute):
            table.weight.mul_(3)
    torch.testing.assert_close(encode(model, batch), before, rtol=1e-8, atol=1e-8)  # neither sees a factor
    with torch.no_grad():
        model.embeddings.absolute.weight.add_(0.5)
    moved = (encode(model, batch) - before).abs().max() > 1e-3
    assert moved == (norm == "rmsnorm")  # LayerNorm takes the mean off


def test_segments_beyond_the_learned_ones_are_those():
    batch = tiny_batch()
    other = batch._replace(segment_ids=1 - batch.segment_ids)
    for number, expected in ((2, False), (1, True), (0, True)):
        model = tiny_model(num_segments=number)
        assert torch.equal(encode(model, batch), encode(model, other)) is expected


def test_the_gate_multiplies_the_second_map():
    model, batch = tiny_model(ffn="geglu"), tiny_batch()
    before = encode(model, batch)
    with torch.no_grad():
        for layer in model.layers:
            layer.feed_forward.gate.weight.mul_(2), layer.feed_forward.gate.bias.mul_(2)
            layer.feed_forward.output.weight.div_(2)
    torch.testing.assert_close(encode(model, batch), before)
    with torch.no_grad():
        model.layers[0].feed_forward.gate.weight.zero_(), model.layers[0].feed_forward.gate.bias.zero_()
    model.layers[0].feed_forward.input.weight.requires_grad_(True)
    model(batch, some_draws(batch)).sums.sum().backward()
    assert model.layers[0].feed_forward.input.weight.grad.abs().max() == 0  # nothing passes a closed gate


@pytest.mark.parametrize("changes", [MODERN, {**MODERN, "norm": "rmsnorm"}], ids=["layernorm", "rmsnorm"])
def test_documents_of_a_packed_row_are_as_they_are_apart(changes):
    model, batch = tiny_model(**changes), tiny_batch()
    sums = [model(each, some_draws(each)).sums for each in (batch, packed_batch(batch, [[0, 2], [1]]))]
    torch.testing.assert_close(*sums, rtol=1e-11, atol=1e-11)


def test_a_generator_shares_embeddings_of_any_width():
    """ELECTRA small: token, segment and absolute embeddings narrower than both models, tied to the output matrix."""
    objective = ObjectiveConfig(objective="electra", generator_size=1 / 3)
    model, batch = tiny_model(objective=objective, embedding_size=6, position_encoding="absolute"), tiny_batch()
    shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    assert shapes["generator.embeddings.projection.weight"] == [4, 6] and shapes["generator.head.dense.weight"] == [
        6,
        4,
    ]
    keys = SampleKeys(torch.arange(batch.labels.numel()).view_as(batch.labels))
    sums = named_sums(model, batch, some_draws(batch)._replace(own=keys))
    (gradient,) = torch.autograd.grad(sums["lm_loss"], model.embeddings.token.weight)
    assert gradient.abs().max() > 1e-3 and sums["rtd_loss"] > 0


def test_geglu_takes_as_many_weights_as_gelu_by_default():
    for hidden in (128, 768, 1024):
        sizes = {kind: ModelConfig(hidden_size=hidden, num_attention_heads=2, ffn=kind) for kind in ("gelu", "geglu")}
        weights = {kind: size.ffn_maps * hidden * size.ffn_size for kind, size in sizes.items()}
        assert weights["gelu"] <= weights["geglu"] <= 1.13 * weights["gelu"]
    assert ModelConfig(ffn="geglu").ffn_size == 2048 and ModelConfig(ffn="geglu", ffn_hidden_size=1152).ffn_size == 1152


def test_what_is_global_and_local():
    config = tiny_config(local_attention=128, global_every=3)
    assert [config.window(layer) for layer in range(7)] == [None, 64, 64, None, 64, 64, None]
    assert tiny_config().window(1) is None


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"first_norm": False}, "--no-first-norm with --layernorm-position post"),
        ({"local_attention": 1}, "--local-attention is 1"),
        ({"num_segments": 3}, "--num-segments is 3"),
        ({"rope_theta": 0.5}, "--rope-theta is 0.5"),
    ],
)
def test_impossible_settings_are_refused(changes, message):
    with pytest.raises(UserError, match=re.escape(message)):
        ModelConfig(**changes)


def test_embeddings_as_wide_as_the_model_are_the_usual_ones():
    assert ModelConfig(embedding_size=768) == ModelConfig()


def test_notes_are_as_wide_as_the_hidden_states():
    with pytest.raises(UserError, match="--notes with --embedding-size 8: notes join the embeddings"):
        Config(model=ModelConfig(embedding_size=8), objective=ObjectiveConfig(notes=True))


def test_initialisation_leaves_no_bias_and_no_shift():
    model = build_model(tiny_config(**MODERN))
    assert [name for name, _ in model.named_parameters() if name.endswith("bias")] == ["head.decoder.bias"]
