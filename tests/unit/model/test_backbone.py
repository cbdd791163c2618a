"""The options of a modern backbone, and whole encoders of `transformers` with random weights, copied into ours.

GEGLU, RMSNorm, no biases, narrow embeddings, fewer segments and no first norm, alone and together: each as its loop
twin computes it, each acting, each where it says. DeBERTa in its v1 configuration and BERT for absolute positions have
the same hidden states after every layer; nothing of ours stands on both sides of the comparison.
"""

import re

import pytest
import torch

from megatron_ddrp.config import Config, ModelConfig, ObjectiveConfig
from megatron_ddrp.model import build_model, count_parameters
from megatron_ddrp.model.bert import SampleKeys
from megatron_ddrp.model.stages import Draws, Inputs
from tests.refusals import refused
from tests.unit.model.tiny import (
    assert_every_backend_equals,
    encode,
    named_sums,
    packed_batch,
    some_draws,
    tiny_batch,
    tiny_config,
    tiny_model,
    twin_sums,
)

MODERN = {
    **{"position_encoding": "rope", "layernorm_position": "pre"},
    **{"first_norm": False, "ffn": "geglu", "bias": False, "num_segments": 0},
}
OPTIONS = {
    "geglu": {"ffn": "geglu"},
    "swiglu": {"ffn": "swiglu"},
    "rmsnorm": {"norm": "rmsnorm"},
    "no bias": {"bias": False},
    "biases of norms alone": {"bias": False, "norm_bias": True},
    "no biases of norms": {"norm_bias": False},
    "no embedding norm": {"embedding_norm": False},
    "no key bias": {"key_bias": False, "position_encoding": "deberta-v2"},
    "key bias": {"key_bias": True, "position_encoding": "deberta", "deberta_emd": False},
    "no first norm": {"first_norm": False, "layernorm_position": "pre"},
    "narrow embeddings": {"embedding_size": 6, "position_encoding": "absolute"},
    "one segment": {"num_segments": 1},
    "no segments": {"num_segments": 0},
    "modern": MODERN,
    "nomic_bert": {"position_encoding": "rope", "ffn": "swiglu", "bias": False, "norm_bias": True},
    "eurobert": {**MODERN, "ffn": "swiglu", "norm": "rmsnorm", "first_norm": True, "embedding_norm": False},
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


@pytest.mark.parametrize("kind", ["geglu", "swiglu"])
def test_the_gate_multiplies_the_second_map(kind):
    model, batch = tiny_model(ffn=kind), tiny_batch()
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
    refused(re.escape(message), ModelConfig, **changes)


def test_embeddings_as_wide_as_the_model_are_the_usual_ones():
    assert ModelConfig(embedding_size=768) == ModelConfig()


def test_notes_are_as_wide_as_the_hidden_states():
    sizes = {"model": {"embedding_size": 8}, "objective": {"notes": True}}
    refused("--notes with --embedding-size 8: notes join the embeddings", Config().replace, **sizes)


def test_initialisation_leaves_no_bias_and_no_shift():
    model = build_model(tiny_config(**MODERN))
    assert [name for name, _ in model.named_parameters() if name.endswith("bias")] == ["head.decoder.bias"]


SIZES = {
    **{"vocab_size": 128, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3},
    **{"intermediate_size": 10, "max_position_embeddings": 9, "type_vocab_size": 2},
    **{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "layer_norm_eps": 1e-7},
}


def randomise(model):
    """Every parameter random, LayerNorms and biases too."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.4 + (name.endswith("LayerNorm.weight")))
    return model.double().eval()


def common_names(layer):
    """Ours → theirs, for what BERT and DeBERTa have in common; the layer's own attention projections apart."""
    return {
        "attention.output": f"encoder.layer.{layer}.attention.output.dense",
        "attention_norm": f"encoder.layer.{layer}.attention.output.LayerNorm",
        "feed_forward.input": f"encoder.layer.{layer}.intermediate.dense",
        "feed_forward.output": f"encoder.layer.{layer}.output.dense",
        "feed_forward_norm": f"encoder.layer.{layer}.output.LayerNorm",
    }


def copy_common(state):
    """Their state under our names."""
    ours = {
        "embeddings.token.weight": state["embeddings.word_embeddings.weight"],
        "embeddings.segment.weight": state["embeddings.token_type_embeddings.weight"],
        "embeddings.norm.weight": state["embeddings.LayerNorm.weight"],
        "embeddings.norm.bias": state["embeddings.LayerNorm.bias"],
    }
    for layer in range(2):
        for mine, theirs in common_names(layer).items():
            for part in ("weight", "bias"):
                ours[f"layers.{layer}.{mine}.{part}"] = state[f"{theirs}.{part}"]
    return ours


def copy_bert(state):
    ours = copy_common(state) | {"embeddings.absolute.weight": state["embeddings.position_embeddings.weight"]}
    for layer in range(2):
        for name in ("query", "key", "value"):
            for part in ("weight", "bias"):
                theirs = f"encoder.layer.{layer}.attention.self.{name}.{part}"
                ours[f"layers.{layer}.attention.{name}.{part}"] = state[theirs]
    return ours


def copy_deberta(state):
    """Their projections of queries, keys and values are one matrix, head by head; keys have no bias."""
    ours = copy_common(state) | {"embeddings.position.relative": state["encoder.rel_embeddings.weight"]}
    for layer in range(2):
        theirs, mine = f"encoder.layer.{layer}.attention.self", f"layers.{layer}"
        by_head = state[f"{theirs}.in_proj.weight"].view(3, 3, 4, 12)  # [head, query|key|value, d, D]
        for number, name in enumerate(("query", "key", "value")):
            ours[f"{mine}.attention.{name}.weight"] = by_head[:, number].reshape(12, 12)
        ours[f"{mine}.attention.query.bias"] = state[f"{theirs}.q_bias"]
        ours[f"{mine}.attention.value.bias"] = state[f"{theirs}.v_bias"]
        ours[f"{mine}.layer_position.key.weight"] = state[f"{theirs}.pos_proj.weight"]
        ours[f"{mine}.layer_position.query.weight"] = state[f"{theirs}.pos_q_proj.weight"]
        ours[f"{mine}.layer_position.query.bias"] = state[f"{theirs}.pos_q_proj.bias"]
    return ours


def our_hidden_states(model, batch):
    """After the embeddings and after every layer."""
    state, hidden = Inputs.of(batch, Draws.none(len(batch.input_ids), 2)), []
    for stage in (model.embeddings, *model.layers):
        state = stage(state)
        hidden.append(state.hidden)
    return hidden


def assert_same_states(theirs, ours):
    batch = tiny_batch(lengths=(9, 5, 1), seq=9, vocab=128, predicted=0)
    valid = batch.document_ids > 0
    with torch.no_grad():
        expected = theirs(
            batch.input_ids,
            attention_mask=batch.document_ids,
            token_type_ids=batch.segment_ids,
            output_hidden_states=True,
        ).hidden_states
        got = our_hidden_states(ours, batch)
    assert len(got) == len(expected) == 3
    for layer, (mine, other) in enumerate(zip(got, expected, strict=True)):
        torch.testing.assert_close(
            mine[valid], other[valid].double(), rtol=1e-5, atol=1e-5, msg=lambda text, n=layer: f"{n}: {text}"
        )


def our_model(state, **changes):
    config = tiny_config(seq_length=9, vocab_size=128, layernorm_epsilon=1e-7, deberta_emd=False, **changes)
    model = build_model(config).double().eval()
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and all(name.startswith("head.") for name in missing)
    return model


@pytest.mark.parametrize("backend", ["eager", "blocked", "sdpa"])
def test_absolute_is_bert(backend):
    transformers = pytest.importorskip("transformers")
    theirs = randomise(transformers.BertModel(transformers.BertConfig(**SIZES), add_pooling_layer=False))
    ours = our_model(copy_bert(theirs.state_dict()), position_encoding="absolute", attention_backend=backend)
    assert_same_states(theirs, ours)


@pytest.mark.parametrize("backend", ["eager", "blocked", "sdpa"])
@pytest.mark.parametrize("span", [3, 9, 12])
def test_deberta_is_deberta(span, backend):
    """The span below, at and above the sequence."""
    transformers = pytest.importorskip("transformers")
    configuration = transformers.DebertaConfig(
        **SIZES,
        relative_attention=True,
        max_relative_positions=span,
        pos_att_type=["c2p", "p2c"],
        position_biased_input=False,
    )
    theirs = randomise(transformers.DebertaModel(configuration))
    ours = our_model(
        copy_deberta(theirs.state_dict()),
        position_encoding="deberta",
        relative_distance=span,
        attention_backend=backend,
    )
    assert_same_states(theirs, ours)
