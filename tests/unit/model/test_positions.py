"""Each encoding's logits against its loop twin, in values and in every gradient; then by encoding.

Rotary positions: the twin is judged by complex numbers, ours by transformers. `--attention-init offsets` stands against
loops from its formula; a test shows what it makes heads attend to. ALiBi with fixed and with learned slopes, T5's bias,
the buckets of DeBERTa's version 2, how DDRP's D starts, and what does not decay.
"""

import math
import re

import pytest
import torch
from torch import nn

from megatron_ddrp.arguments import build_parser, parse_arguments
from megatron_ddrp.config import ENCODINGS, Config, ModelConfig, ObjectiveConfig, encoding_class
from megatron_ddrp.engine.build import build_optimizer, names_without_decay
from megatron_ddrp.engine.optimizers import OF_TABLES
from megatron_ddrp.model import build_model
from megatron_ddrp.model.attention import cpu
from megatron_ddrp.model.attention.backends import BACKENDS, attend_from
from megatron_ddrp.model.attention.logits import Attending, attention_logits
from megatron_ddrp.model.encoder import GAIN
from megatron_ddrp.model.positions import LayerPositions, PositionTerms
from megatron_ddrp.model.positions.absolute import Rotation, relative_bucket, set_theta
from megatron_ddrp.model.positions.biases import T5, Alibi, AlibiAsym, slopes
from megatron_ddrp.model.positions.tables import DIRECTION_INITS, SPREAD, Ddrp, DebertaV2, bucket
from megatron_ddrp.parallel.process_group import Ranks
from tests.reference import positions as twins
from tests.reference.positions import alibi_slopes, deberta_v2_buckets, deberta_v2_row, t5_bucket, turned
from tests.reference.tensors import assert_same, random, seeded
from tests.refusals import refused, wrong_arguments
from tests.unit.model.tiny import encode, tiny_batch, tiny_config, tiny_model, twin_scores

HEADS, SEQ, DIM = 3, 7, 4
RANKS = Ranks(0, 1, torch.device("cpu"))
TABLED = [name for name in ENCODINGS if (own := encoding_class(name)).is_relative and own.relative_distance]
"""Encodings that `--relative-distance` acts on."""
LIMITED = [name for name in ENCODINGS if encoding_class(name).limits_length]


class Encoding:
    """One encoding with one layer's part of it, every parameter random, and a query and key `[2, h, s, d]`."""

    def __init__(self, name, **changes):
        torch.manual_seed(0)
        self.name, self.config = name, tiny_config(position_encoding=name, **changes)
        self.table = encoding_class(name)(self.config).double()
        self.layer_part = encoding_class(name).layer_part(self.config).double()
        self.maps = [torch.nn.Linear(HEADS * DIM, HEADS * DIM).double() for _ in range(2)]
        parts = {"projections": self.layer_part}
        if self.layer_part.uses_maps:
            parts |= {"query": self.maps[0], "key": self.maps[1]}
        self.parameters = dict(self.table.named_parameters())
        for prefix, part in parts.items():
            self.parameters |= dict(part.named_parameters(prefix))
        with torch.no_grad():
            for parameter in self.parameters.values():
                parameter.copy_(torch.randn_like(parameter))
        self.seq = self.config.seq_length
        self.query, self.key = random(2, HEADS, self.seq, DIM), random(2, HEADS, self.seq, DIM)

    def at(self, places):
        """Terms, queries and keys of a batch of 2 by its position numbers `[s]`; without any one document a row."""
        places = (torch.arange(self.seq) if places is None else torch.tensor(places)).expand(2, -1)
        terms = self.table.terms(self.config, self.layer_part.of_layer(self.table(places), *self.maps))
        return terms, *(self.layer_part.rotate(states, places) for states in (self.query, self.key))

    def logits(self, places=None):
        terms, query, key = self.at(places)
        return attention_logits(query, key, terms)

    def twin(self, places):
        scores = twin_scores(self.name, self.table, self.layer_part, places, self.maps)
        return torch.stack([scores(query, key) for query, key in zip(self.query, self.key, strict=True)])


DISTANCES = {name: [1, 3, 4, SEQ, 12, 128] for name in TABLED} | {"deberta-v2": [2, 4, 6, 12, 128]}
"""Distances below, at and above the sequence; of `deberta-v2`, numbers of buckets, all, half and none of them wide."""


@pytest.mark.parametrize("name, distance", [(name, far) for name in ENCODINGS for far in DISTANCES.get(name, [4])])
def test_logits_equal_the_twin(name, distance):
    """r_s below, at and above the sequence."""
    encoding = Encoding(name, relative_distance=distance)
    inputs = [encoding.query, encoding.key, *encoding.parameters.values()]
    assert_same(encoding.logits(), encoding.twin(list(range(SEQ))), inputs, atol=1e-9)


@pytest.mark.parametrize("places", [[0, 1, 2, 0, 1, 2, 3], [0, 0, 1, 2, 3, 4, 0], [0, 1, 2, 3, 0, 1, 0]], ids=str)
@pytest.mark.parametrize("name", ENCODINGS)
def test_logits_of_packed_documents_equal_the_twin(name, places):
    """Within a document; pairs across documents are masked. TUPE unties the [CLS] of each."""
    encoding = Encoding(name)
    document = (torch.tensor(places) == 0).cumsum(0)
    pairs = document[:, None] == document
    fast, slow = encoding.logits(places)[..., pairs], encoding.twin(places)[..., pairs]
    assert_same(fast, slow, [encoding.query, encoding.key, *encoding.parameters.values()], atol=1e-9)


@pytest.mark.parametrize("distance", [1, 4, 5, 7, 8, 9, 10, 20, 32, 64, 128, 300, 512])
def test_buckets_equal_the_twin_far_beyond_the_last(distance):
    offsets = torch.arange(-600, 601)
    buckets = relative_bucket(offsets, distance)
    assert buckets.tolist() == [t5_bucket(offset, distance) for offset in offsets.tolist()]
    assert (buckets[offsets.abs() >= distance] % 16 == 15).all() and (distance < 9 or buckets.unique().numel() > 15)
    if distance == 64:
        assert not torch.equal(buckets, relative_bucket(offsets, 128))


@pytest.mark.parametrize("name", ["tupe-a", "tupe-r"])
def test_the_untied_bias_is_one_for_the_batch_unless_a_row_is_packed(name):
    encoding = Encoding(name)
    # Padding stands at position 0.
    for places, rows in ((None, 1), ([0, 1, 2, 0, 0, 0, 0], 1), ([0, 1, 2, 0, 1, 2, 3], 2)):
        assert encoding.at(places)[0].bias.shape == (rows, HEADS, SEQ, SEQ)


@pytest.mark.parametrize("relative_table", ["shared", "per-layer"])
@pytest.mark.parametrize("name", ENCODINGS)
def test_beyond_the_trained_length(name, relative_table):
    """Relative encodings go on; the others say in one line what they were given and what they can take."""
    assert LIMITED == ["absolute", "tupe-a", "tupe-r"]
    model = tiny_model(position_encoding=name, relative_table=relative_table, seq_length=6)
    batch = tiny_batch(lengths=(7,))
    if name not in LIMITED:
        assert encode(model, batch).isfinite().all()
        return
    assert "7" in str(refused("--seq-length 6", encode, model, batch))


@pytest.mark.parametrize("name", [name for name in ENCODINGS if name != "absolute"])
def test_an_absolute_embedding_acts_beside_any_encoding_and_limits_the_length(name):
    model, plain = (tiny_model(position_encoding=name, absolute_embedding=kind) for kind in (True, None))
    batch = tiny_batch()
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if k != "embeddings.absolute.weight"})
    states = encode(model, batch)
    assert not torch.allclose(states, encode(plain, batch))
    table = model.embeddings.absolute.weight
    (gradient,) = torch.autograd.grad(states.square().sum(), table)
    assert (gradient.abs().amax(-1) > 0).all() and table.shape == (7, 12)
    refused("8 tokens.*--seq-length 7", encode, model, tiny_batch(lengths=(8,), seq=8))


REFUSED = [
    *(
        ({"position_encoding": name, "relative_distance": 64}, f"^--.* 64 with .* {name}, .*: leave the d")
        for name in ("alibi", "alibi-asym", "nope", "rope")
    ),
    *(({"relative_distance": number}, f"^.* deberta-v2: .*got .* {number}: choose") for number in (1, 3, 255)),
    ({"position_encoding": "rope", "hidden_size": 15, "num_attention_heads": 3}, "^--.* rope: .* heads 5 wide: choose"),
    ({"attention_init": "offsets", "position_encoding": "ddrp"}, "give --absolute-embedding"),
    ({"attention_init": "offsets", "position_encoding": "absolute", "embedding_size": 6}, "--embedding-size"),
]
TOO_SHORT = {"query_table": (1, 3, 4), "key_table": (2, 3, 4), "offset_bias": (2, 3)}


def test_settings_that_no_encoding_can_have_and_tables_whose_rows_are_not_the_offsets_are_refused():
    error = wrong_arguments(".", parse_arguments, ["--position-encoding", "tupe"])
    assert all(re.search(rf"['\s]{name}[',) ]", str(error)) for name in ENCODINGS)
    for settings, message in REFUSED:
        refused(message, ModelConfig, **{"position_encoding": "deberta-v2"} | settings)
    for field, shape in TOO_SHORT.items():
        with pytest.raises(ValueError, match="a table of 3 rows for the 5 offsets lowest = -2 … highest = 2"):
            PositionTerms(1.0, lowest=-2, highest=2, **{field: torch.zeros(shape)})


def test_absolute_places_beside_no_encoding_make_a_bert():
    model, batch = tiny_model(position_encoding="nope", absolute_embedding=True), tiny_batch()
    bert = tiny_model(position_encoding="absolute")
    bert.load_state_dict(model.state_dict())
    assert torch.equal(encode(model, batch), encode(bert, batch))


ROTATION = Rotation(tiny_config(position_encoding="rope"))


def logits(query, key, places):
    query, key = (ROTATION.rotate(x, places.expand(len(x), -1)) for x in (query, key))
    return attention_logits(query, key, PositionTerms(0.5))


def test_the_twin_turns_as_complex_numbers_do_and_ours_as_one_pair_by_hand():
    """The first pair turns by a quarter at position π/2, the second, 100 times slower, hardly."""
    vector, rates = seeded(8), 10000.0 ** (-torch.arange(4).double() / 4)
    for place in (0, 1, 7, 511):
        numbers = torch.complex(vector[:4], vector[4:]) * torch.exp(1j * place * rates)
        expected = torch.cat((numbers.real, numbers.imag))
        torch.testing.assert_close(turned(vector, place), expected, rtol=0, atol=1e-12)
    states = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, 2.0], dtype=torch.float64).view(1, 1, 1, 6)
    got = ROTATION.rotate(states, torch.tensor([[torch.pi / 2]], dtype=torch.float64)).flatten()
    slow = math.pi / 2 / 10000 ** (4 / 6)
    expected = [0, 0, -2 * math.sin(slow), 1, 0, 2 * math.cos(slow)]
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)


def test_another_base_turns_as_a_model_of_that_base():
    model, wide, other = (tiny_model(position_encoding="rope", rope_theta=x) for x in (1e4, 160_000.0, 1e4))
    batch = tiny_batch(lengths=(9,))
    wide.load_state_dict(model.state_dict())
    set_theta(model, 160_000.0)
    assert torch.equal(encode(model, batch), encode(wide, batch))
    assert (encode(model, batch) - encode(other, batch)).abs().max() > 1e-6


def test_theta_is_the_configured_one_and_local_layers_keep_their_own():
    """Training may set another after construction."""
    rotation = Rotation(tiny_config(position_encoding="rope", rope_theta=100.0, local_rope_theta=9.0))
    vector = seeded(1, 1, 1, 8)
    for is_local, own, given, theta in (
        *((False, 9.0, 100.0, 100.0), (False, 9.0, 7.0, 7.0), (True, 9.0, 7.0, 9.0)),
        *((True, None, 5.0, 5.0), (False, None, 5.0, 5.0)),
    ):
        rotation.is_local, rotation.local_theta = is_local, own
        set_theta(rotation, given)
        got = rotation.rotate(vector, torch.tensor([[3]])).flatten()
        torch.testing.assert_close(got, turned(vector.flatten(), 3, theta), rtol=0, atol=1e-12)


def test_pairs_are_roformers_in_the_order_of_halves():
    modeling = pytest.importorskip("transformers.models.roformer.modeling_roformer")
    query, key = seeded(2, 3, 50, 8), seeded(2, 3, 50, 8, seed=1)
    table, places = modeling.RoFormerSinusoidalPositionalEmbedding(50, 8), torch.arange(50)
    table.weight = torch.nn.Parameter(table.create_weight(), requires_grad=False)
    turn = modeling.RoFormerSelfAttention.apply_rotary_position_embeddings
    theirs = attention_logits(*turn(table.weight.double()[None, None], query, key), PositionTerms(0.5))
    halves = [0, 2, 4, 6, 1, 3, 5, 7]
    torch.testing.assert_close(logits(query[..., halves], key[..., halves], places), theirs, rtol=0, atol=1e-4)
    assert (logits(query, key, places) - theirs).abs().max() > 0.1
    states, places = seeded(1, 2, 512, 64).bfloat16(), torch.arange(512)[None]
    got, exact = ROTATION.rotate(states, places), ROTATION.rotate(states.double(), places)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), exact, rtol=2**-8, atol=1e-3)  # one rounding: the tables are in fp32


SIZES = {"position_encoding": "absolute", "hidden_size": 24, "num_attention_heads": 3, "seq_length": 40}
OFFSETS = (-1, 1, -2)


def frequency(pair: int) -> float:
    return math.pi / 10 ** ((pair + 0.5) / 12)


def added(head: int, offset: int) -> torch.Tensor:
    """Return what the formula adds to the 8 rows of a head in W^Q, or with offset 0 to those in W^K."""
    rows = torch.zeros(8, 24, dtype=torch.float64)
    for place, pair in enumerate(range(head, 12, 3)):
        cos, sin = math.cos(frequency(pair) * offset), math.sin(frequency(pair) * offset)
        turn = torch.tensor([[cos, sin], [-sin, cos]], dtype=torch.float64)
        rows[2 * place : 2 * place + 2, 2 * pair : 2 * pair + 2] = GAIN * turn
    return rows


@pytest.mark.parametrize("objective", ["mlm", "electra", "rtd"])
def test_the_start_is_the_random_one_with_the_terms_of_the_formula(objective):
    settings = ObjectiveConfig(objective=objective)
    plain = tiny_model(objective=settings, **SIZES)
    ours = tiny_model(objective=settings, attention_init="offsets", **SIZES)
    changed = {n for n, p in plain.named_parameters() if not torch.equal(p, ours.get_parameter(n))}
    maps = {f"layers.{n}.attention.{name}.weight" for n in range(2) for name in ("query", "key")}
    assert changed == {"embeddings.absolute.weight", *maps}
    table = ours.get_parameter("embeddings.absolute.weight")
    for place in range(40):
        for pair in range(12):
            wave = [f(frequency(pair) * place + pair) * math.sqrt(2) * 0.4 for f in (math.sin, math.cos)]
            assert table[place, 2 * pair : 2 * pair + 2].tolist() == pytest.approx(wave, abs=1e-5)
    for name in maps:
        for head, offset in enumerate(OFFSETS):
            rows = slice(8 * head, 8 * head + 8)
            difference = ours.get_parameter(name)[rows] - plain.get_parameter(name)[rows]
            expected = added(head, offset if "query" in name else 0)
            torch.testing.assert_close(difference, expected, rtol=0, atol=1e-6)


def test_each_head_attends_to_its_offset_and_any_absolute_embedding_of_any_width_will_do():
    tiny_config(attention_init="offsets", position_encoding="ddrp", absolute_embedding=True)
    assert Config().model.attention_init == "normal"
    tiny_model(attention_init="offsets", **SIZES | {"hidden_size": 9, "num_attention_heads": 3})
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "seq_length": 128, "init_method_std": 0.05}
    model = tiny_model(attention_init="offsets", **SIZES | sizes)
    positions = torch.nn.functional.layer_norm(model.embeddings.absolute.weight, (128,))
    for layer in model.layers:
        query, key = layer.attention.query.weight, layer.attention.key.weight
        for head, offset in enumerate((-1, 1, -2, 2)):
            rows = slice(32 * head, 32 * head + 32)
            logits = (positions @ query[rows].T) @ (positions @ key[rows].T).T  # [places, places]
            places = [place for place in range(128) if 0 <= place + offset < 128]
            assert logits[places].argmax(1).tolist() == [place + offset for place in places]
            others = logits[places].clone()
            others[range(len(places)), [place + offset for place in places]] = -math.inf
            assert (others.amax(1) < 0.85 * logits[places].amax(1)).all()


def test_the_twins_by_hand():
    assert alibi_slopes(2) == [2**-4, 2**-8] and alibi_slopes(8) == [2**-k for k in range(1, 9)]
    rest = [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]
    assert alibi_slopes(12) == pytest.approx([2**-k for k in range(1, 9)] + rest, rel=1e-15)
    begins = [0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 23, 32, 46, 64, 91]
    assert [next(a for a in range(200) if t5_bucket(-a, 128) == row) for row in range(16)] == begins
    assert [t5_bucket(offset, 128) for offset in (0, 1, -1, 8, 127, 128, -500, 500)] == [0, 17, 1, 24, 31, 31, 15, 31]
    query = torch.tensor([[[2.0], [3.0]]], dtype=torch.float64)
    table = torch.arange(32, dtype=torch.float64)[:, None]
    assert twins.t5_scores(query, query, table, [0, 9], 128).tolist() == [[[4.0, 6.0 + 24], [6.0 + 8, 9.0]]]
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


@pytest.mark.parametrize("heads", [4, 12, 16])
def test_learned_slopes_start_as_the_symmetric_ones(heads):
    places = torch.arange(100)[None]
    config = ModelConfig(position_encoding="alibi-asym", num_attention_heads=heads, hidden_size=192)
    (ours,), (symmetric,) = AlibiAsym(config)(places), Alibi(config)(places)
    assert ours.dtype == torch.float32 and ours.shape == (heads, 199) and ours[:, 99].eq(0).all()
    torch.testing.assert_close(ours, symmetric, rtol=2e-6, atol=0)


@pytest.mark.parametrize(("table", "place"), [("shared", "embeddings"), ("per-layer", "layers.1")])
def test_weight_decay_spares_slopes_and_directions_and_no_other_table(table, place):
    for encoding, spared in (("alibi-asym", {"left", "right"}), ("ddrp", {"direction"}), ("t5", set())):
        names = names_without_decay(build_model(tiny_config(position_encoding=encoding, relative_table=table)))
        own = f"{place}.position."
        assert {name.removeprefix(own) for name in names if name.startswith(own)} == spared, encoding


def test_slopes_in_half_precision_give_a_bias_in_fp32():
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


def test_in_a_causal_phase_a_stage_of_a_pipeline_without_tables_has_as_many_groups():
    """ZeRO sums the norms of all stages group by group, and would wait for the group that is missing."""
    config = Config().replace(objective={"objective": "mlm", "objective_phases": "clm:0.5"})
    alone = []
    for encoding in ("bert-r", "nope"):
        model = tiny_model(position_encoding=encoding)
        groups = build_optimizer(model, config, RANKS).param_groups
        assert sum(len(group["params"]) for group in groups) == len(list(model.parameters())) and len(groups) == 3
        alone.append([groups[2]["weight_decay"], groups[2].get(OF_TABLES), len(groups[2]["params"])])
    assert alone == [[0.01, True, 1], [0.01, False, 1]]
