"""Each encoding's logits against its loop twin, and proofs that every row of every table serves its own pairs.

No positions: order changes nothing, and an absolute embedding beside it makes a BERT. Rotary positions: the twin is
judged by complex numbers, ours by transformers; only offsets count, nothing is learned. `--attention-init offsets`
stands against loops from its formula; a test shows what it makes heads attend to.
"""

import math
import re

import pytest
import torch

from megatron_ddrp.arguments import parse_arguments
from megatron_ddrp.config import ENCODINGS, Config, ModelConfig, ObjectiveConfig, encoding_class
from megatron_ddrp.model.attention.backends import attend_from, eager_attention
from megatron_ddrp.model.attention.logits import Attending, attention_logits
from megatron_ddrp.model.encoder import GAIN
from megatron_ddrp.model.positions import PositionTerms
from megatron_ddrp.model.positions.absolute import Rope, Rotation, relative_bucket, set_theta
from megatron_ddrp.model.positions.contract import reached_offsets
from tests.reference.positions import t5_bucket, tupe_bucket, turned
from tests.reference.tensors import assert_same, random, seeded
from tests.refusals import refused, wrong_arguments
from tests.unit.model.tiny import encode, tiny_batch, tiny_config, tiny_model, twin_scores

HEADS, SEQ, DIM = 3, 7, 4
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

    def terms(self, places=None):
        """The terms of a batch of 2, by its position numbers `[s]` (default: one document a row)."""
        places = torch.arange(self.seq) if places is None else torch.tensor(places)
        return self.table.terms(self.config, self.layer_part.of_layer(self.table(places.expand(2, -1)), *self.maps))

    def rotated(self, states, places=None):
        """Queries or keys `[2, h, s, d]` as attention takes them."""
        places = torch.arange(self.seq) if places is None else torch.tensor(places)
        return self.layer_part.rotate(states, places.expand(2, -1))

    def logits(self, places=None):
        query, key = self.rotated(self.query, places), self.rotated(self.key, places)
        return attention_logits(query, key, self.terms(places))

    def twin(self, places):
        scores = twin_scores(self.name, self.table, self.layer_part, places, self.maps)
        return torch.stack([scores(query, key) for query, key in zip(self.query, self.key, strict=True)])


DISTANCES = {"deberta-v2": [2, 4, 6, 12, 128]}
"""Distances below, at and above the sequence; of `deberta-v2`, numbers of buckets, all, half and none of them wide."""


@pytest.mark.parametrize(
    "name, relative_distance",
    [
        (name, distance)
        for name in ENCODINGS
        for distance in (DISTANCES.get(name, [1, 3, 4, SEQ, 12, 128]) if name in TABLED else [4])
    ],
)
def test_logits_equal_the_twin(name, relative_distance):
    """r_s below, at and above the sequence."""
    encoding = Encoding(name, relative_distance=relative_distance)
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


@pytest.mark.parametrize("name", ENCODINGS)
def test_attend_from_some_places_equals_those_rows_of_the_whole(name):
    encoding = Encoding(name)
    value, document_ids = random(2, HEADS, SEQ, DIM), torch.tensor([[1, 1, 1, 1, 2, 2, 2], [1, 1, 1, 1, 1, 0, 0]])
    position_ids = [0, 1, 2, 3, 0, 1, 2]
    terms = encoding.terms(position_ids)
    query, key = (encoding.rotated(x, position_ids) for x in (encoding.query, encoding.key))
    places = torch.tensor([[6, 1, 4], [0, 4, 2]])
    rows = places[:, None, :, None].expand(-1, HEADS, -1, DIM)
    none = torch.empty(0, dtype=torch.long)
    whole, _ = eager_attention(Attending(query, key, value, terms, document_ids, none))
    some = attend_from(query.gather(2, rows), key, value, terms, places, document_ids, 0.0)
    inputs = [encoding.query, encoding.key, value, *encoding.parameters.values()]
    assert_same(some, whole.gather(2, rows), inputs)


@pytest.mark.parametrize(("window", "reached"), [(0, "0 3 6"), (2, "012 12345 456"), (6, "0123456 0123456 0123456")])
def test_attend_from_reaches_both_ends_of_a_window_and_no_further(window, reached):
    """Equal logits: each key in reach has the same share of the context."""
    vector, terms = torch.zeros(1, 1, SEQ, SEQ, dtype=torch.float64), PositionTerms(1.0)
    value, places = torch.eye(SEQ, dtype=torch.float64)[None, None], torch.tensor([[0, 3, 6]])
    document_ids = torch.ones(1, SEQ, dtype=torch.long)
    got = attend_from(vector[:, :, :3], vector, value, terms, places, document_ids, 0.0, reached_offsets(window, False))
    for row, keys in zip(got[0, 0], reached.split(), strict=True):
        assert row.tolist() == pytest.approx([(str(key) in keys) / len(keys) for key in range(SEQ)])


def test_attend_from_reads_a_bias_that_all_heads_share():
    query, key, value = (random(2, HEADS, SEQ, DIM) for _ in range(3))
    terms = PositionTerms(0.3, bias=random(1, 1, SEQ, SEQ))
    document_ids, places = torch.ones(2, SEQ, dtype=torch.long), torch.tensor([[6, 1, 4], [0, 4, 2]])
    rows = places[:, None, :, None].expand(-1, HEADS, -1, DIM)
    whole, _ = eager_attention(Attending(query, key, value, terms, document_ids, torch.empty(0, dtype=torch.long)))
    some = attend_from(query.gather(2, rows), key, value, terms, places, document_ids, 0.0)
    assert_same(some, whole.gather(2, rows), [query, key, value, terms.bias])


@pytest.mark.parametrize("name", [name for name in ENCODINGS if Encoding(name).parameters])
def test_every_row_of_every_parameter_moves_the_logits(name):
    """Each row of each parameter draws a gradient, but for the buckets that no pair of 7 places reads in the twin."""
    encoding = Encoding(name, relative_distance=4)
    weight = torch.randn_like(encoding.logits())
    logits = encoding.logits(), encoding.twin(list(range(SEQ)))
    still, known = (still_rows((x * weight).sum(), encoding.parameters) for x in logits)
    assert still == known
    if name == "tupe-r":
        assert known.pop("relative") == unread_buckets()
    for parameter, rows in known.items():
        assert not rows or (name, parameter) in BUCKETED, "only tables of buckets have rows that wait"


BUCKETED = {("tupe-r", "relative"), ("t5", "relative"), ("deberta-v2", "relative")}


def still_rows(total, parameters):
    """Rows of each parameter that `total` gives no gradient."""
    gradients = torch.autograd.grad(total, list(parameters.values()))
    still = ((x.abs() < 1e-9).reshape(len(x), -1).all(-1).nonzero().flatten().tolist() for x in gradients)
    return dict(zip(parameters, still, strict=True))


def unread_buckets():
    """Rows of TUPE-R's table that no pair of 7 places reads at distance 4."""
    return sorted(set(range(33)) - {tupe_bucket(i, j, 4) for i in range(SEQ) for j in range(SEQ)})


def pairs_of_row(name, parameter, row, seq):
    """bool `[s, s]`: the pairs which one row of a table serves, by the paper."""
    place = torch.arange(seq)
    i, j = place[:, None], place[None, :]
    if name == "ddrp" and parameter == "direction":
        return [i == j, i < j, i > j][row]
    if name == "ddrp":
        return (i - j).abs().clamp_max(3) == row
    if parameter == "relative" and name in ("bert-r", "deberta"):
        return (i - j).clamp(-4, 3) + 4 == row
    if name == "tupe-r" and parameter == "relative":
        return torch.tensor([[tupe_bucket(a, b) == row for b in range(seq)] for a in range(seq)])
    assert parameter == "table"
    words = (i > 0) & (j > 0)
    if row == 0:
        return (i == 0).expand(seq, seq)
    return (i > 0) & (j == 0) if row == 1 else words & ((i == row - 1) | (j == row - 1))


@pytest.mark.parametrize(
    "name, parameter, seq",
    [
        ("ddrp", "direction", 7),
        ("ddrp", "distance", 7),
        ("bert-r", "relative", 7),
        ("deberta", "relative", 7),
        ("tupe-a", "table", 7),
        ("tupe-r", "table", 7),
        ("tupe-r", "relative", 100),  # far enough for every bucket
    ],
)
def test_each_row_moves_exactly_its_own_pairs(name, parameter, seq):
    encoding = Encoding(name, relative_distance=128 if seq == 100 else 4, seq_length=seq)
    with torch.no_grad():
        before, table = encoding.logits(), encoding.parameters[parameter]
        for row in range(len(table)):
            kept = table[row].clone()
            table[row] += torch.randn_like(kept)
            moved = (encoding.logits() - before).abs().amax((0, 1)) > 1e-9
            table[row] = kept
            of_row = pairs_of_row(name, parameter, row, seq)
            assert of_row.any() and torch.equal(moved, of_row), row


@pytest.mark.parametrize("distance", [1, 4, 7, 8, 9, 10, 64, 128, 300])
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
    assert encoding.terms().bias.shape == (1, HEADS, SEQ, SEQ)
    assert encoding.terms([0, 1, 2, 0, 0, 0, 0]).bias.shape[0] == 1  # padding stands at position 0
    assert encoding.terms([0, 1, 2, 0, 1, 2, 3]).bias.shape[0] == 2


def test_encodings_bounded_by_the_trained_length_and_the_legal_ones():
    assert LIMITED == ["absolute", "tupe-a", "tupe-r"]
    error = wrong_arguments(".", parse_arguments, ["--position-encoding", "tupe"])
    assert all(re.search(rf"['\s]{name}[',) ]", str(error)) for name in ENCODINGS)


@pytest.mark.parametrize("relative_table", ["shared", "per-layer"])
@pytest.mark.parametrize("name", ENCODINGS)
def test_beyond_the_trained_length(name, relative_table):
    """Relative encodings go on; the others say in one line what they were given and what they can take."""
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


WITHOUT_DISTANCE = ["alibi", "alibi-asym", "nope", "rope"]
REFUSED = [
    *(
        ({"position_encoding": name, "relative_distance": 64}, f"^--.* 64 with .* {name}, .*: leave the d")
        for name in WITHOUT_DISTANCE
    ),
    *(
        ({"position_encoding": "deberta-v2", "relative_distance": number}, f"^.* deberta-v2: .*got .* {number}: choose")
        for number in (1, 3, 255)
    ),
    ({"position_encoding": "rope", "hidden_size": 15, "num_attention_heads": 3}, "^--.* rope: .* heads 5 wide: choose"),
    ({"attention_init": "offsets", "position_encoding": "ddrp"}, "give --absolute-embedding"),
    ({"attention_init": "offsets", "position_encoding": "absolute", "embedding_size": 6}, "--embedding-size"),
]


@pytest.mark.parametrize("settings, message", REFUSED)
def test_settings_that_no_encoding_can_have_are_refused_in_one_line(settings, message):
    refused(message, ModelConfig, **settings)


TOO_SHORT = [("query_table", (1, 3, 4)), ("key_table", (2, 3, 4)), ("offset_bias", (2, 3))]


@pytest.mark.parametrize("field, shape", TOO_SHORT)
def test_a_table_whose_rows_are_not_the_offsets_is_refused(field, shape):
    with pytest.raises(ValueError, match="a table of 3 rows for the 5 offsets lowest = -2 … highest = 2"):
        PositionTerms(1.0, lowest=-2, highest=2, **{field: torch.zeros(shape)})


def test_a_document_in_any_order_has_the_same_states_and_absolute_places_make_a_bert():
    model, batch = tiny_model(position_encoding="nope"), tiny_batch(lengths=(7, 4))
    order = torch.tensor([3, 0, 2, 1, 6, 4, 5])  # of both rows, padding stays where it is
    permuted = batch._replace(input_ids=batch.input_ids[:, order], segment_ids=batch.segment_ids[:, order])
    states = encode(model, batch)[:, order]
    torch.testing.assert_close(encode(model, permuted), states, rtol=0, atol=1e-12)
    assert not [name for name in model.state_dict() if "position" in name]
    model, bert = (tiny_model(**changes) for changes in (NOPE_WITH_PLACES, {"position_encoding": "absolute"}))
    bert.load_state_dict(model.state_dict())
    assert torch.equal(encode(model, tiny_batch()), encode(bert, tiny_batch()))


NOPE_WITH_PLACES = {"position_encoding": "nope", "absolute_embedding": True}
ROTATION = Rotation(tiny_config(position_encoding="rope"))


def logits(query, key, places):
    query, key = (ROTATION.rotate(x, places.expand(len(x), -1)) for x in (query, key))
    return attention_logits(query, key, PositionTerms(0.5))


@pytest.mark.parametrize("place", [0, 1, 7, 511])
def test_the_twin_turns_as_complex_numbers_do(place):
    vector = seeded(8)
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


def test_only_offsets_count_values_are_not_turned_and_nothing_is_learned():
    query, key = seeded(2, 3, 7, 4), seeded(2, 3, 7, 4, seed=1)
    near = logits(query, key, torch.arange(7))
    torch.testing.assert_close(logits(query, key, torch.arange(7) + 5000), near, rtol=0, atol=1e-11)
    assert (
        (logits(query, key, 2 * torch.arange(7)) - near).abs().amax((0, 1)).gt(1e-3).logical_xor(torch.eye(7) > 0).all()
    )
    # Attention to oneself alone gives the value as it is, wherever one stands.
    model, batch = tiny_model(position_encoding="rope"), tiny_batch(lengths=(1,))
    moved = batch._replace(position_ids=batch.position_ids + 3)
    torch.testing.assert_close(encode(model, moved), encode(model, batch), rtol=0, atol=1e-12)
    model = tiny_model(position_encoding="rope")
    assert not [name for name in model.state_dict() if "position" in name]
    assert (Rope.in_logits, Rope.is_relative) == (False, True)


def test_theta_is_the_configured_one_and_local_layers_keep_their_own():
    """Training may set another after construction."""
    config = tiny_config(position_encoding="rope", rope_theta=100.0, local_rope_theta=9.0)
    rotation, vector = Rotation(config), seeded(1, 1, 1, 8)

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
    rotation = Rotation(tiny_config(position_encoding="rope", rope_theta=99.0))
    states, places = seeded(1, 1, 5, 4), torch.arange(5)[None]
    rotation.local_theta, rotation.is_local = 7.0, True
    local = rotation.rotate(states, places)
    set_theta(rotation, 5.0)
    assert torch.equal(rotation.rotate(states, places), local)
    rotation.is_local = False
    expected = torch.stack([turned(vector, place, 5.0) for place, vector in enumerate(states[0, 0])])
    torch.testing.assert_close(rotation.rotate(states, places)[0, 0], expected, rtol=0, atol=1e-12)


def test_half_split_pairs_are_those_of_modernbert_and_roformers_in_its_order():
    modeling = pytest.importorskip("transformers.models.modernbert.modeling_modernbert")
    query, key, places = seeded(2, 3, 50, 8).float(), seeded(2, 3, 50, 8, seed=1).float(), torch.arange(50)
    angle = places[:, None] * 10000.0 ** (-torch.arange(4) / 4)
    cos, sin = (torch.cat((x, x), -1).expand(2, -1, -1) for x in (angle.cos(), angle.sin()))
    for ours, theirs in zip((query, key), modeling.apply_rotary_pos_emb(query, key, cos, sin), strict=True):
        torch.testing.assert_close(ROTATION.rotate(ours, places.expand(2, -1)), theirs, rtol=0, atol=1e-5)
    modeling = pytest.importorskip("transformers.models.roformer.modeling_roformer")
    query, key = seeded(2, 3, 50, 8), seeded(2, 3, 50, 8, seed=1)
    table = modeling.RoFormerSinusoidalPositionalEmbedding(50, 8)
    table.weight = torch.nn.Parameter(table.create_weight(), requires_grad=False)
    turn = modeling.RoFormerSelfAttention.apply_rotary_position_embeddings
    theirs = attention_logits(*turn(table.weight.double()[None, None], query, key), PositionTerms(0.5))
    halves = [0, 2, 4, 6, 1, 3, 5, 7]
    torch.testing.assert_close(logits(query[..., halves], key[..., halves], places), theirs, rtol=0, atol=1e-4)
    assert (logits(query, key, places) - theirs).abs().max() > 0.1


def test_half_precision_is_turned_by_tables_in_fp32():
    states, places = seeded(1, 2, 512, 64).bfloat16(), torch.arange(512)[None]
    exact = ROTATION.rotate(states.double(), places)
    got = ROTATION.rotate(states, places)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), exact, rtol=2**-8, atol=1e-3)  # one rounding of the result


SIZES = {"position_encoding": "absolute", "hidden_size": 24, "num_attention_heads": 3, "seq_length": 40}
OFFSETS = (-1, 1, -2)


def frequency(pair: int) -> float:
    return math.pi / 10 ** ((pair + 0.5) / 12)


def added(head: int, offset: int) -> list[list[float]]:
    """Return what the formula adds to the 8 rows of a head in W^Q, or with offset 0 to those in W^K."""
    rows = [[0.0] * 24 for _ in range(8)]
    for place, pair in enumerate(range(head, 12, 3)):
        turn = frequency(pair) * offset
        rows[2 * place][2 * pair], rows[2 * place][2 * pair + 1] = math.cos(turn), math.sin(turn)
        rows[2 * place + 1][2 * pair], rows[2 * place + 1][2 * pair + 1] = -math.sin(turn), math.cos(turn)
    return [[GAIN * x for x in row] for row in rows]


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
            expected = torch.tensor(added(head, offset if "query" in name else 0), dtype=torch.float64)
            torch.testing.assert_close(difference, expected, rtol=0, atol=1e-6)


def test_each_head_attends_to_its_offset():
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


def test_positions_that_heads_can_read_come_from_any_absolute_embedding_of_any_width():
    tiny_config(attention_init="offsets", position_encoding="ddrp", absolute_embedding=True)
    assert Config().model.attention_init == "normal"
    tiny_model(attention_init="offsets", **SIZES | {"hidden_size": 9, "num_attention_heads": 3})
