"""Whole encoders of `transformers` with random weights, copied into ours: the same hidden states after every layer.

DeBERTa in its v1 configuration, BERT for absolute positions. Nothing of ours stands on both sides of the comparison.
"""

import pytest
import torch

from megatron_ddrp.model import build_model
from megatron_ddrp.model.stages import Draws, Inputs
from tests.unit.model.tiny import tiny_batch, tiny_config

transformers = pytest.importorskip("transformers")
SIZES = {
    "vocab_size": 128,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 10,
    "max_position_embeddings": 9,
    "type_vocab_size": 2,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "layer_norm_eps": 1e-7,
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
    theirs = randomise(transformers.BertModel(transformers.BertConfig(**SIZES), add_pooling_layer=False))
    ours = our_model(copy_bert(theirs.state_dict()), position_encoding="absolute", attention_backend=backend)
    assert_same_states(theirs, ours)


@pytest.mark.parametrize("backend", ["eager", "blocked", "sdpa"])
@pytest.mark.parametrize("span", [3, 9, 12])
def test_deberta_is_deberta(span, backend):
    """The span below, at and above the sequence."""
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
