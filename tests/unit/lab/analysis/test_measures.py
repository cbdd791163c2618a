"""f(S), f(H), mean maps and Algorithm 1 against float64 loops, for every encoding, and on maps made by hand."""

import numpy as np
import pytest
import torch

from megatron_ddrp.config import ENCODINGS
from megatron_ddrp.errors import UserError
from megatron_ddrp.lab.analysis.figures import (
    GROUPS,
    divide_heads,
    layer_maps,
    measure_maps,
    measure_similarity,
    measure_triangles,
    triangle_parts,
)
from tests.reference import analyses, attention
from tests.unit.model.tiny import tiny_batch, tiny_model, twin_encode, twin_last_norm

LENGTHS = (7, 4, 2)


@torch.no_grad()
def twin_sentences(model, batch, compared=False):
    """Of each sentence the last hidden states `[n, D]` and the logits of each layer `[heads, n, n]`, from loops."""
    hidden, logits = [], []
    for row, n in enumerate((batch.document_ids > 0).sum(1).tolist()):
        _, states, scores = twin_encode(model, batch, row, compared)
        hidden.append(twin_last_norm(model, states)[:n])
        logits.append([layer[:, :n, :n] for layer in scores])
    return hidden, logits


@pytest.fixture(params=ENCODINGS)
def model(request):
    return tiny_model(position_encoding=request.param).eval()


def test_self_similarity_is_that_of_the_loops(model):
    batches = [tiny_batch(LENGTHS), tiny_batch((5, 3), seed=1)]
    found = measure_similarity(model, batches)
    pairs = [twin_sentences(model, batch, compared=True) for batch in batches]
    hidden, logits = sum((h for h, _ in pairs), []), sum((s for _, s in pairs), [])
    by_layer = analyses.head_similarity(logits)
    assert found.sentences == 5
    assert found.token_similarity == pytest.approx(analyses.token_similarity(hidden), rel=1e-10)
    assert found.head_similarity_by_layer == pytest.approx(by_layer, rel=1e-9, abs=1e-11)
    assert found.head_similarity == pytest.approx(sum(by_layer) / 2, rel=1e-9, abs=1e-11)


def test_pre_norm_self_similarity_looks_at_normalised_states():
    model, batch = tiny_model(layernorm_position="pre", relative_table="per-layer").eval(), tiny_batch(LENGTHS)
    hidden, _ = twin_sentences(model, batch)
    found = measure_similarity(model, [batch])
    assert found.token_similarity == pytest.approx(analyses.token_similarity(hidden), rel=1e-10)


def test_maps_are_softmax_of_the_logits_without_padding(model):
    batch = tiny_batch(LENGTHS)
    _, logits = twin_sentences(model, batch)
    for number, maps in enumerate(layer_maps(model, batch)):
        for row, n in enumerate(LENGTHS):
            expected = analyses.softmax(logits[row][number])
            torch.testing.assert_close(maps[row, :, :n, :n], expected, rtol=1e-9, atol=1e-12)
            assert not maps[row, :, n:].any() and not maps[row, :, :, n:].any()


def test_maps_of_a_local_layer_are_those_of_its_window():
    model, batch = tiny_model(local_attention=4, global_every=2).eval(), tiny_batch(LENGTHS)
    _, logits = twin_sentences(model, batch)
    whole, local = layer_maps(model, batch)
    for maps, number, window in ((whole, 0, None), (local, 1, 2)):
        expected = analyses.softmax(attention.within_window(logits[0][number], window))
        torch.testing.assert_close(maps[0], expected, rtol=1e-9, atol=1e-12)
    assert local[0, :, 0, 2].gt(0).all() and not local[0, :, 0, 3].any()


def test_triangle_shares_are_those_of_the_loops(model):
    batch = tiny_batch((7, 6, 5, 4, 3, 2) * 2, seed=3)
    _, logits = twin_sentences(model, batch)
    for threshold in (0.35, 0.45):
        found = measure_triangles(model, [batch], threshold)
        for number, layer in enumerate(found):
            maps = [analyses.softmax(layers[number]) for layers in logits]
            assert layer.share == pytest.approx(analyses.triangle_share(maps, threshold))


def test_mean_maps_are_those_of_the_loops(model):
    batch = tiny_batch((6, 6, 6), seq=6, seed=2)
    _, logits = twin_sentences(model, batch)
    sentences = [analyses.softmax(layers[0]) for layers in logits]
    found = measure_maps(model, [batch], layer=1)
    assert [panel.name for panel in found] == list(GROUPS)
    chosen = [[*analyses.groups(maps), [0, 1, 2]] for maps in sentences]
    for place, panel in enumerate(found):
        means = [analyses.mean_map(maps, own[place]) for maps, own in zip(sentences, chosen, strict=True)]
        np.testing.assert_allclose(panel.map, sum(means).numpy() / 3, rtol=1e-9)
        np.testing.assert_allclose(panel.map.sum(1), 1.0, rtol=1e-9)
        sides = [analyses.up_and_down(mean) for mean in means]
        assert panel.up == pytest.approx(sum(up for up, _ in sides) / 3)
        assert panel.down == pytest.approx(sum(down for _, down in sides) / 3)
    [single] = measure_maps(model, [batch], layer=2, heads=[3])
    np.testing.assert_allclose(single.map, sum(analyses.softmax(s[1])[2] for s in logits).numpy() / 3, rtol=1e-9)
    assert single.name == "head 3"


RIGHT = torch.tensor([[0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [0, 0, 0, 1.0]])  # 3 of 4 above the diagonal
LEFT = RIGHT.flip(0, 1)
SELF = torch.eye(4)
EVEN = torch.full((4, 4), 0.25)


@pytest.mark.parametrize(
    ("heads", "up", "down"),
    [
        ((RIGHT, LEFT), 0.75, 0.75),
        ((LEFT, RIGHT), 0.75, 0.75),
        ((RIGHT, SELF, LEFT), 0.75, 0.75),  # an odd number: the middle head is in neither group
        ((RIGHT, EVEN, LEFT, SELF), (0.75 + 0.375) / 2, 0.375),  # ties keep their order: EVEN right, SELF left
        ((RIGHT, RIGHT), 0.75, 0.0),
        ((EVEN, EVEN), 0.375, 0.375),
    ],
)
def test_algorithm_1_by_hand(heads, up, down):
    maps = torch.stack(heads)
    found_up, found_down = triangle_parts(maps[None], torch.tensor([4]))
    assert (found_up.item(), found_down.item()) == (pytest.approx(up), pytest.approx(down))
    assert analyses.matches(maps.double(), 0.7) == (up >= 0.7 and down >= 0.7)


def test_the_share_counts_misses_and_divides_by_each_sentences_own_length():
    short = torch.zeros(2, 4, 4)
    short[0, :2, :2], short[1, :2, :2] = torch.tensor([[0.0, 1], [0, 1]]), torch.tensor([[1.0, 0], [1, 0]])
    maps = torch.stack([torch.stack([RIGHT, LEFT]), short, torch.stack([EVEN, EVEN])])
    up, down = triangle_parts(maps, torch.tensor([4, 2, 4]))
    assert up.tolist() == pytest.approx([0.75, 0.5, 0.375]) and down.tolist() == pytest.approx([0.75, 0.5, 0.375])
    sentences = [maps[0].double(), short[:, :2, :2].double(), maps[2].double()]
    assert analyses.triangle_share(sentences, 0.7) == pytest.approx(1 / 3)
    assert analyses.triangle_share(sentences, 0.5) == pytest.approx(2 / 3)


def test_a_model_of_one_head_is_refused():
    model = tiny_model(num_attention_heads=1).eval()
    with pytest.raises(UserError, match="has one"):
        measure_similarity(model, [tiny_batch()])
    with pytest.raises(UserError, match="has one"):
        divide_heads(torch.zeros(1, 1), torch.zeros(1, 1))
