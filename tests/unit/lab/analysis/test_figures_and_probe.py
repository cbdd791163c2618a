"""Figures, probe and space against loops in float64 and where the answer is known; throughput without a clock."""

from collections import Counter
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_ddrp.config import ENCODINGS
from megatron_ddrp.config.registry import PLUGINS
from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.encoders.encoder import load_encoder
from megatron_ddrp.encoders.huggingface import layer_states
from megatron_ddrp.lab.analysis import figures, probe
from megatron_ddrp.lab.analysis.figures import measure_similarity
from megatron_ddrp.lab.analysis.probe import Speed
from megatron_ddrp.lab.analysis.session import find_snapshots
from megatron_ddrp.pages.plotting import save_figures
from tests.reference import analyses, attention
from tests.refusals import refused
from tests.unit.lab.analysis.conftest import is_png, twin_sentences
from tests.unit.model.tiny import tiny_batch, tiny_model

LENGTHS = (7, 4, 2)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_self_similarity_and_maps_are_those_of_the_loops(encoding):
    model = tiny_model(position_encoding=encoding).eval()
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


def test_triangle_shares_and_mean_maps_are_those_of_the_loops():
    model, batch = tiny_model().eval(), tiny_batch((7, 6, 5, 4, 3, 2) * 2, seed=3)
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


def test_algorithm_1_by_hand():
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


def test_a_checkpoint_stands_at_its_step_a_folder_without_step_is_a_line_and_throughput_needs_no_memory(tmp_path):
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


CLS, SEP, TEXT = 1, 2, 3


def sentences(rows):
    """A batch of rows of text tokens between [CLS] and [SEP]."""
    seq = 2 + max(map(len, rows))
    ids = torch.tensor([[CLS, *row, SEP] + [0] * (seq - 2 - len(row)) for row in rows])
    return Batch.of_texts(ids, (ids > 0).long())


def cut(batch, size):
    """The batch in pieces of `size` sentences."""
    ends = range(0, len(batch.input_ids), size)
    return [Batch(*(field if field is None else field[n : n + size] for field in batch)) for n in ends]


def check_against_the_loops(model, batch, windows):
    accuracy, error, by_layer, by_distance = analyses.probe(twin_sentences(model, batch)[1], windows)
    found = probe.measure_probe(model, lambda: cut(batch, 3))
    assert found.by_layer == [value if value is None else pytest.approx(value) for value in by_layer]
    assert found.by_distance == [value if value is None else pytest.approx(value) for value in by_distance]
    assert (found.accuracy, found.error) == (pytest.approx(accuracy), pytest.approx(error))
    return found


def test_the_probe_is_that_of_the_loops():
    batch = tiny_batch((7, 7, 6, 6, 5, 7, 4, 2), seed=2)
    places = torch.rand(8, 10, generator=torch.Generator().manual_seed(2)).argsort(1)[:, :7]
    batch = batch._replace(input_ids=(1 + places) * batch.document_ids)  # no token twice, or rounding decides a tie
    found = check_against_the_loops(tiny_model().eval(), batch, [None, None])
    assert None not in found.by_distance[:2] and found.by_distance[2:] == [None] * 6


def test_keys_outside_a_window_are_left_out_and_results_do_not_depend_on_the_batches():
    sizes = {"seq_length": 11, "local_attention": 4}
    batch = tiny_batch((11, 11, 10, 9, 8, 11), seq=11, seed=3)
    found = check_against_the_loops(tiny_model(**sizes, global_every=2).eval(), batch, [None, 2])
    assert [value is None for value in found.by_distance] == [False] * 4 + [True] * 4
    found = check_against_the_loops(tiny_model(**sizes, global_every=3, num_layers=3).eval(), batch, [None, 2, 2])
    assert None not in found.by_layer
    batch, model = tiny_batch((7, 7, 6, 6, 5, 7, 4, 2), seed=2), tiny_model().eval()
    whole = probe.measure_probe(model, lambda: [batch])
    for size in (1, 3, 5):
        assert probe.measure_probe(model, lambda size=size: cut(batch, size)) == whole
    for lengths in ((4, 4, 3, 2), (7,), (7, 4), (4, 7)):
        batches = [tiny_batch(lengths)]
        refused("too few or too short .* larger --sentences or --max-length", probe.measure_probe, model, batches.copy)
    assert probe.measure_probe(model, lambda: [tiny_batch((7, 7))]).error is None


def measure_by_hand(monkeypatch, *layers):
    """The probe of layers with these logits `[sentences, heads, seq, seq]`, of sentences without padding."""
    count, heads, seq, _ = layers[0].shape
    sizes = {"num_layers": len(layers), "num_attention_heads": heads, "window": lambda layer: None}
    batch = sentences([[TEXT] * (seq - 2)] * count)
    batch = batch._replace(input_ids=torch.arange(count)[:, None])  # the numbers of the sentences
    monkeypatch.setattr(
        probe, "layer_logits", lambda model, batch: ((logits[batch.input_ids[:, 0]], None) for logits in layers)
    )
    return probe.measure_probe(SimpleNamespace(config=SimpleNamespace(**sizes)), lambda: cut(batch, 4))


def test_a_known_direction_gives_1_and_symmetric_logits_give_half(monkeypatch):
    torch.manual_seed(0)
    place = torch.arange(24)
    right, far = (place - place[:, None]).sign(), -(place - place[:, None]).abs()
    noise = torch.randn(8, 1, 24, 24)
    noise = noise + noise.mT  # no more than noise to tell left from right, for either of two heads
    told = torch.cat([100 * noise, 100 * noise - 0.1 * right], 1)  # only the difference of both heads tells
    symmetric = far.expand(8, 2, 24, 24).float()
    found = measure_by_hand(monkeypatch, told, symmetric)
    assert (found.accuracy, found.error, found.by_layer) == (1.0, 0.0, [1.0, 0.5])
    assert measure_by_hand(monkeypatch, symmetric).by_distance == [0.5] * 8
    constant = right.expand(8, 2, 24, 24).float()
    assert measure_by_hand(monkeypatch, -constant).by_distance == [1.0] * 8


def test_shuffling_moves_only_text_and_depends_on_the_seed_alone():
    whole = sentences([list(range(TEXT, TEXT + n)) for n in (9, 8, 8, 5, 1, 0)])

    def orders(size, seed):
        batches = list(probe.shuffle_text(cut(whole, size), seed))
        for after, before in zip(batches, cut(whole, size), strict=True):
            assert torch.equal(after.position_ids, before.position_ids)
        return torch.cat([batch.input_ids for batch in batches])

    found = orders(6, seed=1)
    assert torch.equal(found, orders(4, seed=1)) and not torch.equal(found, orders(6, seed=2))
    assert torch.equal(found < TEXT, whole.input_ids < TEXT)
    assert torch.equal(found.sort(1).values, whole.input_ids.sort(1).values)
    [shuffled] = probe.shuffle_text([sentences([[TEXT, TEXT + 1, TEXT + 2]] * 600)], seed=0)
    counts = Counter(map(tuple, shuffled.input_ids.tolist()))
    assert len(counts) == 6 and min(counts.values()) > 64  # 100 expected, standard deviation 9


SPECIALS = torch.tensor([9, 10])
BATCHES = ((7, 4, 5), (6, 3))


def sentence_batches():
    """Batches whose rows begin with 9 and end with 10, one of them with another 10 inside, and one of one token."""
    batches = [tiny_batch(lengths, vocab=9, seed=seed) for seed, lengths in enumerate(BATCHES)]
    for batch, lengths in zip(batches, BATCHES, strict=True):
        batch.input_ids[:, 0] = SPECIALS[0]
        batch.input_ids[torch.arange(len(lengths)), torch.tensor(lengths) - 1] = SPECIALS[1]
    batches[0].input_ids[0, 3] = SPECIALS[1]
    return batches


@pytest.mark.parametrize("changes", [{}, {"position_encoding": "rope", "layernorm_position": "pre"}])
def test_every_layer_is_that_of_the_loops(changes):
    model = tiny_model(**changes).eval()
    found = probe.measure_space(model, sentence_batches, SPECIALS)
    assert [layer.layer for layer in found.layers] == [0, 1, 2]
    for layer in found.layers:
        states = []  # of each sentence's tokens of text, `[n, D]`
        for batch in sentence_batches():
            hidden = list(layer_states(model, batch))[layer.layer].hidden.double()
            of_text = (batch.document_ids > 0) & ~torch.isin(batch.input_ids, SPECIALS)
            states += [of_row[kept] for of_row, kept in zip(hidden, of_text, strict=True)]
        assert [len(each) for each in states] == [4, 2, 3, 4, 1]
        assert (found.tokens, layer.hidden_size) == (14, 12)
        for name, loop in (("within", analyses.within), ("between", analyses.between)):
            assert getattr(layer, f"cosine_{name}") == pytest.approx(loop(states), rel=1e-9)
            assert getattr(layer, f"centred_cosine_{name}") == pytest.approx(loop(analyses.centred(states)), rel=1e-9)
        assert layer.isoscore == pytest.approx(analyses.isoscore(states), rel=1e-9)
        assert layer.effective_rank == pytest.approx(analyses.effective_rank(states), rel=1e-9)
        share, kurtosis = analyses.first_component(states)
        assert layer.first_component == pytest.approx(share, rel=1e-6)
        assert layer.first_component_kurtosis == pytest.approx(kurtosis, rel=1e-6)


def test_layers_have_the_f_s_and_f_h_of_self_similarity():
    model = tiny_model(layernorm_position="pre", relative_table="per-layer").eval()
    found = probe.measure_space(model, sentence_batches, SPECIALS)
    paper = measure_similarity(model, sentence_batches())
    assert found.layers[-1].token_similarity == pytest.approx(paper.token_similarity, rel=1e-9)
    assert found.layers[0].head_similarity is None
    assert [layer.head_similarity for layer in found.layers[1:]] == pytest.approx(paper.head_similarity_by_layer)
    found = probe.measure_space(tiny_model(num_attention_heads=1).eval(), sentence_batches, SPECIALS)
    assert [layer.head_similarity for layer in found.layers] == [None] * 3


def test_a_space_without_extent_or_finite_states_has_neither_isotropy_nor_rank():
    for covariance, *scores in ((torch.zeros(3, 3), None, None), (torch.ones(1, 1), None, 1), (torch.eye(5), 1, 5)):
        found = [probe.isoscore(covariance), probe.effective_rank(covariance)]
        assert found == [score if score is None else pytest.approx(score) for score in scores]
    model = tiny_model().eval()
    refused("fewer than two tokens of text", probe.measure_space, model, sentence_batches, torch.arange(11))
    model.layers[1].feed_forward_norm.weight.data.fill_(float("nan"))
    refused("layer 2 are not finite", probe.measure_space, model, sentence_batches, SPECIALS)


SETTING = probe.Setting(torch.device("cpu"), tokens=50, rounds=4, bf16=False, seed=1)


def passes_of(monkeypatch, snapshots, lengths, peak=lambda timed, length, setting: 7):
    """Measure without a clock and without processes: (result, (encoder, rows, length) of each pass, advances)."""
    passes, advances, names = [], [], {}
    ticks = iter(range(10**6))

    def forward(encoder, batch, _):
        passes.append((names.setdefault(id(encoder), len(names)), *batch.input_ids.shape))

    monkeypatch.setattr(probe, "peak_memory", peak)
    monkeypatch.setattr(probe, "_forward", forward)
    monkeypatch.setattr(probe.time, "perf_counter", lambda: next(ticks) * 0.5)
    measured = probe.measure_throughput(snapshots, lengths, SETTING, lambda: advances.append(1))
    return measured, passes, len(advances)


def test_encoders_take_turns_at_rows_of_one_budget_of_tokens_and_quartiles_are_of_the_rounds(run_folder, monkeypatch):
    snapshots = find_snapshots([run_folder, run_folder / "iter_0000010"], every=False)
    measured, passes, advances = passes_of(monkeypatch, snapshots, [8, 24])
    assert [(rows, length) for _, rows, length in passes] == [(6, 8)] * 10 + [(2, 24)] * 10
    for begin in (0, 10):
        rounds = np.array([name for name, *_ in passes[begin : begin + 10]]).reshape(5, 2)
        assert (np.sort(rounds, axis=1) == [0, 1]).all() and len({tuple(row) for row in rounds[1:]}) == 2
    assert advances == 2 * 2 * (SETTING.rounds + 1)
    first = measured[0].speeds[0]
    assert (first.length, first.rows, first.memory_bytes) == (8, 6, 7)
    assert first.tokens_per_second == first.lower_quartile == first.upper_quartile == 6 * 8 / 0.5
    assert measured[0].weight_bytes == sum(p.numel() * 4 for p in measured[0].encoder.module.parameters())
    speed = probe._speed(10, 3, np.array([1.0, 2.0, 3.0, 5.0, 6.0]), None)
    assert (speed.lower_quartile, speed.tokens_per_second, speed.upper_quartile) == (6.0, 10.0, 15.0)
    tokenizer = load_encoder(run_folder).tokenizer
    batch = probe.full_batch(tokenizer, 3, 9, SETTING)
    assert batch.input_ids.shape == (3, 9) and (batch.document_ids == 1).all()
    assert (batch.input_ids[:, 0] == tokenizer.cls_id).all() and (batch.input_ids[:, -1] == tokenizer.sep_id).all()
    assert not np.isin(batch.input_ids[:, 1:-1], tokenizer.special_ids).any()
    assert batch.position_ids[2].tolist() == list(range(9))
    assert (probe.full_batch(tokenizer, 3, 9, replace(SETTING, seed=2)).input_ids != batch.input_ids).any()


def test_lengths_without_positions_or_memory_are_left_out_and_said(run_folder, monkeypatch):
    def peak(timed, length, setting):
        if length == 16:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 9 bytes")
        return 7

    measured, _, advances = passes_of(monkeypatch, find_snapshots([run_folder], False), [8, 16, 25], peak)
    assert [speed.length for speed in measured[0].speeds] == [8]
    reasons = {16: "not enough memory; give a smaller --tokens", 25: "it has positions for 24 tokens"}
    assert measured[0].left_out == reasons and advances == 3 * (SETTING.rounds + 1)

    def another_fault(timed, length, setting):
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes do not match"):
        passes_of(monkeypatch, find_snapshots([run_folder], False), [8], another_fault)


PLUGIN = """
from pathlib import Path
from megatron_ddrp.model.positions.absolute import Nope

class Mine(Nope):
    pass

ENCODINGS = {"mine": Mine}
Path(__file__).with_suffix(".loaded").touch()
"""


def test_the_command_measures_throughput_or_writes_nothing(run_folder, analyze_main, monkeypatch, tmp_path, capsys):
    (tmp_path / "plugin.py").write_text(PLUGIN)
    monkeypatch.setitem(PLUGINS, "of this process", tmp_path / "plugin.py")
    more = ("--lengths", 2000, 24, "--tokens", 48, "--rounds", 2)
    result = analyze_main("throughput", run_folder, tmp_path / "t.png", *more)
    [row] = result["encoders"]
    assert (result["device"], result["precision"], result["tokens_per_batch"]) == ("cpu", "fp32", 48)
    [speed] = row["lengths"]
    assert (row["run"], speed["length"], speed["rows"]) == ("ddrp", 24, 2)
    assert 0 < speed["lower_quartile"] <= speed["tokens_per_second"] <= speed["upper_quartile"]
    assert speed["memory_bytes"] is None or speed["memory_bytes"] >= 0
    assert row["left_out"] == [{"length": 2000, "reason": "it has positions for 24 tokens"}]
    assert (tmp_path / "plugin.loaded").exists()  # in the process that measures memory
    assert is_png(tmp_path / "t.png")
    left_out = "ddrp, length 2000: left out, it has positions for 24 tokens"
    assert left_out in capsys.readouterr().out
    words = ("throughput", run_folder, tmp_path / "x.json", "--lengths", 2000)
    refused("no length could be measured", analyze_main, *words)
    assert left_out in capsys.readouterr().out and not (tmp_path / "x.json").exists()
