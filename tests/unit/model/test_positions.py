"""Each encoding's logits against its loop twin, and proofs that every row of every table serves its own pairs."""

import re

import pytest
import torch

from megatron_ddrp.arguments import parse_arguments
from megatron_ddrp.config import ENCODINGS, encoding_class
from megatron_ddrp.errors import UserError
from megatron_ddrp.model.attention.backends import attend_from, eager_attention
from megatron_ddrp.model.attention.logits import Attending, attention_logits
from megatron_ddrp.model.positions import PositionTerms
from megatron_ddrp.model.positions.absolute import relative_bucket
from tests.reference.tensors import assert_same, random
from tests.reference.tupe import t5_bucket, tupe_bucket
from tests.unit.model.tiny import encode, tiny_batch, tiny_config, tiny_model
from tests.unit.model.twins import twin_scores

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
    got = attend_from(vector[:, :, :3], vector, value, terms, places, document_ids, 0.0, window)
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


def test_encodings_bounded_by_the_trained_length():
    assert LIMITED == ["absolute", "tupe-a", "tupe-r"]


@pytest.mark.parametrize("relative_table", ["shared", "per-layer"])
@pytest.mark.parametrize("name", ENCODINGS)
def test_beyond_the_trained_length(name, relative_table):
    """Relative encodings go on; the others say in one line what they were given and what they can take."""
    model = tiny_model(position_encoding=name, relative_table=relative_table, seq_length=6)
    batch = tiny_batch(lengths=(7,))
    if name not in LIMITED:
        assert encode(model, batch).isfinite().all()
        return
    with pytest.raises(UserError) as caught:
        encode(model, batch)
    message = str(caught.value)
    assert "7" in message and "--seq-length 6" in message and "\n" not in message


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
    with pytest.raises(UserError, match="8 tokens.*--seq-length 7"):
        encode(model, tiny_batch(lengths=(8,), seq=8))


def test_an_unknown_encoding_is_refused_with_the_legal_ones_in_one_line():
    with pytest.raises(UserError) as end:
        parse_arguments(["--position-encoding", "tupe"])
    error = str(end.value)
    assert end.value.exit_code == 2 and "\n" not in error
    assert all(re.search(rf"['\s]{name}[',) ]", error) for name in ENCODINGS)


TOO_SHORT = [("query_table", (1, 3, 4)), ("key_table", (2, 3, 4)), ("offset_bias", (2, 3))]


@pytest.mark.parametrize("field, shape", TOO_SHORT)
def test_a_table_whose_rows_are_not_the_offsets_is_refused(field, shape):
    with pytest.raises(ValueError, match="a table of 3 rows for the 5 offsets lowest = -2 … highest = 2"):
        PositionTerms(1.0, lowest=-2, highest=2, **{field: torch.zeros(shape)})
