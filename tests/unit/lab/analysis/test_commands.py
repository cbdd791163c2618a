"""tools/analyze.py on tiny checkpoints, exports and texts: sentences, notes, masked places, and refusals."""

import json
import re
import shutil
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers

from megatron_ddrp import checkpoint
from megatron_ddrp.checkpoint.weights import Form, note_tensors, write_tensors
from megatron_ddrp.config import Config, ObjectiveConfig
from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.data.batches.word_counts import WordFinder, count_rare_words
from megatron_ddrp.data.dataset import indexed_dataset
from megatron_ddrp.data.dataset.indexed_dataset import IndexedDataset
from megatron_ddrp.encoders.huggingface import layer_states
from megatron_ddrp.lab.analysis import command as analyze
from megatron_ddrp.lab.analysis import reports, session
from megatron_ddrp.lab.analysis.reports import count_pieces
from megatron_ddrp.model import Encoder
from megatron_ddrp.objectives.electra import NoteDictionary
from tests.datasets import write_dataset
from tests.refusals import refused, wrong_arguments
from tests.unit.lab.analysis.conftest import is_png, save_run
from tests.unit.model.tiny import tiny_batch
from tests.unit.tasks.conftest import SPECIAL, tokenizer_of, write_bert


def test_self_similarity_covers_every_checkpoint_and_export(run_folder, exported, analyze_main, tmp_path, capsys):
    result = analyze_main("self-similarity", [run_folder, exported], tmp_path / "f.png", "--sentences", 40)
    first, last, other = result["checkpoints"]
    assert [row["iteration"] for row in result["checkpoints"]] == [10, 20, None]
    assert (first["run"], other["run"], first["sentences"]) == ("ddrp", "export", 40)
    assert first["token_similarity"] != last["token_similarity"]
    for key in ("token_similarity", "head_similarity"):
        assert other[key] == pytest.approx(last[key], rel=1e-5)
    assert last["head_similarity"] == pytest.approx(sum(last["head_similarity_by_layer"]) / 2)
    assert is_png(tmp_path / "f.png")
    assert "ddrp step 20: f(S)" in capsys.readouterr().out


def test_direction_is_with_and_without_a_table(run_folder, corpus_tokenizer, analyze_main, tmp_path, capsys):
    save_run(tmp_path / "nope", corpus_tokenizer, 1, position_encoding="nope", relative_distance=None)
    loads = [run_folder, tmp_path / "nope"]
    result = analyze_main("direction", loads, tmp_path / "d.png", "--sentences", 40)
    ddrp, nope = result["models"]
    assert (ddrp["iteration"], ddrp["sentences"], ddrp["max_length"]) == (20, 40, 24)
    assert len(ddrp["cosines"]) == 23 and ddrp["near"] != ddrp["far"]
    assert nope["cosines"] is nope["near"] is nope["far"] is None
    assert abs(nope["shuffled"] - 0.5) < 4 * nope["shuffled_error"] < 0.1
    for model in (ddrp, nope):
        assert [layer["layer"] for layer in model["layers"]] == [1, 2]
        assert [point["distance"] for point in model["distances"]] == list(range(1, 9))
        for key in ("probe", "shuffled"):
            assert model[key] == pytest.approx(sum(point[key] for point in model["distances"]) / 8)
            assert model[f"{key}_error"] > 0 and all(0 < layer[key] < 1 for layer in model["layers"])
    assert is_png(tmp_path / "d.png")
    [first, second] = capsys.readouterr().out.splitlines()[:2]
    assert first.startswith("ddrp: cosine ") and second.startswith("nope: no table; text ")
    more = ("--max-length", 10, "--random-init")
    short, random = analyze_main("direction", run_folder, tmp_path / "s.png", *more)["models"]
    assert (random["run"], random["iteration"]) == ("ddrp, random weights", None)
    assert random["near"] != short["near"] and random["probe"] != short["probe"]
    assert [point["probe"] is None for point in short["distances"]] == [False] * 3 + [True] * 5


def test_triangle_takes_the_newest_checkpoint_and_maps_are_of_groups_or_heads(run_folder, analyze_main, tmp_path):
    result = analyze_main("triangle", run_folder, tmp_path / "t.png", "--sentences", 30, "--threshold", 0.45)
    [model] = result["models"]
    assert (model["iteration"], model["sentences"], result["threshold"]) == (20, 30, 0.45)
    assert [layer["layer"] for layer in model["layers"]] == [1, 2]
    assert model["share"] == model["layers"][-1]["share"] and 0 < model["layers"][0]["group_1_up"] < 1
    groups = analyze_main("attention-maps", run_folder, tmp_path / "m.png", "--max-length", 16)
    assert (groups["layer"], len(groups["maps"])) == (2, 3)
    assert [len(panel["map"]) for panel in groups["maps"]] == [16] * 3
    assert sum(groups["maps"][0]["map"][5]) == pytest.approx(1, abs=1e-4)
    assert groups["maps"][0]["up"] > groups["maps"][2]["up"] > groups["maps"][1]["up"]
    heads = analyze_main("attention-maps", run_folder, tmp_path / "h.json", "--layer", 1, "--head", 4, 2)
    assert [panel["name"] for panel in heads["maps"]] == ["head 4", "head 2"]
    assert is_png(tmp_path / "t.png") and is_png(tmp_path / "m.png") and not (tmp_path / "h.png").exists()


def test_what_cannot_be_done_is_one_line(run_folder, albert, analyze_main, tmp_path):
    for command, words, message in (
        ("triangle", "--device tpu9", "--device tpu9"),
        ("attention-maps", "--layer 3", "--layer is 3: this model has 1 to 2"),
        ("attention-maps", "--head 5", "--head is 5: this model has 1 to 4"),
        ("direction", "--max-length 4", "too few or too short to probe left and right"),
        ("self-similarity", "--split 100,0,0", "no sample in documents"),
    ):
        refused(re.escape(message), analyze_main, command, run_folder, tmp_path / "x.json", *words.split())
        assert not (tmp_path / "x.json").exists()
    refused(r"ends in \.png or \.json", analyze_main, "triangle", run_folder, tmp_path / "x.svg")
    for more in ((), ("--data-path", "p", "--text", "t")):
        words = ["space", "--load", "r", "--output", "o.json", *more]
        wrong_arguments("--data-path --text is required", analyze.main, words)
    for message, command, load in (
        ("neither checkpoints nor a Hugging Face folder", "triangle", tmp_path),
        ("tokenizer", "space", albert),  # the dataset is of another one
    ):
        refused(message, analyze_main, command, load, tmp_path / "x.json")
        assert not (tmp_path / "x.json").exists()


def test_encoders_of_two_vocabularies_share_one_figure(run_folder, albert, tiny_corpus, analyze_main, tmp_path, capsys):
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
    assert is_png(tmp_path / "s.png")
    printed = capsys.readouterr().out
    assert "albert, layer 3: f(S) " in printed
    assert printed.startswith("albert takes at most 20 tokens: the sentences of all models are cut to 20\n")


SHORTENED = "short takes at most 16 tokens: the sentences of all models are cut to 16\n"


@pytest.fixture(scope="module")
def berts(tiny_corpus, tmp_path_factory):
    """Folders of two BERTs of transformers that differ in their number of positions, 16 and 40."""
    words, at = tiny_corpus.vocab_file.read_text().splitlines()[len(SPECIAL) :], tmp_path_factory.mktemp("berts")
    return [write_bert(at / name, words, max_length=positions) for name, positions in (("short", 16), ("long", 40))]


@pytest.fixture
def seen(monkeypatch):
    """Ids of the sentences of each model, filled by the analysis."""
    found = []

    class Recorded(session.Sentences):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            found.append([row.tolist() for batch in self.batches(8) for row in batch.input_ids])

    monkeypatch.setattr(session, "Sentences", Recorded)
    return found


def test_folders_of_different_lengths_see_the_same_sentences(berts, run_folder, analyze_main, seen, tmp_path, capsys):
    words = (tmp_path / "f.json", "--sentences", 20)
    for order in (berts, berts[::-1]):
        rows = analyze_main("self-similarity", order, *words)["checkpoints"]
        assert [row["max_length"] for row in rows] == [16, 16]
        assert seen[-2] == seen[-1] and len(seen[-1]) == 20
        assert capsys.readouterr().out.startswith(SHORTENED)
    assert seen[0] == seen[2]
    analyze_main("self-similarity", berts, *words, "--max-length", 12)
    assert seen[-2] == seen[-1] and "takes at most" not in capsys.readouterr().out
    analyze_main("self-similarity", berts[1], *words)
    assert "takes at most" not in capsys.readouterr().out
    seen.clear()  # a folder that is shorter than a run shortens its sentences
    analyze_main("space", [run_folder, berts[0]], *words, "--split", "80,20,0")
    assert len(seen) == 3 and seen[0] == seen[1] == seen[2]


def test_the_length_of_a_folder_is_known_before_its_weights_are_read(berts, tmp_path):
    assert [session.Snapshot("b", folder).seq_length() for folder in berts] == [16, 40]
    transformers.AlbertConfig(max_position_embeddings=18).save_pretrained(tmp_path / "albert")
    assert session.Snapshot("b", tmp_path / "albert").seq_length() == 18
    (tmp_path / "config.json").write_text('{"model_type": "no such model"}')
    assert session.Snapshot("unknown", tmp_path).seq_length() is None


def test_sentences_are_validation_text_with_specials_and_depend_on_the_seed(tiny_corpus, corpus_tokenizer):
    prefix, tokenizer = str(tiny_corpus.prefix), corpus_tokenizer

    def some(seed=1, count=20):
        rows = session.validation_rows([prefix], "80,20,0", tokenizer, 24, count, seed)
        return session.Sentences(rows, tokenizer, max_length=12)

    dataset = IndexedDataset(prefix)
    held_out = {tuple(dataset[number][:10]) for number in range(round(0.8 * dataset.num_documents), len(dataset))}
    sentences = some(count=10**6)
    rows = []
    for batch in sentences.batches(8):
        lengths = batch.document_ids.sum(1)
        rows += [row[:n].tolist() for row, n in zip(batch.input_ids, lengths, strict=True)]
    assert len(rows) == len(sentences) == len(some(2, 10**7)) > len(some())
    assert {row[0] for row in rows} == {tokenizer.cls_id} and {row[-1] for row in rows} == {tokenizer.sep_id}
    assert max(map(len, rows)) == 12
    beginnings = {tuple(row[1:11]) for row in rows if len(row) == 12}
    assert held_out & beginnings and len(held_out - beginnings) < len(held_out) / 10
    drawn = [[row.tolist() for row in some(seed).rows] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    texts, everything = (Counter(tuple(row.tolist()) for row in some(count=count).rows) for count in (20, 10**6))
    assert texts.total() == 20 and texts <= everything
    assert (sentences.lengths[:-1] >= sentences.lengths[1:]).all()


def test_ids_outside_the_vocabulary_and_numbers_not_finite_are_refused(corpus_tokenizer, tmp_path, monkeypatch):
    size = corpus_tokenizer.vocab_size
    prefix = write_dataset(tmp_path / "a", [[[9] * 10]] * 8 + [[[9] * 9 + [size]]]).prefix
    assert len(session.validation_rows([prefix], "50,25,25", corpus_tokenizer, 24, 9, 1)) == 2
    monkeypatch.setattr(indexed_dataset, "CHUNK_TOKENS", 20)
    message = f"a: token ids from 9 to {size}, but the vocabulary has {size} pieces"
    refused(message, session.validation_rows, [prefix], "0,100,0", corpus_tokenizer, 24, 9, 1)
    refused(message, count_pieces, [prefix], size)
    # jSON has no such numbers: `compare` could not read the file, and one run that diverged would stop it
    words = r"x\.json: not written, some numbers are not finite: use a checkpoint that"
    for value in (float("nan"), float("inf")):
        write = session.AnalysisFiles(tmp_path / "x.json").write
        refused(words, write, {"models": [{"share": value}]}, lambda: None)
        assert not (tmp_path / "x.json").exists()


def test_snapshots_of_folders_with_one_name_have_whole_paths(run_folder, tmp_path):
    other = shutil.copytree(run_folder, tmp_path / "ddrp")
    assert [snapshot.iteration for snapshot in session.find_snapshots([run_folder], every=True)] == [10, 20]
    both = session.find_snapshots([run_folder, other], every=False)
    assert [snapshot.run for snapshot in both] == [str(run_folder), str(other)]


def test_progress_moves_on_with_every_batch():
    counts = []
    sentences = SimpleNamespace(batches=lambda size: [tiny_batch().map(lambda tensor: tensor.numpy())] * 2)
    view = session.View(None, None, None, sentences, torch.device("cpu"), 3, counts.append)
    assert [list(counts) for _ in view.batches()] == [[], [3]] and counts == [3, 3]


def test_transformers_and_we_see_one_space_of_bert_and_what_we_refuse_is_left_to_them(berts, albert, tmp_path, capsys):
    bert = transformers.BertForMaskedLM.from_pretrained(berts[1]).eval()
    loaded = session.Snapshot("bert", berts[1]).load_any()
    assert isinstance(loaded.model, Encoder)
    for ours, theirs in zip(*(layer_states(each, tiny_batch()) for each in (loaded.model, bert.bert)), strict=True):
        valid = tiny_batch().document_ids > 0
        torch.testing.assert_close(ours.hidden[valid], theirs.hidden[valid], rtol=0, atol=1e-5)
    config = transformers.BertConfig(hidden_size=16, num_attention_heads=4, vocab_size=59, hidden_act="relu")
    transformers.BertModel(config).save_pretrained(tmp_path)
    (tmp_path / "vocab.txt").write_bytes((albert / "vocab.txt").read_bytes())
    loaded = session.Snapshot("bert", tmp_path).load_any()
    assert not isinstance(loaded.model, Encoder) and loaded.position_encoding is None
    assert "read by transformers, without f(H)" in capsys.readouterr().err
    sizes = {"d_model": 8, "n_head": 2, "d_head": 4, "d_inner": 8, "block_sizes": [1, 1], "vocab_size": 11}
    model = transformers.FunnelModel(transformers.FunnelConfig(**sizes)).eval()
    refused("layers of a funnel shorten their rows", list, layer_states(model, tiny_batch()))


def test_texts_are_drawn_evenly_and_the_same_for_every_model_and_empty_ones_are_left_out(tmp_path, corpus_tokenizer):
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": str(number)}) + "\n" for number in range(20)))
    assert session.draw_texts(str(path), 30, seed=1) == [str(number) for number in range(20)]
    first, again, other = (session.draw_texts(str(path), 5, seed) for seed in (1, 1, 2))
    assert first == again != other
    counts = Counter(text for seed in range(2000) for text in session.draw_texts(str(path), 5, seed))
    assert len(counts) == 20
    assert all(430 <= count <= 570 for count in counts.values())  # 500 of 2,000 each, 3.6 standard deviations
    path.write_text('{"text": "alone"}\n')
    refused("holds one text: give two or more", session.draw_texts, str(path), 5, seed=1)
    rows = corpus_tokenizer.encode_batch(["the", " ", "the and the and the"])
    [batch] = session.Sentences(rows, corpus_tokenizer, max_length=5).batches(8)
    cls, sep, pad = corpus_tokenizer.cls_id, corpus_tokenizer.sep_id, corpus_tokenizer.pad_id
    the, both = corpus_tokenizer.encode("the"), corpus_tokenizer.encode("the and the")
    assert batch.input_ids.tolist() == [[cls, *both, sep], [cls, *the, sep, pad, pad]]
    assert batch.document_ids.tolist() == [[1] * 5, [1, 1, 1, 0, 0]]


@pytest.fixture
def tokenizer(tmp_path):
    return tokenizer_of(tmp_path, ["the", "cat", "dog", "bird", "red", "and", "sing", "##s", ".", "!"])


@pytest.fixture
def dataset(tokenizer, tmp_path):
    texts = ("the cat sings . the red dog ! the the . the cat and the bird", "red .")
    return write_dataset(tmp_path / "d", [[tokenizer.encode(text)] for text in texts])


@pytest.fixture
def rare(dataset, tokenizer):
    return count_rare_words([(dataset, (0, 2))], WordFinder(tokenizer), (1, 2))


def test_sentences_with_a_rare_word_and_nearest_notes_look_past_what_all_share(dataset, rare, tokenizer):
    found = {tokenizer.decode(rare.word(number + 1)) for number in range(len(rare))}
    assert found == {"cat", "sings", "red", "dog", "!", "and", "bird"}
    facts = reports.share_of_sentences(dataset, rare, tokenizer, documents=100)
    assert (facts["sentences"], facts["sentences_with_a_rare_word"]) == (5, 4)
    assert reports.share_of_sentences(dataset, rare, tokenizer, documents=1)["sentences"] == 4
    notes = notes_of(rare, tokenizer)
    met = (notes.met.nonzero().squeeze(-1) + 1).tolist()
    near = reports.nearest_notes("cat", rare, met, notes.notes[notes.met], tokenizer, 2)
    assert [other["word"] for other in near] == ["bird", "dog"]
    assert near[0]["cosine"] > 0.9 > 0.0 > near[1]["cosine"]
    refused("--words red: no note", reports.nearest_notes, "red", rare, met, notes.notes[notes.met], tokenizer, 2)


def notes_of(rare, tokenizer):
    """cat and bird alike, dog opposed; a large part common to all."""
    vectors = {"cat": [1, 0, 9], "bird": [1, 0.1, 9], "dog": [-1, 0, 9], "sings": [-1, 1, 9]}
    notes = NoteDictionary(rare, 3, ObjectiveConfig(notes=True))
    for number in range(len(rare)):
        if vector := vectors.get(tokenizer.decode(rare.word(number + 1))):
            notes.notes[number], notes.met[number] = torch.tensor(vector, dtype=torch.float32), True
    return notes


def write_notes(folder, rare, tokenizer, step=3):
    """Write a checkpoint that holds notes alone; return its file of notes."""
    path = folder / checkpoint.tag(step)
    path.mkdir(parents=True)
    tensors = note_tensors(notes_of(rare, tokenizer))
    name = f"{checkpoint.BESIDE}-00-of-01.safetensors"
    facts = write_tensors(path / name, {key: Form.of(t) for key, t in tensors.items()}, tensors.items())
    state = {"iteration": step, checkpoint.WEIGHTS_ONLY: True, "files": {name: facts}, "config": Config().to_dict()}
    checkpoint.write_state(path, state)
    tokenizer.save(folder / checkpoint.TOKENIZER)
    checkpoint.mark_latest(folder, path.name)
    return path / name


def test_the_command_finds_notes_and_skips_or_refuses_damaged_ones(rare, tokenizer, dataset, tmp_path, capfd, run_tool):
    older, newer = (write_notes(tmp_path, rare, tokenizer, step) for step in (3, 4))
    newer.write_bytes(newer.read_bytes()[:-1] + b"?")
    found = reports.analyze_notes(tmp_path, None, ["sings"], 2, 10)
    assert found["checkpoint"] == str(older.parent)
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"skipped {newer.parent}: {newer.name} has the CRC-32 ")
    older.write_bytes(older.read_bytes()[:-1] + b"?")
    for load in (tmp_path, older.parent):
        refused("has the CRC-32", reports.analyze_notes, load, None, ["sings"], 2, 10)
    write_notes(tmp_path / "run", rare, tokenizer)
    command = [analyze, "notes", "--load", tmp_path / "run"]
    more = ["--data-path", dataset.prefix, "--words", "sings", "--output", tmp_path / "notes.json"]
    done = run_tool(*command, *more)
    assert done.returncode == 0, done.stderr
    assert "7 rare words (1 to 2 times in the training text), 4 with a note" in done.stdout
    assert "80.0% of 5 sentences" in done.stdout
    found = json.loads((tmp_path / "notes.json").read_text(encoding="utf-8"))
    assert found["nearest"]["sings"][0]["word"] == "dog" and np.isclose(found["share_of_sentences"], 0.8)
    wrong = run_tool(*command, "--words", "horse")
    assert wrong.returncode == 2 and wrong.stderr.count("\n") == 1


def test_one_piece_of_each_sentence_is_masked_and_frequent_pieces_are_no_special_ones(tiny_corpus, corpus_tokenizer):
    """The model names piece 7 first, 9 second: with one guess it finds the sentence of 7, with two all three."""
    tokenizer = SimpleNamespace(special_ids=np.array([0, 1, 2, 3, 4]), mask_id=4, vocab_size=20)
    cls, sep, unk = 2, 3, 1
    rows = [[cls, 7, 7, 7, sep], [cls, unk, 9, unk, sep], [cls, unk, unk, sep, 0], [cls, 9, 9, sep, 0]]
    ids, seen = torch.tensor(rows), []

    def model(ids, places):
        seen.extend(zip(ids.tolist(), places.tolist(), strict=True))
        logits = torch.zeros(len(ids), 24)  # padded beyond the vocabulary, where the largest logits are
        logits[:, 7], logits[:, 9], logits[:, 20:] = 3, 2, 9
        return logits

    def count_found(frequent, seed=1):
        batch = Batch.of_texts(ids, (ids > 0).long())
        return reports.count_found(model, [batch], tokenizer, np.array(frequent), seed)

    assert (count_found([9]), count_found([9, 8])) == ((3, 1, 2), (3, 3, 2))
    whole = [[i for i in sentence if i] for sentence in rows]
    for row, place in seen:
        assert row[place] == tokenizer.mask_id and row.count(tokenizer.mask_id) == 1
        assert any(row[:place] + [piece] + row[place + 1 :] in whole for piece in (7, 9))
    assert [len(row) for row, _ in seen[:3]] == [5, 5, 4], "rows without padding"
    drawn = set()
    for seed in range(8):
        seen.clear()
        count_found([9], seed)
        drawn.add(tuple(place for _, place in seen))
    assert len(drawn) > 1, "the seed draws the places"
    prefix, special, size = str(tiny_corpus.prefix), corpus_tokenizer.special_ids, corpus_tokenizer.vocab_size
    counts = np.bincount(np.concatenate(list(IndexedDataset(prefix).chunks())), minlength=size)
    counts[special] = 0
    once, twice = (
        reports.frequent_pieces(reports.count_pieces(prefixes, size), corpus_tokenizer, 5).tolist()
        for prefixes in ([prefix], [prefix, prefix])
    )
    assert [counts[i] for i in once] == sorted(counts, reverse=True)[:5] and once == twice


def test_the_command_counts_runs_exports_and_random_weights(run_folder, exported, analyze_main, tmp_path, capsys):
    words = ("--sentences", 30, "--top-k", 40, "--random-init")
    result = analyze_main("masked-places", [run_folder, exported], tmp_path / "places.png", *words)
    run, random, other, _ = result["models"]
    assert (run["places"], run["iteration"], result["top_k"]) == (30, 20, 40)
    assert run["found"] == other["found"] and random["run"] == "ddrp, random weights"
    assert len({row["found_by_frequency"] for row in result["models"]}) == 1
    assert is_png(tmp_path / "places.png")
    line = f"ddrp step 20: the masked piece is among the first 40 in {run['found']} of 30 held-out places"
    assert line in capsys.readouterr().out
