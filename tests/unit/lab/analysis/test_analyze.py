"""tools/analyze.py on tiny checkpoints and an export of one: figures, JSON, and one line for what it cannot do."""

import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_ddrp import checkpoint
from megatron_ddrp.data.dataset import indexed_dataset
from megatron_ddrp.data.dataset.indexed_dataset import IndexedDataset
from megatron_ddrp.data.tokenizers.tokenizer import build_tokenizer
from megatron_ddrp.errors import UserError
from megatron_ddrp.lab.analysis.reports import count_pieces
from megatron_ddrp.lab.analysis.session import AnalysisFiles, Sentences, View, find_snapshots, validation_rows
from megatron_ddrp.model import build_model
from tests.datasets import write_dataset
from tests.unit.model.tiny import tiny_batch

ROOT = Path(__file__).parents[4]


def is_png(path):
    return path.read_bytes().startswith(b"\x89PNG")


def test_self_similarity_covers_every_checkpoint_and_export(run_folder, analyze_main, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    from megatron_ddrp.conversion.to_huggingface import export_checkpoint

    export_checkpoint(run_folder, tmp_path / "export")
    result = analyze_main("self-similarity", [run_folder, tmp_path / "export"], tmp_path / "f.png", "--sentences", 40)
    first, last, exported = result["checkpoints"]
    assert [row["iteration"] for row in result["checkpoints"]] == [10, 20, None]
    assert (first["run"], exported["run"], first["sentences"]) == ("ddrp", "export", 40)
    assert first["token_similarity"] != last["token_similarity"]
    for key in ("token_similarity", "head_similarity"):
        assert exported[key] == pytest.approx(last[key], rel=1e-5)
    assert last["head_similarity"] == pytest.approx(sum(last["head_similarity_by_layer"]) / 2)
    assert is_png(tmp_path / "f.png")
    assert "ddrp step 20: f(S)" in capsys.readouterr().out


def save_run(folder, run_folder, tiny_corpus, **changes):
    """A run of step 1 with random weights, like `run_folder` but with `changes` to its model."""
    config = checkpoint.read_config(run_folder / "iter_0000020").replace(model=changes)
    path = folder / checkpoint.tag(1)
    path.mkdir(parents=True)
    files = {checkpoint.WEIGHTS: checkpoint.save_weights(dict(build_model(config.model).named_parameters()), path)}
    checkpoint.write_state(path, {"iteration": 1, "files": files, "config": config.to_dict()})
    build_tokenizer("BertWordPieceLowerCase", tiny_corpus.vocab_file).save(folder / checkpoint.TOKENIZER)


def test_a_plain_bert_is_read_too(run_folder, tiny_corpus, analyze_main, tmp_path):
    from megatron_ddrp.conversion.to_huggingface import export_checkpoint

    save_run(tmp_path / "bert", run_folder, tiny_corpus, position_encoding="absolute")
    export_checkpoint(tmp_path / "bert", tmp_path / "hf")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["model_type"] == "bert"
    more = ("--sentences", 20, "--split", "80,20,0")
    rows = analyze_main("self-similarity", [tmp_path / "bert", tmp_path / "hf"], tmp_path / "f.json", *more)
    ours, theirs = rows["checkpoints"]
    assert theirs["token_similarity"] == pytest.approx(ours["token_similarity"], rel=1e-5)


def test_triangle_takes_the_newest_checkpoint(run_folder, analyze_main, tmp_path):
    pytest.importorskip("matplotlib")
    result = analyze_main("triangle", run_folder, tmp_path / "t.png", "--sentences", 30, "--threshold", 0.45)
    [model] = result["models"]
    assert (model["iteration"], model["sentences"], result["threshold"]) == (20, 30, 0.45)
    assert [layer["layer"] for layer in model["layers"]] == [1, 2]
    assert model["share"] == model["layers"][-1]["share"]
    assert 0 < model["layers"][0]["group_1_up"] < 1
    assert is_png(tmp_path / "t.png")


def test_direction_of_checkpoints_with_and_without_a_table(run_folder, analyze_main, tmp_path, tiny_corpus, capsys):
    pytest.importorskip("matplotlib")
    save_run(tmp_path / "nope", run_folder, tiny_corpus, position_encoding="nope", relative_distance=None)
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


def test_maps_of_groups_and_of_single_heads(run_folder, analyze_main, tmp_path):
    pytest.importorskip("matplotlib")
    groups = analyze_main("attention-maps", run_folder, tmp_path / "m.png", "--max-length", 16)
    assert (groups["layer"], len(groups["maps"]), is_png(tmp_path / "m.png")) == (2, 3, True)
    assert [len(panel["map"]) for panel in groups["maps"]] == [16] * 3
    assert sum(groups["maps"][0]["map"][5]) == pytest.approx(1, abs=1e-4)
    assert groups["maps"][0]["up"] > groups["maps"][2]["up"] > groups["maps"][1]["up"]
    heads = analyze_main("attention-maps", run_folder, tmp_path / "h.json", "--layer", 1, "--head", 4, 2)
    assert [panel["name"] for panel in heads["maps"]] == ["head 4", "head 2"]
    assert not (tmp_path / "h.png").exists()


def test_sentences_are_validation_text_with_specials_and_depend_on_the_seed(tiny_corpus):
    tokenizer = build_tokenizer("BertWordPieceLowerCase", tiny_corpus.vocab_file)

    def some(seed=1, count=20, max_length=12):
        rows = validation_rows([str(tiny_corpus.prefix)], "80,20,0", tokenizer, 24, count, seed)
        return Sentences(rows, tokenizer, max_length)

    dataset = IndexedDataset(str(tiny_corpus.prefix))
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


def test_an_id_outside_the_vocabulary_is_one_line_wherever_it_is_read(tiny_corpus, tmp_path, monkeypatch):
    tokenizer = build_tokenizer("BertWordPieceLowerCase", tiny_corpus.vocab_file)
    size = tokenizer.vocab_size
    prefix = write_dataset(tmp_path / "a", [[[9] * 10]] * 8 + [[[9] * 9 + [size]]]).prefix
    assert len(validation_rows([prefix], "50,25,25", tokenizer, 24, 9, 1)) == 2
    monkeypatch.setattr(indexed_dataset, "CHUNK_TOKENS", 20)
    for read in (
        lambda: validation_rows([prefix], "0,100,0", tokenizer, 24, 9, 1),
        lambda: count_pieces([prefix], size),
    ):
        with pytest.raises(UserError, match=f"a: token ids from 9 to {size}, but the vocabulary has {size} pieces"):
            read()


def test_damaged_checkpoints_are_passed_over_and_named(run_folder, tmp_path, capsys):
    found = find_snapshots([run_folder], every=True)
    assert [snapshot.iteration for snapshot in found] == [10, 20] and not capsys.readouterr().err
    broken = tmp_path / "ddrp"
    for name in ("iter_0000010", "iter_0000020"):
        (broken / name).mkdir(parents=True)
        (broken / name / checkpoint.STATE).write_bytes((run_folder / name / checkpoint.STATE).read_bytes())
    shutil.copy(run_folder / "iter_0000010" / checkpoint.WEIGHTS, broken / "iter_0000010")
    checkpoint.mark_latest(broken, "iter_0000020")
    for every in (True, False):
        found = find_snapshots([broken], every)
        assert [snapshot.iteration for snapshot in found] == [10]
        assert "iter_0000020: model.safetensors is missing" in capsys.readouterr().err
    both = find_snapshots([run_folder, broken], every=False)
    assert [snapshot.run for snapshot in both] == [str(run_folder), str(broken)]


def test_progress_moves_on_with_every_batch():
    counts = []
    batches = [tiny_batch().map(lambda tensor: tensor.numpy())] * 2
    sentences = SimpleNamespace(batches=lambda size: batches)
    view = View(None, None, None, sentences, torch.device("cpu"), 3, counts.append)
    seen = []
    for batch in view.batches():
        seen.append((batch.input_ids.shape, list(counts)))
    assert [done for _, done in seen] == [[], [3]] and counts == [3, 3]


@pytest.mark.parametrize(
    ("command", "more", "message"),
    [
        ("triangle", ("--threshold", 1.5), "--threshold is 1.5: it must lie in (0, 1]"),
        ("triangle", ("--sentences", 0), "--sentences is 0: it must be at least 1"),
        ("triangle", ("--max-length", 2), "--max-length is 2: it must be at least 3"),
        ("triangle", ("--device", "tpu9"), "--device tpu9"),
        ("attention-maps", ("--layer", 3), "--layer is 3: this model has 1 to 2"),
        ("attention-maps", ("--head", 0), "--head is 0: it must be at least 1"),
        ("attention-maps", ("--head", 5), "--head is 5: this model has 1 to 4"),
        ("direction", ("--seed", -1), "--seed is -1: it must be at least 0"),
        ("direction", ("--max-length", 4), "too few or too short to probe left and right"),
        ("self-similarity", ("--split", "100,0,0"), "no sample in documents"),
    ],
)
def test_what_cannot_be_done_is_one_line(run_folder, analyze_main, tmp_path, command, more, message):
    with pytest.raises(UserError, match=message.replace("(", r"\(").replace(")", ".")) as caught:
        analyze_main(command, run_folder, tmp_path / "x.json", *more)
    assert "\n" not in str(caught.value) and not (tmp_path / "x.json").exists()


def test_other_outputs_and_folders_are_refused(run_folder, analyze_main, tmp_path):
    with pytest.raises(UserError, match=r"ends in \.png or \.json"):
        analyze_main("triangle", run_folder, tmp_path / "x.svg")
    with pytest.raises(UserError, match="neither checkpoints nor a Hugging Face folder"):
        analyze_main("triangle", tmp_path, tmp_path / "x.json")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_refused_and_nothing_is_written(tmp_path, value):
    """JSON has no such numbers: `compare` could not read the file, and one run that diverged would stop it."""
    with pytest.raises(UserError, match=r"x\.json: not written, some numbers are not finite: use a checkpoint that"):
        AnalysisFiles(tmp_path / "x.json").write({"models": [{"share": value}]}, lambda: None)
    assert not (tmp_path / "x.json").exists()


def test_help_needs_no_torch():
    code = "import sys\nfrom megatron_ddrp.lab.analysis import command\nsys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0
