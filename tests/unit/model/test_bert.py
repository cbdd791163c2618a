"""Names, shapes, counts and gradients of parameters, a micro-batch's layout and the masked-LM head; whole models of
every encoding, and with each option of a modern backbone, against the loop twin.

The golden files name every parameter: a rename is a reviewed change of a file here, never a lost checkpoint.
"""

import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from megatron_ddrp.config import ENCODINGS, Config, ModelConfig, ObjectiveConfig, objective_class
from megatron_ddrp.data.batches.batch import IGNORED_LABEL
from megatron_ddrp.model import build_model, count_parameters, on_meta_device
from megatron_ddrp.model.stages import Draws, layout_of
from tests.refusals import refused
from tests.unit.model.tiny import assert_equals_twin, packed_batch, some_draws, tiny_batch, tiny_config, tiny_model

GOLDEN = Path(__file__).parents[2] / "golden"
VARIANTS = {name.replace("-", "_"): {"position_encoding": name} for name in ENCODINGS}
VARIANTS |= {
    f"{variant}_per_layer": {"position_encoding": variant.replace("_", "-"), "relative_table": "per-layer"}
    for variant in ("bert_r", "tupe_r", "deberta", "ddrp")
}
VARIANTS["ddrp_absolute_embedding"] = {"position_encoding": "ddrp", "absolute_embedding": True}
OWN = {
    "alibi": {},
    "alibi_asym": {"left": [3], "right": [3]},
    "deberta_v2": {"relative": [8, 12], "norm.weight": [12], "norm.bias": [12]},
    "nope": {},
}
"""Variants without a golden file → the names and shapes of the position parameters in a tiny model."""
GENERATORS = {name: ObjectiveConfig(objective=name) for name in ("electra", "rtd")}
"""Golden file of a model with a generator → its objective."""


@pytest.mark.parametrize("variant", [*VARIANTS, *GENERATORS])
def test_names_and_shapes_are_the_golden_ones(variant):
    """Of an encoding without a golden file, its row of `OWN` stands beside the parameters of a BERT."""
    model = build_model(tiny_config(**VARIANTS.get(variant, {"position_encoding": "absolute"})))
    if variant in GENERATORS:
        model = build_model(model.config, objective=GENERATORS[variant])
    assert shapes_of(model) == golden(variant)


def shapes_of(model):
    return {name: list(parameter.shape) for name, parameter in model.named_parameters()}


def golden(variant):
    """The names of a variant's parameters → shape."""
    if variant in OWN:
        bert = {name: shape for name, shape in golden("absolute").items() if name != "embeddings.absolute.weight"}
        return bert | {f"embeddings.position.{name}": shape for name, shape in OWN[variant].items()}
    return json.loads((GOLDEN / f"{variant}_params.json").read_text(encoding="utf-8"))


def test_every_variant_has_its_golden_file_and_no_other_and_pre_norm_adds_one_last_norm():
    files = {path.stem for path in GOLDEN.glob("*_params.json")}
    assert files == {f"{variant}_params" for variant in {*VARIANTS, *GENERATORS} - OWN.keys()}
    post, pre = ({n for n, _ in tiny_model(layernorm_position=order).named_parameters()} for order in ("post", "pre"))
    assert pre - post == {"head.final_norm.weight", "head.final_norm.bias"} and post < pre


def test_parameters_of_bert_base_and_those_of_positions():
    """The page of encodings has the parameters of each; test_pages.py counts them."""
    total = 109_514_298  # BERT-base with its masked-LM head, without pooler and next-sentence head
    absolute = on_meta_device(ModelConfig(position_encoding="absolute"))
    assert count_parameters(absolute)[0] == total
    assert count_parameters(on_meta_device(ModelConfig()))[0] == total - 512 * 768 + 4_288
    assert absolute.embeddings.token.weight.shape == (30592, 768)  # padded to a multiple of 128
    expected = {"ddrp_per_layer": 12 * 4_288, "ddrp_absolute_embedding": 4_288 + 512 * 768}
    found = {name: count_parameters(on_meta_device(ModelConfig(**VARIANTS[name])))[1] for name in expected}
    assert found == expected


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_initialisation_is_berts(encoding):
    torch.manual_seed(0)
    sizes = {"num_layers": 1, "hidden_size": 256, "num_attention_heads": 4, "vocab_size": 2000}
    sizes |= {"relative_distance": 512, "init_method_std": 0.02}
    model = build_model(tiny_config(**sizes, position_encoding=encoding))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert parameter.eq(1.0 if name.endswith("weight") else 0.0).all(), name
        elif name.endswith("bias"):
            assert parameter.eq(0).all(), name
        elif not name.endswith(("position.direction", "position.left", "position.right")):  # test_positions.py
            count = parameter.numel()
            assert abs(parameter.mean()) < 5 * 0.02 / count**0.5, name
            assert abs(parameter.std() - 0.02) < 5 * 0.02 / (2 * count) ** 0.5, name
    assert not torch.equal(build_model(model.config).head.decoder.weight, model.head.decoder.weight)


def test_a_module_of_a_plug_in_begins_as_it_wants(monkeypatch):
    class Gate(nn.Linear):
        def own_start(self):
            self.weight.data.fill_(3)

    monkeypatch.setattr(objective_class("mlm"), "modules", lambda _, hidden_size: Gate(hidden_size, 1))
    gate = build_model(tiny_config(), objective=ObjectiveConfig(objective="mlm")).head.own
    assert gate.weight.eq(3).all() and gate.bias.eq(0).all()


@pytest.mark.parametrize("order", ["post", "pre"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_learns_under_mth(variant, order):
    model, batch = tiny_model(layernorm_position=order, **VARIANTS[variant]), tiny_batch()
    model(batch, some_draws(batch)).sums.sum().backward()
    assert not [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 1e-6]


PACKED = packed_batch(tiny_batch(lengths=(7, 4, 2, 3)), [[0], [1, 2], [3]])
PACKED_FULL = packed_batch(tiny_batch(lengths=(4, 3, 7)), [[0, 1], [2]])
BATCHES = {"padded": tiny_batch(lengths=(7, 4, 2)), "full": tiny_batch(lengths=(7, 7)), "packed": PACKED}
BATCHES |= {"packed without padding": PACKED_FULL, "nothing to predict": tiny_batch(predicted=0)}


def count(batch):
    """The runs of a document or of padding as lists of flat places, the predicted ones, and whether a row restarts."""
    runs, predicted, restarts = {}, [], False
    for place, number in enumerate(batch.document_ids.flatten().tolist()):
        row, column = divmod(place, batch.input_ids.shape[1])
        runs.setdefault((row, number), []).append(place)
        if number:
            restarts = restarts or int(batch.position_ids[row, column]) not in (column, 0)
        if batch.labels[row, column] != IGNORED_LABEL:
            predicted.append(place)
    return list(runs.values()), predicted, restarts


@pytest.mark.parametrize("name", BATCHES)
def test_the_layout_is_what_counting_gives_and_one_for_arrays_and_tensors(name):
    batch = BATCHES[name]
    layout, (runs, predicted, restarts) = layout_of(batch), count(batch)
    assert layout.predicted.tolist() == predicted
    borders = layout.runs.tolist()
    assert [list(range(begin, end)) for begin, end in zip(borders, borders[1:], strict=False)] == runs
    assert layout.runs.dtype == torch.int32 and layout.longest == max(map(len, runs))
    assert layout.full == (len(runs) == len(batch.labels) and bool(batch.document_ids.all()))
    assert layout.restarts == restarts
    seq = batch.input_ids.shape[1]
    asked = (layout.queries + seq * torch.arange(len(layout.queries))[:, None]).flatten()
    assert asked[layout.answers].tolist() == predicted
    longest = max(sum(place // seq == row for place in predicted) for row in range(len(batch.labels)))
    assert layout.queries.shape[1] == longest
    for one, other in zip(layout, layout_of(batch.map(torch.Tensor.numpy)), strict=True):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))


def test_input_and_output_embedding_share_storage_and_predicted_positions_alone_reach_the_head():
    model, batch, seen = tiny_model(), tiny_batch(), []
    model.head.dense.register_forward_hook(lambda _, given, __: seen.append(given[0].shape))
    model(batch, Draws.none(3, 2))
    assert seen == [(int((batch.labels != IGNORED_LABEL).sum()), 12)]
    assert model.head.decoder.weight is model.embeddings.token.weight
    copy = build_model(tiny_config())
    copy.load_state_dict(model.state_dict())
    assert copy.head.decoder.weight is copy.embeddings.token.weight
    names = [name for name, parameter in model.named_parameters() if parameter is model.head.decoder.weight]
    assert names == ["embeddings.token.weight"]


def test_the_padding_of_a_vocabulary_is_never_predicted_and_one_without_has_finite_logits():
    model = tiny_model(vocab_size=128)
    assert model.head.logits(torch.randn(5, 12, dtype=torch.float64)).isfinite().all()
    model = tiny_model()
    assert model.head.decoder.out_features == 128
    with torch.no_grad():
        model.head.decoder.bias[11:] = 1e4  # the padding would win if it counted
    hidden = torch.randn(5, 12, dtype=torch.float64)
    logits = model.head.logits(hidden)
    assert logits[:, 11:].eq(float("-inf")).all() and logits[:, :11].isfinite().all()
    assert model.logits(hidden).shape == (5, 11)
    batch = tiny_batch()
    model(batch, Draws.none(3, 2)).sums[0].backward()
    assert model.head.decoder.bias.grad[11:].eq(0).all() and model.head.decoder.bias.grad[:11].ne(0).all()
    assert model.embeddings.token.weight.grad[11:].eq(0).all()


@pytest.mark.parametrize("encoding", ["ddrp", "deberta"])
@pytest.mark.parametrize("lengths", [(7, 4, 2), (0, 1)], ids=["nothing to predict", "padding alone"])
def test_nothing_to_predict_is_a_zero_loss_with_zero_gradients(encoding, lengths):
    """DeBERTa's decoder takes part too, so that every rank reduces the same tensors."""
    model, batch = tiny_model(position_encoding=encoding), tiny_batch(lengths=lengths, predicted=0)
    draws = Draws.none(3, 2) if all(lengths) else some_draws(batch)
    sums = model(batch, draws).sums
    assert torch.equal(sums, torch.zeros(4, dtype=torch.float64))
    sums.sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or parameter.grad.eq(0).all(), name
        assert parameter.grad is not None or (encoding, min(lengths)) != ("deberta", 2), name
    assert model.head.dense.weight.grad is not None


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
    "modern, rmsnorm, wide embeddings": {**MODERN, "norm": "rmsnorm", "embedding_size": 20},
    "absolute embedding": {"absolute_embedding": True},
}
PRE_NORM = {"layernorm_position": "pre", "relative_table": "per-layer"}
OPTIONS |= {name: {"position_encoding": name} for name in ENCODINGS}
OPTIONS |= {f"{name}, pre-norm": {"position_encoding": name, **PRE_NORM} for name in ENCODINGS}
LOCAL = {"local_attention": 5, "global_every": 2, "deberta_emd": True}
OPTIONS |= {f"{name}, local": {"position_encoding": name, **LOCAL} for name in ("deberta", "deberta-v2", "alibi")}


@pytest.mark.parametrize("changes", OPTIONS.values(), ids=OPTIONS)
def test_model_equals_the_twin(changes):
    """DeBERTa with its decoder, as it comes; the longest row has offsets on both sides of r_s = 4."""
    model, batch = tiny_model(**changes), tiny_batch(lengths=(6, 1, 3), seq=6)
    assert assert_equals_twin(model, batch, some_draws(batch))[:3].abs().min() > 1e-3


def test_names_of_the_modern_backbone_and_of_narrow_embeddings():
    """A rename loses checkpoints: these names and shapes are what folders hold."""
    layer = {
        **{f"attention.{part}.weight": [12, 12] for part in ("query", "key", "value", "output")},
        **{f"feed_forward.{part}.weight": [10, 12] for part in ("input", "gate")},
        **{"feed_forward.output.weight": [12, 10], "feed_forward_norm.weight": [12]},
    }
    assert shapes_of(tiny_model(**MODERN)) == {
        **{"embeddings.token.weight": [128, 12], "embeddings.norm.weight": [12]},
        **{f"layers.{number}.{name}": shape for number in range(2) for name, shape in layer.items()},
        **{"layers.1.attention_norm.weight": [12], "head.final_norm.weight": [12]},
        **{"head.dense.weight": [12, 12], "head.norm.weight": [12], "head.decoder.bias": [128]},
    }
    model = tiny_model(embedding_size=6, position_encoding="absolute")
    assert {
        **{"embeddings.token.weight": [128, 6], "embeddings.norm.weight": [6]},
        **{"embeddings.absolute.weight": [7, 6], "embeddings.projection.weight": [12, 6]},
        **{"head.dense.weight": [6, 12], "head.norm.weight": [6]},
    }.items() <= shapes_of(model).items()
    whole = sum(parameter.numel() for parameter in model.parameters())
    assert count_parameters(model)[0] == whole - (128 - 11) * (6 + 1)


def test_sizes_and_which_layers_are_local():
    """GEGLU takes as many weights as GELU by default."""
    for hidden in (128, 768, 1024):
        sizes = {kind: ModelConfig(hidden_size=hidden, num_attention_heads=2, ffn=kind) for kind in ("gelu", "geglu")}
        weights = {kind: size.ffn_maps * hidden * size.ffn_size for kind, size in sizes.items()}
        assert weights["gelu"] <= weights["geglu"] <= 1.13 * weights["gelu"]
    assert ModelConfig(ffn="geglu").ffn_size == 2048 and ModelConfig(ffn="geglu", ffn_hidden_size=1152).ffn_size == 1152
    config = tiny_config(local_attention=128, global_every=3)
    assert [config.window(layer) for layer in range(7)] == [None, 64, 64, None, 64, 64, None]
    assert tiny_config().window(1) is None
    layers = tiny_model(local_attention=5, global_every=2).layers
    assert [layer.attention.window for layer in layers] == [None, 2]
    assert [layer.layer_position.is_local for layer in layers] == [False, True]
    assert ModelConfig(embedding_size=768) == ModelConfig()


def test_impossible_settings_are_refused():
    for changes, message in (
        ({"first_norm": False}, "--no-first-norm with --layernorm-position post"),
        ({"local_attention": 1}, "--local-attention is 1"),
        ({"num_segments": 3}, "--num-segments is 3"),
        ({"rope_theta": 0.5}, "--rope-theta is 0.5"),
    ):
        refused(re.escape(message), ModelConfig, **changes)
    sizes = {"model": {"embedding_size": 8}, "objective": {"notes": True}}
    refused("--notes with --embedding-size 8: notes join the embeddings", Config().replace, **sizes)
