"""Positions act, every parameter learns, and the model's names, shapes and counts are the known ones.

The golden files name every parameter: a rename is a reviewed change of a file here, never a lost checkpoint.
`layout_of`: where a micro-batch has its tokens, against a count token by token. The masked-LM head: predicted positions
only, tied weights, a vocabulary's padding that is never predicted.
"""

import json
from pathlib import Path

import pytest
import torch

from megatron_ddrp.config import ENCODINGS, ModelConfig, ObjectiveConfig, encoding_class
from megatron_ddrp.data.batches.batch import IGNORED_LABEL
from megatron_ddrp.model import build_model, count_parameters, on_meta_device
from megatron_ddrp.model.positions import LayerPositions
from megatron_ddrp.model.stages import Draws, Inputs, layout_of
from tests.unit.model.tiny import encode, packed_batch, some_draws, tiny_batch, tiny_config, tiny_model, twin_sums

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
GENERATORS = {
    "electra": ObjectiveConfig(objective="electra"),
    "electra_former": ObjectiveConfig(objective="electra", generator_embeddings="own"),
    "rtd": ObjectiveConfig(objective="rtd"),
}
"""Golden file of a model with a generator → its objective."""
RELATIVE = [name for name in ENCODINGS if name != "absolute"]


@pytest.mark.parametrize("variant", [*VARIANTS, *GENERATORS])
def test_names_and_shapes_are_the_golden_ones(variant):
    """Of an encoding without a golden file, its row of `OWN` stands beside the parameters of a BERT."""
    model = build_model(tiny_config(**VARIANTS.get(variant, {"position_encoding": "absolute"})))
    if variant in GENERATORS:
        model = build_model(model.config, objective=GENERATORS[variant])
    shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    assert shapes == golden(variant)


def golden(variant):
    """The names of a variant's parameters → shape."""
    if variant in OWN:
        bert = {name: shape for name, shape in golden("absolute").items() if name != "embeddings.absolute.weight"}
        return bert | {f"embeddings.position.{name}": shape for name, shape in OWN[variant].items()}
    return json.loads((GOLDEN / f"{variant}_params.json").read_text(encoding="utf-8"))


def test_pre_norm_adds_one_last_norm():
    names = {
        order: {n for n, _ in tiny_model(layernorm_position=order).named_parameters()} for order in ("post", "pre")
    }
    assert names["pre"] - names["post"] == {"head.final_norm.weight", "head.final_norm.bias"}
    assert names["post"] < names["pre"]


def test_every_variant_has_its_golden_file_and_no_other():
    assert {path.stem for path in GOLDEN.glob("*_params.json")} == {
        f"{variant}_params" for variant in {*VARIANTS, *GENERATORS} - OWN.keys()
    }


UNTIED = (512 + 1) * 768 + 2 * 768 + 2 * (768 * 768 + 768)
"""TUPE-A: the table, its LayerNorm, U^Q and U^K."""
DISENTANGLED = 12 * (768 * 768 + 768 * 768 + 768)
"""DeBERTa: W^{K,r} and W^{Q,r} with a bias, in 12 layers."""
DECODER = 512 * 768


@pytest.mark.parametrize(
    "variant, expected",
    [
        ("absolute", 393_216),
        ("bert_r", 8_192),
        ("bert_r_per_layer", 98_304),
        ("tupe_a", UNTIED),
        ("tupe_r", UNTIED + 33 * 12),
        ("tupe_r_per_layer", 12 * (UNTIED + 33 * 12)),
        ("deberta", 128 * 768 + DISENTANGLED + DECODER),
        ("deberta_per_layer", 12 * 128 * 768 + DISENTANGLED + DECODER),
        ("ddrp", 4_288),
        ("ddrp_per_layer", 51_456),
        ("ddrp_absolute_embedding", 4_288 + 393_216),
    ],
)
def test_position_parameters_of_the_base_model(variant, expected):
    assert count_parameters(on_meta_device(ModelConfig(**VARIANTS[variant])))[1] == expected


def test_parameters_of_bert_base():
    hidden, ffn, layers, vocab, positions, segments = 768, 3072, 12, 30522, 512, 2
    norm = 2 * hidden
    embeddings = (vocab + positions + segments) * hidden + norm
    layer = 4 * (hidden * hidden + hidden) + norm + (hidden * ffn + ffn) + (ffn * hidden + hidden) + norm
    head = (hidden * hidden + hidden) + norm + vocab  # the output matrix is the token embedding
    total = embeddings + layers * layer + head
    assert total == 109_514_298  # BERT-base with its masked-LM head, without pooler and next-sentence head
    absolute = on_meta_device(ModelConfig(position_encoding="absolute"))
    assert count_parameters(absolute)[0] == total
    assert count_parameters(on_meta_device(ModelConfig()))[0] == total - positions * hidden + 4_288
    assert absolute.embeddings.token.weight.shape == (30592, hidden)  # padded to a multiple of 128


SLOPES = ("position.left", "position.right")
"""Parameters that act through a softplus."""
OF_THEIR_OWN = ("position.direction", *SLOPES)
"""Parameters that start elsewhere: test_relative_positions.py."""


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_initialisation_is_berts(encoding):
    torch.manual_seed(0)
    config = ModelConfig(
        num_layers=1,
        hidden_size=256,
        num_attention_heads=4,
        relative_distance=None if encoding_class(encoding).relative_distance is None else 512,
        vocab_size=2000,
        position_encoding=encoding,
    )
    model = build_model(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert parameter.eq(1.0 if name.endswith("weight") else 0.0).all(), name
        elif name.endswith("bias"):
            assert parameter.eq(0).all(), name
        elif not name.endswith(OF_THEIR_OWN):
            count = parameter.numel()
            assert abs(parameter.mean()) < 5 * 0.02 / count**0.5, name
            assert abs(parameter.std() - 0.02) < 5 * 0.02 / (2 * count) ** 0.5, name
    assert not torch.equal(build_model(config).head.decoder.weight, model.head.decoder.weight)


def position_parameters(model):
    """All parameters through which an encoding acts on the hidden states, by name."""
    places = (".position.", ".layer_position.", ".absolute.")
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if any(place in f".{name}" for place in places) and not name.startswith("mask_decoder.")
    }


def test_each_absolute_embedding_moves_the_logits_of_its_own_place():
    model, batch = tiny_model(position_encoding="absolute"), tiny_batch(lengths=(7,))
    batch = batch._replace(segment_ids=torch.zeros_like(batch.segment_ids))
    inputs = Inputs.of(batch, Draws.none(1, 2))
    before = model.embeddings.embed(inputs).detach().clone()
    before_hidden = encode(model, batch)
    for row in range(7):
        with torch.no_grad():
            model.embeddings.absolute.weight[row, 0] += 0.5
            moved = (model.embeddings.embed(inputs) - before).abs().sum(-1)[0] > 1e-9
            assert (encode(model, batch) - before_hidden).abs().sum(-1).gt(1e-9).all()  # through attention, all move
            model.embeddings.absolute.weight[row, 0] -= 0.5
        assert moved.nonzero().flatten().tolist() == [row]


def has_positions(encoding):
    """Whether an encoding says where tokens stand: in the logits, in the input or by rotating."""
    own = encoding_class(encoding)
    rotates = own.layer_part.rotate is not LayerPositions.rotate
    return own.in_logits or own.adds_absolute_embedding or rotates


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_permuting_tokens_does_more_than_permute_the_outputs(encoding):
    model, batch = tiny_model(position_encoding=encoding), tiny_batch(lengths=(7,))
    order = torch.tensor([3, 0, 6, 1, 5, 2, 4])
    permuted = batch._replace(input_ids=batch.input_ids[:, order], segment_ids=batch.segment_ids[:, order])
    difference = (encode(model, permuted) - encode(model, batch)[:, order]).abs().max()
    assert difference > 1e-2 if has_positions(encoding) else difference < 1e-11
    if not position_parameters(model):  # nothing to take away
        return
    with torch.no_grad():  # without its position parameters the model sees a bag of tokens
        for name, parameter in position_parameters(model).items():
            parameter.fill_(-torch.inf if name.endswith(SLOPES) else 0.0)
    torch.testing.assert_close(encode(model, permuted), encode(model, batch)[:, order], rtol=0, atol=1e-11)


@pytest.mark.parametrize("order", ["post", "pre"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_learns_under_mth(variant, order):
    model = tiny_model(layernorm_position=order, **VARIANTS[variant])
    batch = tiny_batch()
    model(batch, some_draws(batch)).sums.sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 1e-6, name


@pytest.mark.parametrize("variant", VARIANTS)
def test_under_mlm_only_key_biases_do_not_learn(variant):
    """Q_i·b is the same for every key j, so the softmax cancels it. HCD reads the logits before that, DeBERTa's
    position queries meet the key's bias at every distance anew, and a rotation turns it by every key's place."""
    model, batch = tiny_model(**VARIANTS[variant]), tiny_batch()
    model(batch, Draws.none(3, 2)).sums[0].backward()
    still = {name for name, parameter in model.named_parameters() if parameter.grad.abs().max() < 1e-12}
    rotates = encoding_class(VARIANTS[variant]["position_encoding"]).layer_part.rotate is not LayerPositions.rotate
    biases = {f"layers.{number}.attention.key.bias" for number in range(2)}
    expected = set() if rotates or "deberta" in variant else biases
    assert still == expected


def test_a_key_bias_acts_in_deberta_whose_published_model_has_none():
    model, batch = tiny_model(position_encoding="deberta", key_bias=True), tiny_batch()
    model(batch, Draws.none(3, 2)).sums[0].backward()
    assert all(layer.attention.key.bias.grad.abs().max() > 1e-8 for layer in model.layers)
    assert all(layer.attention.key.bias is None for layer in tiny_model(position_encoding="deberta").layers)


@pytest.mark.parametrize("encoding", RELATIVE)
def test_a_shared_table_serves_all_layers_and_a_table_per_layer_only_its_own(encoding):
    batch = tiny_batch()
    shared = tiny_model(relative_table="shared", position_encoding=encoding)
    assert all(layer.position is None for layer in shared.layers)
    apart = tiny_model(relative_table="per-layer", position_encoding=encoding)
    assert apart.embeddings.position is None
    for number in range(2):
        apart.layers[number].position.load_state_dict(shared.embeddings.position.state_dict())
    state = {k: v for k, v in shared.state_dict().items() if not k.startswith("embeddings.position.")}
    assert not apart.load_state_dict(state, strict=False).unexpected_keys
    draws = some_draws(batch)
    sums = shared(batch, draws).sums, apart(batch, draws).sums
    torch.testing.assert_close(*sums, rtol=1e-12, atol=1e-12)
    for loss in sums:
        loss.sum().backward()
    for name, parameter in shared.embeddings.position.named_parameters():
        total = sum(dict(layer.position.named_parameters())[name].grad for layer in apart.layers)
        torch.testing.assert_close(parameter.grad, total, rtol=0, atol=1e-10)


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_position_parameter_moves_the_loss(variant):
    model, batch = tiny_model(**VARIANTS[variant]), tiny_batch()
    draws = some_draws(batch)
    before = model(batch, draws).sums.detach()
    for name, parameter in position_parameters(model).items():
        kept = parameter.detach().clone()
        with torch.no_grad():
            parameter.add_(torch.randn_like(parameter) * 0.1)
            assert (model(batch, draws).sums - before).abs()[[0, 2]].gt(1e-9).all(), name
            parameter.copy_(kept)


PADDED = tiny_batch(lengths=(7, 4, 2))
FULL = tiny_batch(lengths=(7, 7))
PACKED = packed_batch(tiny_batch(lengths=(7, 4, 2, 3)), [[0], [1, 2], [3]])
PACKED_FULL = packed_batch(tiny_batch(lengths=(4, 3, 7)), [[0, 1], [2]])
NOTHING_TO_PREDICT = tiny_batch(predicted=0)
BATCHES = {"padded": PADDED, "full": FULL, "packed": PACKED, "packed without padding": PACKED_FULL}
BATCHES |= {"nothing to predict": NOTHING_TO_PREDICT}


def count(batch):
    """The runs of a document or of padding as lists of flat places, the predicted ones, and whether a row restarts."""
    runs, predicted, restarts = {}, [], False
    rows, seq = batch.input_ids.shape
    for row in range(rows):
        for column in range(seq):
            place = row * seq + column
            number, position = int(batch.document_ids[row, column]), int(batch.position_ids[row, column])
            runs.setdefault((row, number), []).append(place)
            if number:
                restarts = restarts or (position != column and position != 0)
            if batch.labels[row, column] != IGNORED_LABEL:
                predicted.append(place)
    return list(runs.values()), predicted, restarts


@pytest.mark.parametrize("name", BATCHES)
def test_the_layout_is_what_counting_gives(name):
    batch = BATCHES[name]
    layout = layout_of(batch)
    runs, predicted, restarts = count(batch)
    assert layout.predicted.tolist() == predicted
    borders = layout.runs.tolist()
    assert [list(range(begin, end)) for begin, end in zip(borders, borders[1:], strict=False)] == runs
    assert layout.runs.dtype == torch.int32 and layout.longest == max(map(len, runs))
    assert layout.full == (len(runs) == len(batch.labels) and bool(batch.document_ids.all()))
    assert layout.restarts == restarts
    seq = batch.input_ids.shape[1]
    asked = (layout.queries + seq * torch.arange(len(layout.queries))[:, None]).flatten()
    assert asked[layout.answers].tolist() == predicted
    assert layout.queries.shape[1] == max(
        sum(place // seq == row for place in predicted) for row in range(len(batch.labels))
    )


@pytest.mark.parametrize("name", BATCHES)
def test_arrays_and_tensors_have_one_layout(name):
    batch = BATCHES[name]
    for one, other in zip(layout_of(batch), layout_of(batch.map(torch.Tensor.numpy)), strict=True):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))


def test_the_sum_equals_the_twin_and_counts_predicted_positions_alone(monkeypatch):
    model, batch = tiny_model(), tiny_batch()
    seen = []
    original = model.head.dense.forward
    monkeypatch.setattr(model.head.dense, "forward", lambda hidden: seen.append(hidden.shape) or original(hidden))
    got = model(batch, Draws.none(3, 2)).sums[0]
    torch.testing.assert_close(got, twin_sums(model, batch, Draws.none(3, 2))[0], rtol=1e-11, atol=0)
    assert seen == [(int((batch.labels != IGNORED_LABEL).sum()), 12)]


def test_input_and_output_embedding_share_storage():
    model = tiny_model()
    assert model.head.decoder.weight is model.embeddings.token.weight
    copy = build_model(tiny_config())
    copy.load_state_dict(model.state_dict())
    assert copy.head.decoder.weight is copy.embeddings.token.weight
    names = [name for name, parameter in model.named_parameters() if parameter is model.head.decoder.weight]
    assert names == ["embeddings.token.weight"]


def test_padding_of_the_vocabulary_is_never_predicted():
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


def test_a_vocabulary_without_padding_has_finite_logits():
    model = tiny_model(vocab_size=128)
    assert model.head.logits(torch.randn(5, 12, dtype=torch.float64)).isfinite().all()


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
