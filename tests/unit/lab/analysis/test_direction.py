"""The probe of attention and the cosines of tables: against loops in float64, and where the answer is known."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from megatron_ddrp.config import ENCODINGS
from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.errors import UserError
from megatron_ddrp.lab.analysis import probe
from megatron_ddrp.lab.analysis.figures import near_and_far, table_cosines
from megatron_ddrp.lab.analysis.probe import measure_probe, shuffle_text
from tests.reference import analyses
from tests.unit.lab.analysis.test_measures import twin_sentences
from tests.unit.model.tiny import tiny_batch, tiny_model

CLS, SEP, TEXT = 1, 2, 3


def sentences(rows, seq=None):
    """A batch of rows of text tokens between [CLS] and [SEP]."""
    seq = seq or 2 + max(map(len, rows))
    ids = torch.tensor([[CLS, *row, SEP] + [0] * (seq - 2 - len(row)) for row in rows])
    document_ids = (ids > 0).long()
    nothing = torch.zeros_like(ids)
    return Batch(ids, nothing - 1, document_ids, torch.arange(seq) * document_ids, nothing, nothing)


def cut(batch, size):
    """The batch in pieces of `size` sentences."""
    ends = range(0, len(batch.input_ids), size)
    return [Batch(*(field if field is None else field[n : n + size] for field in batch)) for n in ends]


def random_sentences(number, length, vocab, seed=0):
    """Sentences of `length` different tokens in a random order."""
    generator = torch.Generator().manual_seed(seed)
    return [(TEXT + torch.randperm(vocab - TEXT, generator=generator)[:length]).tolist() for _ in range(number)]


def check_against_the_loops(model, batch, windows):
    accuracy, error, by_layer, by_distance = analyses.probe(twin_sentences(model, batch)[1], windows)
    found = measure_probe(model, lambda: cut(batch, 3))
    assert found.by_layer == [value if value is None else pytest.approx(value) for value in by_layer]
    assert found.by_distance == [value if value is None else pytest.approx(value) for value in by_distance]
    assert (found.accuracy, found.error) == (pytest.approx(accuracy), pytest.approx(error))
    return found


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_the_probe_is_that_of_the_loops(encoding):
    batch = tiny_batch((7, 7, 6, 6, 5, 7, 4, 2), seed=2)
    places = torch.rand(8, 10, generator=torch.Generator().manual_seed(2)).argsort(1)[:, :7]
    batch = batch._replace(input_ids=(1 + places) * batch.document_ids)  # no token twice, or rounding decides a tie
    found = check_against_the_loops(tiny_model(position_encoding=encoding).eval(), batch, [None, None])
    assert None not in found.by_distance[:2] and found.by_distance[2:] == [None] * 6


def test_keys_outside_a_window_are_left_out():
    sizes = {"seq_length": 11, "local_attention": 4}
    batch = tiny_batch((11, 11, 10, 9, 8, 11), seq=11, seed=3)
    found = check_against_the_loops(tiny_model(**sizes, global_every=2).eval(), batch, [None, 2])
    assert [value is None for value in found.by_distance] == [False] * 4 + [True] * 4
    found = check_against_the_loops(tiny_model(**sizes, global_every=3, num_layers=3).eval(), batch, [None, 2, 2])
    assert None not in found.by_layer


def test_a_local_model_has_no_accuracy_beyond_its_window(monkeypatch):
    found = measure_by_hand(monkeypatch, [torch.randn(6, 2, 24, 24)], window=3)
    assert [value is None for value in found.by_distance] == [False] * 3 + [True] * 5


def measure_by_hand(monkeypatch, layers, window=None, lengths=None):
    """The probe of layers with these logits `[sentences, heads, seq, seq]`."""
    count, heads, seq, _ = layers[0].shape
    sizes = {"num_layers": len(layers), "num_attention_heads": heads, "window": lambda layer: window}
    batch = sentences([[TEXT] * (n - 2) for n in lengths or [seq] * count], seq)
    batch = batch._replace(input_ids=torch.arange(count)[:, None])  # the numbers of the sentences

    def made(model, batch):
        for logits in layers:
            yield logits[batch.input_ids[:, 0]], window

    monkeypatch.setattr(probe, "layer_logits", made)
    return measure_probe(SimpleNamespace(config=SimpleNamespace(**sizes)), lambda: cut(batch, 4))


def test_a_known_direction_gives_1_and_symmetric_logits_give_half(monkeypatch):
    torch.manual_seed(0)
    place = torch.arange(24)
    right, far = (place - place[:, None]).sign(), -(place - place[:, None]).abs()
    noise = torch.randn(8, 1, 24, 24)
    noise = noise + noise.mT  # no more than noise to tell left from right, for either of two heads
    told = torch.cat([100 * noise, 100 * noise - 0.1 * right], 1)  # only the difference of both heads tells
    symmetric = far.expand(8, 2, 24, 24).float()
    found = measure_by_hand(monkeypatch, [told, symmetric])
    assert (found.accuracy, found.error, found.by_layer) == (1.0, 0.0, [1.0, 0.5])
    assert measure_by_hand(monkeypatch, [symmetric]).by_distance == [0.5] * 8
    constant = right.expand(8, 2, 24, 24).float()
    assert measure_by_hand(monkeypatch, [-constant]).by_distance == [1.0] * 8


def test_d_is_the_right_hand_logit_minus_the_left_hand_one():
    logits = torch.zeros(1, 1, 5, 5)
    logits[0, 0, 2] = torch.tensor([1.0, 10, 100, 1000, 10000])
    expected = torch.zeros(1, 1, 8, 5, dtype=torch.float64)
    expected[0, 0, 0, 2], expected[0, 0, 1, 2] = 990, 9999
    assert torch.equal(probe.differences(logits, None), expected)


def test_specials_and_padding_are_not_compared(monkeypatch):
    place = torch.arange(24)
    lengths = [24, 24, 12, 12, 9, 9]
    right = (place - place[:, None]).sign().float().expand(6, 1, 24, 24).clone()
    for logits, n in zip(right, lengths, strict=True):
        for outside in (slice(0, 1), slice(n - 1, 24)):
            logits[:, outside] *= -50
            logits[:, :, outside] *= -50
    assert measure_by_hand(monkeypatch, [right], lengths=lengths).by_distance == [1.0] * 8


def test_without_positions_mirrored_sentences_are_told_at_chance():
    rows = random_sentences(12, 14, 40)
    for place in range(1, 12, 4):  # 1 and 3, 5 and 7, 9 and 11 are scored: a sentence and its mirror image
        rows[place + 2] = rows[place][::-1]
    batch, sizes = sentences(rows), {"seq_length": 16, "vocab_size": 40}
    nope = measure_probe(tiny_model(position_encoding="nope", **sizes).eval(), lambda: [batch])
    assert nope.by_distance[:6] == [0.5] * 6 and nope.by_layer == [0.5, 0.5]
    alibi = measure_probe(tiny_model(position_encoding="alibi", **sizes).eval(), lambda: [batch])
    assert alibi.by_layer[0] == 0.5  # layer 2 may know on which side [CLS] and [SEP] are
    rope = measure_probe(tiny_model(position_encoding="rope", **sizes).eval(), lambda: [batch])
    assert rope.by_layer[0] > 0.5


def test_of_shuffled_text_only_positions_tell():
    rows = [sorted(row) for row in random_sentences(160, 14, 40)]  # the order of the words tells a lot
    sizes = {"seq_length": 16, "vocab_size": 40, "relative_distance": 16}
    batches = cut(sentences(rows), 32)

    def both(model):
        measured = (lambda: batches, lambda: shuffle_text(batches, seed=5))
        return [measure_probe(model.eval(), each) for each in measured]

    text, shuffled = both(tiny_model(position_encoding="nope", seq_length=16, vocab_size=40))
    assert text.accuracy > 0.5 + 4 * text.error
    assert abs(shuffled.accuracy - 0.5) < 4 * shuffled.error < 0.1
    model = tiny_model(direction_init="free", **sizes)
    with torch.no_grad():
        model.embeddings.position.distance.mul_(10)
    _, shuffled = both(model)
    assert shuffled.accuracy > 0.5 + 4 * shuffled.error


def test_shuffling_moves_only_text_and_depends_on_the_seed_alone():
    rows = [list(range(TEXT, TEXT + n)) for n in (9, 8, 8, 5, 1, 0)]
    whole = sentences(rows)

    def orders(size, seed):
        batches = list(shuffle_text(cut(whole, size), seed))
        assert all(
            torch.equal(after.position_ids, before.position_ids)
            for after, before in zip(batches, cut(whole, size), strict=True)
        )
        return torch.cat([batch.input_ids for batch in batches])

    found = orders(6, seed=1)
    assert torch.equal(found, orders(4, seed=1)) and not torch.equal(found, orders(6, seed=2))
    assert torch.equal(found < TEXT, whole.input_ids < TEXT)
    assert torch.equal(found.sort(1).values, whole.input_ids.sort(1).values)
    many = sentences([[TEXT, TEXT + 1, TEXT + 2]] * 600)
    [shuffled] = shuffle_text([many], seed=0)
    counts = Counter(map(tuple, shuffled.input_ids.tolist()))
    assert len(counts) == 6 and min(counts.values()) > 64  # 100 expected, standard deviation 9


def test_results_do_not_depend_on_the_batches():
    batch, model = tiny_batch((7, 7, 6, 6, 5, 7, 4, 2), seed=2), tiny_model().eval()
    whole = measure_probe(model, lambda: [batch])
    for size in (1, 3, 5):
        assert measure_probe(model, lambda size=size: cut(batch, size)) == whole


def test_too_few_or_too_short_sentences():
    model = tiny_model().eval()
    for lengths in ((4, 4, 3, 2), (7,), (7, 4), (4, 7)):
        with pytest.raises(UserError, match=r"too few or too short .* larger --sentences or --max-length"):
            measure_probe(model, lambda lengths=lengths: [tiny_batch(lengths)])
    assert measure_probe(model, lambda: [tiny_batch((7, 7))]).error is None


def twin_rows(model, k):
    """(row for the key k to the right, row for the key k to the left) of each layer's heads, from the formulas."""
    name, r = model.config.position_encoding, model.config.relative_distance
    found = []
    for layer in model.layers:
        table = layer.position or model.embeddings.position
        if name == "ddrp":
            found.append((table.direction[1] * table.distance[k], table.direction[2] * table.distance[k]))
        elif name == "bert-r":
            found.append((table.relative[-k + r], table.relative[k + r]))
        else:
            weight = layer.layer_position.key.weight
            for h in range(model.config.num_attention_heads):
                own = weight[4 * h : 4 * h + 4]
                found.append((own @ table.relative[-k + r], own @ table.relative[k + r]))
    return [(right.tolist(), left.tolist()) for right, left in found]


@pytest.mark.parametrize("encoding", ["ddrp", "bert-r", "deberta"])
@pytest.mark.parametrize("tables", ["shared", "per-layer"])
def test_cosines_are_those_of_the_loops(encoding, tables):
    model = tiny_model(position_encoding=encoding, relative_table=tables).eval()
    expected = [[analyses.cosine_of_numbers(*pair) for pair in twin_rows(model, k)] for k in (1, 2, 3)]
    assert table_cosines(model) == [pytest.approx(sum(values) / len(values)) for values in expected]


def test_ones_make_left_and_right_one():
    model = tiny_model(direction_init="ones").eval()
    with torch.no_grad():
        model.embeddings.position.direction.fill_(1)
    assert table_cosines(model) == [pytest.approx(1, abs=1e-12)] * 3
    with torch.no_grad():
        model.embeddings.position.direction[2] = -1
    assert table_cosines(model) == [pytest.approx(-1, abs=1e-12)] * 3


def test_cosines_count_only_distances_that_occur():
    assert len(table_cosines(tiny_model(relative_distance=20).eval())) == 6  # rows of 7 tokens
    assert len(table_cosines(tiny_model(relative_distance=20, local_attention=30).eval())) == 6
    assert len(table_cosines(tiny_model(position_encoding="deberta-v2", relative_distance=16).eval())) == 6
    assert table_cosines(tiny_model(position_encoding="bert-r", relative_distance=1).eval()) == []
    local = tiny_model(position_encoding="deberta", local_attention=4, global_every=2).eval()
    expected = [[analyses.cosine_of_numbers(*pair) for pair in twin_rows(local, k)] for k in (1, 2, 3)]
    expected[2] = expected[2][:3]  # the second layer sees two tokens to either side
    assert table_cosines(local) == [pytest.approx(sum(values) / len(values)) for values in expected]


def test_encodings_without_a_table_have_no_cosines():
    with_table = {"ddrp", "bert-r", "deberta", "deberta-v2"}
    found = {name for name in ENCODINGS if table_cosines(tiny_model(position_encoding=name).eval()) is not None}
    assert found == with_table


def test_near_and_far():
    assert near_and_far(None) == near_and_far([]) == (None, None)
    assert near_and_far([0.5, 0.3]) == (pytest.approx(0.4), pytest.approx(0.4))
    assert near_and_far([1.0] * 8 + [0.0] * 8) == (1.0, 0.5)
