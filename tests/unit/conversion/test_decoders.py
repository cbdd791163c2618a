"""A causal phase beside transformers' decoders: BERT as a decoder, and Llama's layers."""

import pytest
import torch
import torch.nn.functional as F
import transformers
from parity import Case, draw, exported

from megatron_ddrp.config import ModelConfig
from megatron_ddrp.conversion.families import FAMILIES
from megatron_ddrp.data.batches.batch import IGNORED_LABEL, Batch
from megatron_ddrp.model import build_model
from megatron_ddrp.model.stages import Draws, Inputs, layout_of

pytestmark = pytest.mark.usefixtures("few_probes")
IDS = torch.arange(48).reshape(2, 24) * 7 % 17 + 1  # not 0, whose row transformers keeps as padding
SIZES = {"hidden_size": 32, "num_attention_heads": 4, "vocab_size": 19}


def inputs_of(model):
    """Two rows of one document each, whose tokens predict the next one."""
    labels = torch.full_like(IDS, IGNORED_LABEL)
    labels[:, :-1] = IDS[:, 1:]
    batch = Batch.of_texts(IDS, torch.ones_like(IDS))._replace(labels=labels)
    return Inputs(batch, Draws.none(len(IDS), model.config.num_layers), None, layout_of(batch, causal=True))


def test_a_bert_is_transformers_decoder_with_its_loss_and_gradients(tmp_path, offline):
    encoder, model = exported(Case(FAMILIES["bert"], "masked-lm"), tmp_path)
    encoder.config.is_decoder = True
    decoder = transformers.BertLMHeadModel(encoder.config).eval().double()
    decoder.load_state_dict(encoder.state_dict())
    loss = model.eval().double()(*inputs_of(model)).sums[0]
    logits = decoder(input_ids=IDS).logits[:, :-1]
    expected = F.cross_entropy(logits.flatten(0, 1), IDS[:, 1:].flatten(), reduction="sum")
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=0)
    ours = torch.autograd.grad(loss, [model.embeddings.token.weight, model.layers[0].attention.key.weight])
    bert = decoder.bert
    theirs = bert.embeddings.word_embeddings.weight, bert.encoder.layer[0].attention.self.key.weight
    for gradient, wanted in zip(ours, torch.autograd.grad(expected, theirs), strict=True):
        torch.testing.assert_close(gradient[: len(wanted)], wanted, rtol=1e-7, atol=1e-9)


def test_rotary_layers_are_a_llamas():
    """From the same embeddings, behind which a Llama has no norm. Its norms compute in fp32."""
    ours = {"ffn": "geglu", "norm": "rmsnorm", "bias": False, "layernorm_position": "pre", "layernorm_epsilon": 1e-6}
    more = {"num_layers": 2, "ffn_hidden_size": 48, "rope_theta": 50.0, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    model = build_model(ModelConfig(position_encoding="rope", **SIZES, **ours, **more))
    draw(model)
    rotary = {"rope_type": "default", "rope_theta": 50.0}
    theirs = {"num_hidden_layers": 2, "intermediate_size": 48, "hidden_act": "gelu", "rope_parameters": rotary}
    llama = transformers.LlamaModel(transformers.LlamaConfig(**SIZES, **theirs))
    for mine, other in zip(model.layers, llama.layers, strict=True):
        attention, ffn = mine.attention, mine.feed_forward
        other.self_attn.q_proj.weight, other.self_attn.k_proj.weight = attention.query.weight, attention.key.weight
        other.self_attn.v_proj.weight, other.self_attn.o_proj.weight = attention.value.weight, attention.output.weight
        other.mlp.gate_proj.weight, other.mlp.up_proj.weight = ffn.input.weight, ffn.gate.weight
        other.mlp.down_proj.weight, other.input_layernorm.weight = ffn.output.weight, mine.attention_norm.weight
        other.post_attention_layernorm.weight = mine.feed_forward_norm.weight
    llama.norm.weight = model.head.final_norm.weight
    state = model.embeddings(inputs_of(model))
    expected = llama(inputs_embeds=state.hidden).last_hidden_state
    for layer in model.layers:
        state = layer(state)
    hidden = model.head.last_hidden(state.hidden)
    torch.testing.assert_close(hidden, expected, rtol=1e-4, atol=1e-4)
    learned = [model.layers[0].attention.query.weight, model.layers[1].feed_forward.gate.weight]
    weight = torch.linspace(-1, 1, hidden.numel()).view_as(hidden)
    gradients = (torch.autograd.grad((x * weight).sum(), learned, retain_graph=True) for x in (hidden, expected))
    for gradient, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-3, atol=1e-3)
