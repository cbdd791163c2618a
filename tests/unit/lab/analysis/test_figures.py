"""Figures: f(S), f(H), mean maps, Algorithm 1 and cosines of tables against float64 loops, and maps made by hand."""

from dataclasses import asdict

import numpy as np
import pytest
import torch

from megatron_ddrp.config import ENCODINGS
from megatron_ddrp.lab.analysis import figures
from megatron_ddrp.lab.analysis.probe import Speed
from megatron_ddrp.pages.plotting import save_figures
from tests.reference import analyses, attention
from tests.refusals import refused
from tests.unit.lab.analysis.conftest import is_png, twin_sentences
from tests.unit.model.tiny import tiny_batch, tiny_model

LENGTHS = (7, 4, 2)


@pytest.fixture(params=ENCODINGS)
def model(request):
    return tiny_model(position_encoding=request.param).eval()


def test_self_similarity_and_maps_are_those_of_the_loops(model):
    batches = [tiny_batch(LENGTHS), tiny_batch((5, 3), seed=1)]
    found = figures.measure_similarity(model, batches)
    pairs = [twin_sentences(model, batch, compared=True) for batch in batches]
    hidden, logits = sum((h for h, _ in pairs), []), sum((s for _, s in pairs), [])
    by_layer = analyses.head_similarity(logits)
    assert found.sentences == 5
    assert found.token_similarity == pytest.approx(analyses.token_similarity(hidden), rel=1e-10)
    assert found.head_similarity_by_layer == pytest.approx(by_layer, rel=1e-9, abs=1e-11)
    assert found.head_similarity == pytest.approx(sum(by_layer) / 2, rel=1e-9, abs=1e-11)
    _, logits = twin_sentences(model, batches[0])
    for number, maps in enumerate(figures.layer_maps(model, batches[0])):
        for row, n in enumerate(LENGTHS):  # softmax of the logits without padding
            expected = analyses.softmax(logits[row][number])
            torch.testing.assert_close(maps[row, :, :n, :n], expected, rtol=1e-9, atol=1e-12)
            assert not maps[row, :, n:].any() and not maps[row, :, :, n:].any()


def test_pre_norm_states_are_normalised_maps_of_a_local_layer_are_of_its_window_and_one_head_is_refused():
    model, batch = tiny_model(layernorm_position="pre", relative_table="per-layer").eval(), tiny_batch(LENGTHS)
    hidden, _ = twin_sentences(model, batch)
    found = figures.measure_similarity(model, [batch])
    assert found.token_similarity == pytest.approx(analyses.token_similarity(hidden), rel=1e-10)
    model, batch = tiny_model(local_attention=4, global_every=2).eval(), tiny_batch(LENGTHS)
    _, logits = twin_sentences(model, batch)
    whole, local = figures.layer_maps(model, batch)
    for maps, number, window in ((whole, 0, None), (local, 1, 2)):
        expected = analyses.softmax(attention.within_window(logits[0][number], window))
        torch.testing.assert_close(maps[0], expected, rtol=1e-9, atol=1e-12)
    assert local[0, :, 0, 2].gt(0).all() and not local[0, :, 0, 3].any()
    model = tiny_model(num_attention_heads=1).eval()
    refused("has one", figures.measure_similarity, model, [tiny_batch()])
    refused("has one", figures.divide_heads, torch.zeros(1, 1), torch.zeros(1, 1))


def test_triangle_shares_and_mean_maps_are_those_of_the_loops(model):
    batch = tiny_batch((7, 6, 5, 4, 3, 2) * 2, seed=3)
    _, logits = twin_sentences(model, batch)
    for threshold in (0.35, 0.45):
        for number, layer in enumerate(figures.measure_triangles(model, [batch], threshold)):
            maps = [analyses.softmax(layers[number]) for layers in logits]
            assert layer.share == pytest.approx(analyses.triangle_share(maps, threshold))
    batch = tiny_batch((6, 6, 6), seq=6, seed=2)
    _, logits = twin_sentences(model, batch)
    sentences = [analyses.softmax(layers[0]) for layers in logits]
    found = figures.measure_maps(model, [batch], layer=1)
    assert [panel.name for panel in found] == list(figures.GROUPS)
    chosen = [[*analyses.groups(maps), [0, 1, 2]] for maps in sentences]
    for place, panel in enumerate(found):
        means = [analyses.mean_map(maps, own[place]) for maps, own in zip(sentences, chosen, strict=True)]
        np.testing.assert_allclose(panel.map, sum(means).numpy() / 3, rtol=1e-9)
        np.testing.assert_allclose(panel.map.sum(1), 1.0, rtol=1e-9)
        up, down = np.mean([analyses.up_and_down(mean) for mean in means], axis=0)
        assert (panel.up, panel.down) == (pytest.approx(up), pytest.approx(down))
    [single] = figures.measure_maps(model, [batch], layer=2, heads=[3])
    np.testing.assert_allclose(single.map, sum(analyses.softmax(s[1])[2] for s in logits).numpy() / 3, rtol=1e-9)
    assert single.name == "head 3"


def test_algorithm_1_by_hand_and_the_share_counts_misses_and_divides_by_each_sentences_own_length():
    right = torch.tensor([[0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [0, 0, 0, 1.0]])  # 3 of 4 above the diagonal
    left, itself, even = right.flip(0, 1), torch.eye(4), torch.full((4, 4), 0.25)
    for heads, up, down in (
        ((right, left), 0.75, 0.75),
        ((left, right), 0.75, 0.75),
        ((right, itself, left), 0.75, 0.75),  # an odd number: the middle head is in neither group
        ((right, even, left, itself), (0.75 + 0.375) / 2, 0.375),  # ties keep their order: even right, itself left
        ((right, right), 0.75, 0.0),
        ((even, even), 0.375, 0.375),
    ):
        maps = torch.stack(heads)
        found_up, found_down = figures.triangle_parts(maps[None], torch.tensor([4]))
        assert (found_up.item(), found_down.item()) == (pytest.approx(up), pytest.approx(down))
        assert analyses.matches(maps.double(), 0.7) == (up >= 0.7 and down >= 0.7)
    short = torch.zeros(2, 4, 4)
    short[0, :2, :2], short[1, :2, :2] = torch.tensor([[0.0, 1], [0, 1]]), torch.tensor([[1.0, 0], [1, 0]])
    maps = torch.stack([torch.stack([right, left]), short, torch.stack([even, even])])
    up, down = figures.triangle_parts(maps, torch.tensor([4, 2, 4]))
    assert up.tolist() == pytest.approx([0.75, 0.5, 0.375]) and down.tolist() == pytest.approx([0.75, 0.5, 0.375])
    sentences = [maps[0].double(), short[:, :2, :2].double(), maps[2].double()]
    for threshold, share in ((0.7, 1 / 3), (0.5, 2 / 3)):
        assert analyses.triangle_share(sentences, threshold) == pytest.approx(share)


def test_a_single_checkpoint_stands_at_its_step_a_folder_without_step_is_a_line_and_throughput_needs_no_memory(
    tmp_path,
):
    pytest.importorskip("matplotlib")
    layers = [{"layer": 1, **dict.fromkeys(figures.SPACE, 0.5)}]
    runs = [("several", 500), ("several", 2000), ("one", 1500), ("hf", None)]
    figure = figures.draw_space([{"run": run, "iteration": step, "layers": layers} for run, step in runs])
    lines = [list(line.get_xdata()) for line in figure.axes[len(figures.DRAWN)].lines]
    assert lines == [[500, 2000], [1500], [0, 1]]  # 0 to 1 is the whole width, in parts of the axis
    figure.draw_without_rendering()
    assert all(axis.title.get_window_extent().width < 0.95 * axis.bbox.width for axis in figure.axes)
    speed = Speed(64, 2, 100.0, 90.0, 110.0, None)
    save_figures(tmp_path, {"t.png": lambda: figures.draw_throughput([{"run": "mine", "lengths": [asdict(speed)]}])})
    assert is_png(tmp_path / "t.png")


def means_of_loops(model, local=False):
    """The mean cosine over tables and heads at each distance; a `local` second layer sees two tokens to either side."""
    expected = [[analyses.cosine_of_numbers(*pair) for pair in twin_rows(model, k)] for k in (1, 2, 3)]
    if local:
        expected[2] = expected[2][:3]
    return [pytest.approx(sum(values) / len(values)) for values in expected]


def test_cosines_are_those_of_the_loops_of_distances_that_occur_and_of_encodings_with_a_table():
    for encoding in ("ddrp", "bert-r", "deberta"):
        for tables in ("shared", "per-layer"):
            model = tiny_model(position_encoding=encoding, relative_table=tables).eval()
            assert figures.table_cosines(model) == means_of_loops(model), (encoding, tables)
    model = tiny_model(direction_init="ones").eval()
    model.embeddings.position.direction.data.fill_(1)
    for left in (1, -1):  # ones make left and right one
        model.embeddings.position.direction.data[2] = left
        assert figures.table_cosines(model) == [pytest.approx(left, abs=1e-12)] * 3
    deberta = {"position_encoding": "deberta-v2", "relative_distance": 16}
    for changes in ({"relative_distance": 20}, {"relative_distance": 20, "local_attention": 30}, deberta):
        assert len(figures.table_cosines(tiny_model(**changes).eval())) == 6  # rows of 7 tokens
    assert figures.table_cosines(tiny_model(position_encoding="bert-r", relative_distance=1).eval()) == []
    local = tiny_model(position_encoding="deberta", local_attention=4, global_every=2).eval()
    assert figures.table_cosines(local) == means_of_loops(local, local=True)
    found = {name for name in ENCODINGS if figures.table_cosines(tiny_model(position_encoding=name).eval()) is not None}
    assert found == {"ddrp", "bert-r", "deberta", "deberta-v2"}
    assert figures.near_and_far(None) == figures.near_and_far([]) == (None, None)
    assert figures.near_and_far([0.5, 0.3]) == (pytest.approx(0.4), pytest.approx(0.4))
    assert figures.near_and_far([1.0] * 8 + [0.0] * 8) == (1.0, 0.5)


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
