"""Encodings by distance: ALiBi with fixed and with learned slopes, T5's bias, DeBERTa's attention as of version 2
(buckets by fractions and by transformers, encoders by transformers), how DDRP's D starts, and what does not decay.

The tests over the registry compare logits, losses and gradients with the twins, packed and not, and over ranks.
"""

import pytest
import torch
from torch import nn

from megatron_ddrp.arguments import build_parser
from megatron_ddrp.config import Config, ModelConfig
from megatron_ddrp.engine.build import build_optimizer, names_without_decay
from megatron_ddrp.model import build_model, count_parameters, on_meta_device
from megatron_ddrp.model.attention import cpu
from megatron_ddrp.model.attention.backends import BACKENDS, attend_from
from megatron_ddrp.model.attention.logits import Attending, attention_logits
from megatron_ddrp.model.positions import LayerPositions, PositionTerms
from megatron_ddrp.model.positions.biases import T5, Alibi, AlibiAsym, slopes
from megatron_ddrp.model.positions.tables import DIRECTION_INITS, SPREAD, Ddrp, DebertaV2, bucket
from megatron_ddrp.parallel.process_group import Ranks
from tests.reference.positions import alibi_slopes, deberta_v2_buckets, deberta_v2_row, t5_bucket, t5_scores
from tests.unit.model.tiny import some_draws, tiny_batch, tiny_config, tiny_model


def test_the_twins_by_hand():
    assert alibi_slopes(2) == [2**-4, 2**-8] and alibi_slopes(8) == [2**-k for k in range(1, 9)]
    rest = [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]
    assert alibi_slopes(12) == pytest.approx([2**-k for k in range(1, 9)] + rest, rel=1e-15)
    begins = [0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 23, 32, 46, 64, 91]
    assert [next(a for a in range(200) if t5_bucket(-a, 128) == row) for row in range(16)] == begins
    assert [t5_bucket(offset, 128) for offset in (0, 1, -1, 8, 127, 128, -500, 500)] == [0, 17, 1, 24, 31, 31, 15, 31]
    query = torch.tensor([[[2.0], [3.0]]], dtype=torch.float64)
    table = torch.arange(32, dtype=torch.float64)[:, None]
    assert t5_scores(query, query, table, [0, 9], 128).tolist() == [[[4.0, 6.0 + 24], [6.0 + 8, 9.0]]]
    # Half of 8 buckets is exact; (|x| / 4)^3 in powers of 31 / 4 says which of the wide ones a distance has.
    assert deberta_v2_buckets(8, 32) == [0, 1, 2, 3, 4, *[5] * 3, *[6] * 8, *[7] * 16]
    found = [deberta_v2_row(x, 8, deberta_v2_buckets(8, 32)) for x in (-100, -31, -5, 0, 4, 5, 31, 100)]
    assert found == [1, 1, 3, 8, 12, 13, 15, 15]
    released = deberta_v2_buckets(256, 512)
    assert released[:132] == list(range(132)) and released[132] == 131 and released.index(255) == 506


def test_slopes_equal_the_twins_for_whole_models_and_for_parts_and_the_bias_is_exact_in_every_precision():
    for heads in (1, 2, 3, 4, 5, 6, 12, 16, 20, 25):
        got = slopes(torch.arange(heads), heads)
        torch.testing.assert_close(got, torch.tensor(alibi_slopes(heads), dtype=torch.float64), rtol=1e-14, atol=0)
        part = slopes(torch.arange(heads // 2, heads), heads)
        assert torch.equal(part.float(), got[heads // 2 :].float())
    offset = torch.arange(-699, 700)  # at lengths beyond the trained one
    exact = torch.stack([-slope * offset.abs().double() for slope in alibi_slopes(8)])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        encoding = Alibi(ModelConfig(position_encoding="alibi", num_attention_heads=8, seq_length=16)).to(dtype)
        (bias,) = encoding(torch.zeros(2, 700, dtype=torch.long))
        assert bias.dtype == torch.float32 and torch.equal(bias.double(), exact)


@pytest.mark.parametrize("backend", [*BACKENDS, "attend_from"])
def test_every_backend_takes_the_wide_bias_with_narrow_queries(backend):
    torch.manual_seed(0)
    config = tiny_config(position_encoding="alibi", num_attention_heads=4, hidden_size=16)
    encoding, ids = Alibi(config), torch.ones(1, 300, dtype=torch.long)
    query, key, value = (torch.randn(1, 4, 300, 4).bfloat16() for _ in range(3))
    terms, none = encoding.terms(config, encoding(ids)), torch.empty(0, dtype=torch.long)
    expected, _ = BACKENDS["eager"](Attending(query.double(), key.double(), value.double(), terms, ids, none))
    if backend == "attend_from":
        got = attend_from(query, key, value, terms, torch.arange(300)[None], ids, 0.0)
    else:
        got, _ = BACKENDS[backend](Attending(query, key, value, terms, ids, none))
    assert got.dtype == torch.bfloat16
    assert (got.double() - expected).norm() < 1e-2 * expected.norm()


def test_hcd_does_not_see_the_bias_and_nothing_is_learned_or_stored():
    """Equal heads have the cosine 1 however their slopes differ."""
    model, batch = tiny_model(position_encoding="alibi"), tiny_batch(lengths=(7,))
    with torch.no_grad():
        for each in (part for layer in model.layers for part in (layer.attention.query, layer.attention.key)):
            each.weight.copy_(each.weight[:4].repeat(3, 1))
            each.bias.copy_(each.bias[:4].repeat(3))
    cosines = model(batch, some_draws(batch)).sums[2]
    torch.testing.assert_close(cosines, torch.ones_like(cosines), rtol=0, atol=1e-12)
    assert not [name for name in model.state_dict() if "position" in name]


@pytest.mark.parametrize("heads", [4, 12, 16])
def test_learned_slopes_start_as_the_symmetric_ones(heads):
    places = torch.arange(100)[None]
    config = ModelConfig(position_encoding="alibi-asym", num_attention_heads=heads, hidden_size=192)
    (ours,), (symmetric,) = AlibiAsym(config)(places), Alibi(config)(places)
    assert ours.dtype == torch.float32 and ours.shape == (heads, 199) and ours[:, 99].eq(0).all()
    torch.testing.assert_close(ours, symmetric, rtol=2e-6, atol=0)


def test_slopes_do_not_decay_and_give_a_bias_in_fp32():
    for table, place in (("shared", "embeddings"), ("per-layer", "layers.1")):
        model = build_model(tiny_config(position_encoding="alibi-asym", relative_table=table))
        assert {f"{place}.position.left", f"{place}.position.right"} <= names_without_decay(model)
    assert "embeddings.position.relative" not in names_without_decay(build_model(tiny_config(position_encoding="t5")))
    encoding = AlibiAsym(tiny_config(position_encoding="alibi-asym")).bfloat16()
    (bias,) = encoding(torch.arange(7)[None])
    bias.sum().backward()
    assert bias.dtype == torch.float32 and encoding.left.grad.dtype == torch.bfloat16


def test_the_bias_is_that_of_t5_to_the_last_bit():
    transformers = pytest.importorskip("transformers")
    modeling = pytest.importorskip("transformers.models.t5.modeling_t5")
    sizes = transformers.T5Config(d_model=12, num_heads=3, d_kv=4)
    theirs = modeling.T5Attention(sizes, has_relative_attention_bias=True)
    config = tiny_config(position_encoding="t5", relative_distance=128)
    own, zeros = T5(config).double(), torch.zeros(1, 3, 300, 4, dtype=torch.float64)
    theirs.relative_attention_bias.weight.data = own.relative.data
    ours = attention_logits(zeros, zeros, own.terms(config, own(torch.arange(300)[None])))
    assert torch.equal(ours, theirs.compute_bias(300, 300))


@pytest.mark.parametrize(("name", "count", "distance"), [("t5", 32 * 12, 128), ("deberta-v2", (512 + 2) * 768, 256)])
def test_parameters_of_the_base_model_and_the_default_distance(name, count, distance):
    """T5's table, DeBERTa's and its LayerNorm; per layer 12 times as many."""
    for table, times in (("shared", 1), ("per-layer", 12)):
        config = ModelConfig(position_encoding=name, relative_table=table)
        assert count_parameters(on_meta_device(config))[1] == times * count
    assert (config.relative_distance, config.deberta_emd) == (distance, None)
    assert build_model(tiny_config(position_encoding=name)).mask_decoder is None


RELEASED = [(256, 512), (128, 512), (32, 128), (256, 1024), (64, 512)]


@pytest.mark.parametrize("number, longest", [*RELEASED, (8, 7), (8, 32), (2, 9), (4, 5), (6, 4), (12, 7)])
def test_buckets_equal_the_twin_those_of_transformers_and_larger_distances_have_the_last(number, longest):
    offset, table = torch.arange(-longest - 50, longest + 51), deberta_v2_buckets(number, longest)
    found = bucket(offset, number, longest)
    assert (found + number).tolist() == [deberta_v2_row(x, number, table) for x in offset.tolist()]
    if (number, longest) in RELEASED:
        modeling = pytest.importorskip("transformers.models.deberta_v2.modeling_deberta_v2")
        theirs = modeling.make_log_bucket_position(offset[51:-51], number, longest)
        assert found[51:-51].tolist() == theirs.long().tolist()


def test_a_row_reads_no_more_of_the_table_than_its_offsets_need():
    encoding = DebertaV2(tiny_config(position_encoding="deberta-v2", relative_distance=8, seq_length=7))
    for length in (1, 3, 7, 12):
        states, table_row = encoding(torch.zeros(1, length, dtype=torch.long))
        needed = encoding.norm(encoding.relative)[bucket(torch.arange(1 - length, length), 8, 7) + 8]
        assert torch.equal(states[table_row], needed)
        assert states.shape == (int(table_row.max()) + 1, 12) and table_row.min() == 0


NAMES = {
    "embeddings.token.weight": "embeddings.word_embeddings.weight",
    "embeddings.norm": "embeddings.LayerNorm",
    "embeddings.position.relative": "encoder.rel_embeddings.weight",
    "embeddings.position.norm": "encoder.LayerNorm",
    "layers.": "encoder.layer.",
    "attention.query": "attention.self.query_proj",
    "attention.key": "attention.self.key_proj",
    "attention.value": "attention.self.value_proj",
    "attention.output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "feed_forward.input": "intermediate.dense",
    "feed_forward.output": "output.dense",
    "feed_forward_norm": "output.LayerNorm",
}
"""Part of our names → part of transformers' names."""


def test_hidden_states_are_those_of_transformers():
    """In float64, with random weights, merged buckets and a padded row."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 12, "num_attention_heads": 3, "vocab_size": 128}
    sizes |= {"num_hidden_layers": 2, "intermediate_size": 10, "max_position_embeddings": 64, "position_buckets": 16}
    sizes |= {"relative_attention": True, "max_relative_positions": -1, "norm_rel_ebd": "layer_norm"}
    sizes |= {"share_att_key": True, "pos_att_type": "p2c|c2p", "position_biased_input": False, "type_vocab_size": 0}
    sizes |= {"layer_norm_eps": 1e-7, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    configuration = transformers.DebertaV2Config(**sizes, attn_implementation="eager")
    theirs = transformers.DebertaV2Model(configuration).double().eval()
    changes = {"position_encoding": "deberta-v2", "relative_distance": 16, "seq_length": 64, "vocab_size": 128}
    ours = tiny_model(**changes, layernorm_epsilon=1e-7)
    with torch.no_grad():
        ours.embeddings.segment.weight.zero_()
        for parameter in theirs.parameters():
            parameter.normal_(std=0.3)
    state = theirs.state_dict()
    for name, parameter in ours.named_parameters():
        if not name.startswith(("head.", "embeddings.segment")):
            for mine, other in NAMES.items():
                name = name.replace(mine, other)
            parameter.data.copy_(state.pop(name))
    assert not state, list(state)
    length = 40  # more than 3 · 8
    ids, mask = torch.randint(1, 128, (2, length)), torch.ones(2, length, dtype=torch.long)
    mask[1, 31:] = 0
    expected = theirs(ids, attention_mask=mask).last_hidden_state
    got = ours.encode(ids, torch.zeros_like(ids), mask, torch.arange(length) * mask)
    difference = (got - expected)[mask.bool()].abs().max()
    assert difference < 1e-7, difference


NEAR = torch.arange(-99, 100).abs().clamp(max=30)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("row", [bucket(torch.arange(-99, 100), 16, 100) + 15, NEAR, 30 - NEAR])
def test_tiles_and_runs_of_keys_that_read_some_buckets_alone_equal_the_whole(row, window, monkeypatch):
    monkeypatch.setattr(cpu, "RUN_OF_KEYS", 16)
    monkeypatch.setattr(cpu, "TILE_ELEMENTS", 1)
    torch.manual_seed(0)
    tables = [torch.randn(2, 31, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    vectors = [torch.randn(2, 2, 100, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    terms = PositionTerms(0.3, *tables, lowest=-99, highest=99, table_row=row)
    ids = (torch.arange(100) < torch.tensor([[100], [71]])).long()
    attending = Attending(*vectors, terms, ids, torch.tensor([0, 1]), window=window)
    weight, inputs = torch.randn(2, 2, 100, 4) * ids[:, None, :, None], [*vectors, *tables]
    found = []
    for backend in ("eager", "blocked"):
        context, cosine = BACKENDS[backend](attending)
        found.append([context * ids[:, None, :, None], *torch.autograd.grad((context * weight).sum() + cosine, inputs)])
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10)


RANKS = Ranks(0, 1, torch.device("cpu"))


def test_d_is_drawn_around_one_number_and_left_and_right_start_apart_under_spread_alone():
    action = next(a for a in build_parser()._actions if a.dest == "direction_init")
    starts = {"ones": (1, 0.02), "spread": (1, SPREAD), "free": (0, 1), "embedding": (0, 0.02)}
    assert set(action.choices) == set(DIRECTION_INITS) == set(starts)
    cosines = {}
    for start, (mean, deviation) in starts.items():
        torch.manual_seed(0)
        model = Ddrp(ModelConfig(direction_init=start))
        count, reach = model.direction.numel(), len(model.distance) - 1
        assert abs(model.direction.mean() - mean) < 5 * deviation / count**0.5
        assert abs(model.direction.std() - deviation) < 5 * deviation / (2 * count) ** 0.5
        (table,) = model(torch.zeros(1, 1, dtype=torch.int64))
        steps = torch.arange(1, reach + 1)
        cosines[start] = torch.cosine_similarity(table[0, reach + steps], table[0, reach - steps], dim=-1).mean()
    assert 0.7 < cosines["spread"] < 0.9 and 0.99 < cosines["ones"] < 1.0


@pytest.mark.parametrize("table", ["shared", "per-layer"])
def test_weight_decay_leaves_d_alone_and_shrinks_the_distances(table):
    sizes = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 9, "seq_length": 5}
    model = build_model(ModelConfig(**sizes, relative_table=table))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = build_optimizer(model, Config().replace(optimizer={"weight_decay": 0.5, "lr": 0.1}), RANKS)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        is_spared = name.endswith((".bias", ".direction")) or "norm." in name
        factor = 1.0 if is_spared else 0.95  # 1 - lr * decay
        torch.testing.assert_close(parameter.detach(), factor * before[name], rtol=1e-6, atol=0)
    kept, spared = {name for name in before if name.endswith(".direction")}, names_without_decay(model)
    assert len(kept) == (1 if table == "shared" else 2) and spared >= kept
    assert not [name for name in spared if name.endswith(".distance")]


class Part(LayerPositions):
    gains = frozenset({"factor"})

    def __init__(self, config):
        super().__init__(config)
        self.factor, self.other = (nn.Parameter(torch.ones(3)) for _ in range(2))


class Plugged(nn.Module):
    def __init__(self):
        super().__init__()
        self.scaling, self.squares = nn.LayerNorm(3), nn.RMSNorm(3)
        self.map, self.part = nn.Linear(3, 3), Part(ModelConfig())


def test_weight_decay_spares_norms_of_any_name_and_the_gains_of_a_layer_part():
    model = Plugged()
    decayed, spared = (group["params"] for group in build_optimizer(model, Config(), RANKS).param_groups)
    expected = ["scaling.weight", "scaling.bias", "squares.weight", "map.bias", "part.factor"]
    assert {id(x) for x in spared} == {id(model.get_parameter(name)) for name in expected}
    assert {id(x) for x in decayed} == {id(model.map.weight), id(model.part.other)}
