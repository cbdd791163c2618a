"""Cosines, IsoScore and effective rank against float64 loops, on our models and on encoders of transformers."""

import json

import pytest
import torch

from megatron_ddrp.data.tokenizers.tokenizer import build_tokenizer
from megatron_ddrp.encoders.huggingface import layer_states
from megatron_ddrp.errors import UserError
from megatron_ddrp.lab.analysis import command as analyze
from megatron_ddrp.lab.analysis import figures
from megatron_ddrp.lab.analysis.figures import measure_similarity
from megatron_ddrp.lab.analysis.probe import effective_rank, isoscore, measure_space
from megatron_ddrp.lab.analysis.session import Sentences, Snapshot, draw_texts
from megatron_ddrp.model import Encoder
from megatron_ddrp.model.stages import Draws, Inputs
from tests.reference import analyses
from tests.unit.model.tiny import encode, tiny_batch, tiny_model

CLS, SEP = 9, 10
BATCHES = ((7, 4, 5), (6, 3))


def sentence_batches():
    """Batches whose rows begin with CLS and end with SEP, one of them with another SEP inside, and one of one token."""
    batches = [tiny_batch(lengths, vocab=9, seed=seed) for seed, lengths in enumerate(BATCHES)]
    for batch, lengths in zip(batches, BATCHES, strict=True):
        batch.input_ids[:, 0] = CLS
        batch.input_ids[torch.arange(len(lengths)), torch.tensor(lengths) - 1] = SEP
    batches[0].input_ids[0, 3] = SEP
    return batches


def text_states(model, number):
    """The states of each sentence's tokens of text in a layer, `[n, D]` each."""
    found = []
    for batch in sentence_batches():
        hidden = list(layer_states(model, batch))[number].hidden.double()
        for row, ids in enumerate(batch.input_ids):
            places = [p for p, i in enumerate(ids.tolist()) if batch.document_ids[row, p] and i not in (CLS, SEP)]
            found.append(hidden[row, places])
    return found


@pytest.mark.parametrize("changes", [{}, {"position_encoding": "rope", "layernorm_position": "pre"}])
def test_every_layer_is_that_of_the_loops(changes):
    model = tiny_model(**changes).eval()
    found = measure_space(model, sentence_batches, torch.tensor([CLS, SEP]))
    assert [layer.layer for layer in found.layers] == [0, 1, 2]
    for layer in found.layers:
        states = text_states(model, layer.layer)
        assert [len(each) for each in states] == [4, 2, 3, 4, 1]
        assert (found.tokens, layer.hidden_size) == (14, 12)
        assert layer.cosine_within == pytest.approx(analyses.within(states), rel=1e-9)
        assert layer.cosine_between == pytest.approx(analyses.between(states), rel=1e-9)
        assert layer.centred_cosine_within == pytest.approx(analyses.within(analyses.centred(states)), rel=1e-9)
        assert layer.centred_cosine_between == pytest.approx(analyses.between(analyses.centred(states)), rel=1e-9)
        assert layer.isoscore == pytest.approx(analyses.isoscore(states), rel=1e-9)
        assert layer.effective_rank == pytest.approx(analyses.effective_rank(states), rel=1e-9)
        share, kurtosis = analyses.first_component(states)
        assert layer.first_component == pytest.approx(share, rel=1e-6)
        assert layer.first_component_kurtosis == pytest.approx(kurtosis, rel=1e-6)


def test_the_last_layer_has_the_f_s_and_f_h_of_self_similarity():
    model = tiny_model(layernorm_position="pre", relative_table="per-layer").eval()
    found = measure_space(model, sentence_batches, torch.tensor([CLS, SEP]))
    paper = measure_similarity(model, sentence_batches())
    assert found.layers[-1].token_similarity == pytest.approx(paper.token_similarity, rel=1e-9)
    assert found.layers[0].head_similarity is None
    assert [layer.head_similarity for layer in found.layers[1:]] == pytest.approx(paper.head_similarity_by_layer)


def test_layers_run_from_the_embeddings_to_the_last_hidden_states():
    model, batch = tiny_model(layernorm_position="pre").eval(), tiny_batch()
    states = list(layer_states(model, batch))
    assert len(states) == 3 and not torch.allclose(states[1].hidden, states[2].hidden)
    nothing = Draws.none(len(batch.input_ids), 2)
    torch.testing.assert_close(states[0].hidden, model.embeddings.embed(Inputs.of(batch, nothing)))
    torch.testing.assert_close(states[2].hidden, encode(model, batch))


def test_one_head_has_no_f_h():
    found = measure_space(tiny_model(num_attention_heads=1).eval(), sentence_batches, torch.tensor([CLS, SEP]))
    assert [layer.head_similarity for layer in found.layers] == [None] * 3


def test_mean_cosine_and_isotropy_disagree_by_design():
    """A cloud that is the same in every direction, far from the origin, and one around it that is a line."""
    generator = torch.Generator().manual_seed(0)
    cloud = torch.randn(400, 4, generator=generator, dtype=torch.float64)
    far, line = cloud + 50.0, cloud * torch.tensor([1.0, 0.01, 0.01, 0.01])
    assert analyses.within([far[:30]]) > 0.99 and isoscore(far.T.cov()) > 0.95
    assert abs(analyses.within([line[:30]])) < 0.2 and isoscore(line.T.cov()) < 0.01
    assert effective_rank(far.T.cov()) > 3.9 and effective_rank(line.T.cov()) < 1.01


def test_a_space_without_extent_has_neither_score():
    assert isoscore(torch.zeros(3, 3)) is None and effective_rank(torch.zeros(3, 3)) is None
    assert isoscore(torch.ones(1, 1)) is None and effective_rank(torch.ones(1, 1)) == 1.0
    assert isoscore(torch.eye(5)) == pytest.approx(1.0) and effective_rank(torch.eye(5)) == pytest.approx(5.0)


def test_states_that_are_not_finite_and_empty_sentences_are_one_line():
    model = tiny_model().eval()
    with pytest.raises(UserError, match="fewer than two tokens of text"):
        measure_space(model, sentence_batches, torch.arange(11))
    model.layers[1].feed_forward_norm.weight.data.fill_(float("nan"))
    with pytest.raises(UserError, match="layer 2 are not finite"):
        measure_space(model, sentence_batches, torch.tensor([CLS, SEP]))


@pytest.fixture(scope="module")
def albert(tmp_path_factory):
    """A folder of a family that this project does not know, with a vocabulary of its own."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("encoders") / "albert"
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "of", *"abcdefghijklmnopqrstuvwxyz"]
    words += [f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"]
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 20, "num_hidden_layers": 3}
    sizes |= {"embedding_size": 8, "max_position_embeddings": 20, "vocab_size": len(words), "pad_token_id": 0}
    transformers.AlbertModel(transformers.AlbertConfig(**sizes)).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    return folder


def test_encoders_of_two_vocabularies_share_one_figure(run_folder, albert, tiny_corpus, analyze_main, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    more = ("--text", tiny_corpus.text_file, "--sentences", 30, "--random-init")
    result = analyze_main("space", [run_folder, albert], tmp_path / "s.png", *more)
    rows = result["checkpoints"]
    assert [row["run"] for row in rows] == ["ddrp", "ddrp", "ddrp, random weights", "albert", "albert, random weights"]
    assert [row["iteration"] for row in rows] == [10, 20, None, None, None]
    assert [len(row["layers"]) for row in rows] == [3, 3, 3, 4, 4]
    assert {row["sentences"] for row in rows} == {30} and result["text"] == str(tiny_corpus.text_file)
    assert {row["max_length"] for row in rows} == {20}
    assert rows[1]["layers"][2]["head_similarity"] is not None and rows[3]["layers"][3]["head_similarity"] is None
    assert rows[1]["layers"] != rows[2]["layers"] and rows[3]["layers"] != rows[4]["layers"]
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "albert, layer 3: f(S) " in printed
    assert printed.startswith("albert takes at most 20 tokens: the sentences of all models are cut to 20\n")


def test_a_run_is_seen_as_by_self_similarity(run_folder, analyze_main, tmp_path):
    more = ("--sentences", 40, "--max-length", 24)
    spaces = analyze_main("space", run_folder, tmp_path / "s.json", *more)["checkpoints"]
    papers = analyze_main("self-similarity", run_folder, tmp_path / "f.json", *more)["checkpoints"]
    for row, paper in zip(spaces, papers, strict=True):
        assert row["layers"][-1]["token_similarity"] == pytest.approx(paper["token_similarity"], rel=1e-5)
        found = [layer["head_similarity"] for layer in row["layers"][1:]]
        assert found == pytest.approx(paper["head_similarity_by_layer"], rel=1e-5)


def test_transformers_and_we_see_the_same_space_of_a_bert(tiny_corpus, tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 20, "num_hidden_layers": 2}
    words = len(tiny_corpus.vocab_file.read_text().splitlines())
    torch.manual_seed(0)
    bert = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=words, **sizes)).eval()
    bert.save_pretrained(tmp_path)
    (tmp_path / "vocab.txt").write_bytes(tiny_corpus.vocab_file.read_bytes())
    loaded = Snapshot("bert", tmp_path).load_any()
    assert isinstance(loaded.model, Encoder)
    for ours, theirs in zip(*(layer_states(each, tiny_batch()) for each in (loaded.model, bert.bert)), strict=True):
        valid = tiny_batch().document_ids > 0
        torch.testing.assert_close(ours.hidden[valid], theirs.hidden[valid], rtol=0, atol=1e-5)


def test_a_family_of_ours_that_we_refuse_is_left_to_transformers(albert, tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(hidden_size=16, num_attention_heads=4, vocab_size=59, hidden_act="relu")
    transformers.BertModel(config).save_pretrained(tmp_path)
    (tmp_path / "vocab.txt").write_bytes((albert / "vocab.txt").read_bytes())
    loaded = Snapshot("bert", tmp_path).load_any()
    assert not isinstance(loaded.model, Encoder) and loaded.position_encoding is None
    assert "read by transformers, without f(H)" in capsys.readouterr().err


def test_an_encoder_that_shortens_its_rows_is_one_line():
    transformers = pytest.importorskip("transformers")
    sizes = {"d_model": 8, "n_head": 2, "d_head": 4, "d_inner": 8, "block_sizes": [1, 1], "vocab_size": 11}
    model = transformers.FunnelModel(transformers.FunnelConfig(**sizes)).eval()
    with pytest.raises(UserError, match="layers of a funnel shorten their rows"):
        list(layer_states(model, tiny_batch()))


def test_a_dataset_of_another_tokenizer_is_refused(albert, analyze_main, tmp_path):
    with pytest.raises(UserError, match="tokenizer") as caught:
        analyze_main("space", albert, tmp_path / "s.json")
    assert "\n" not in str(caught.value) and not (tmp_path / "s.json").exists()


@pytest.mark.parametrize("more", [(), ("--data-path", "p", "--text", "t")])
def test_the_sentences_come_from_one_place(more):
    with pytest.raises(UserError, match="--data-path --text is required") as caught:
        analyze.main(["space", "--load", "r", "--output", "o.json", *more])
    assert caught.value.exit_code == 2


def test_texts_are_drawn_evenly_and_the_same_for_every_model(tiny_corpus, tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": str(number)}) + "\n" for number in range(20)))
    assert draw_texts(str(path), 30, seed=1) == [str(number) for number in range(20)]
    assert draw_texts(str(path), 5, seed=1) == draw_texts(str(path), 5, seed=1) != draw_texts(str(path), 5, seed=2)
    counts = [0] * 20
    for seed in range(2000):
        for text in draw_texts(str(path), 5, seed):
            counts[int(text)] += 1
    assert all(430 <= count <= 570 for count in counts)  # 500 of 2,000 each, 3.6 standard deviations
    path.write_text('{"text": "alone"}\n')
    with pytest.raises(UserError, match="holds one text: give two or more"):
        draw_texts(str(path), 5, seed=1)


def test_texts_become_rows_of_the_models_tokenizer_and_empty_ones_are_left_out(tiny_corpus):
    tokenizer = build_tokenizer("BertWordPieceLowerCase", tiny_corpus.vocab_file)
    rows = tokenizer.encode_batch(["the", " ", "the and the and the"])
    sentences = Sentences(rows, tokenizer, max_length=5)
    [batch] = sentences.batches(8)
    the, both = tokenizer.encode("the"), tokenizer.encode("the and the")
    assert batch.input_ids.tolist() == [
        [tokenizer.cls_id, *both, tokenizer.sep_id],
        [tokenizer.cls_id, *the, tokenizer.sep_id, tokenizer.pad_id, tokenizer.pad_id],
    ]
    assert batch.document_ids.tolist() == [[1] * 5, [1, 1, 1, 0, 0]]


def test_a_single_checkpoint_stands_at_its_step_and_a_folder_without_step_is_a_line():
    def row(run, step):
        return {"run": run, "iteration": step, "layers": [{"layer": 1, **dict.fromkeys(figures.SPACE, 0.5)}]}

    rows = [row("several", 500), row("several", 2000), row("one", 1500), row("hf", None)]
    figure = figures.draw_space(rows)
    lines = [list(line.get_xdata()) for line in figure.axes[len(figures.DRAWN)].lines]
    assert lines == [[500, 2000], [1500], [0, 1]]  # 0 to 1 is the whole width, in parts of the axis
    figure.draw_without_rendering()
    assert all(axis.title.get_window_extent().width < 0.95 * axis.bbox.width for axis in figure.axes)
