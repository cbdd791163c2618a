"""tools/analyze.py on tiny checkpoints and an export of one: figures, JSON, and one line for what it cannot do."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ddrp.conversion.to_huggingface import export_checkpoint
from megatron_ddrp.lab.analysis import command as analyze
from tests.refusals import refused, wrong_arguments
from tests.unit.lab.analysis.conftest import is_png, save_run


def test_self_similarity_covers_every_checkpoint_and_export(run_folder, exported, analyze_main, tmp_path, capsys):
    pytest.importorskip("matplotlib")
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


def test_a_plain_bert_is_read_too_and_direction_is_with_and_without_a_table(
    run_folder, corpus_tokenizer, analyze_main, tmp_path, capsys
):
    save_run(tmp_path / "bert", corpus_tokenizer, 1, position_encoding="absolute")
    export_checkpoint(tmp_path / "bert", tmp_path / "hf")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["model_type"] == "bert"
    more = ("--sentences", 20, "--split", "80,20,0")
    rows = analyze_main("self-similarity", [tmp_path / "bert", tmp_path / "hf"], tmp_path / "f.json", *more)
    ours, theirs = rows["checkpoints"]
    assert theirs["token_similarity"] == pytest.approx(ours["token_similarity"], rel=1e-5)
    pytest.importorskip("matplotlib")
    capsys.readouterr()
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


def test_triangle_takes_the_newest_checkpoint_and_maps_are_of_groups_or_of_single_heads(
    run_folder, analyze_main, tmp_path
):
    pytest.importorskip("matplotlib")
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
        ("triangle", "--threshold 1.5", "--threshold is 1.5: it must lie in (0, 1]"),
        ("triangle", "--sentences 0", "--sentences is 0: it must be at least 1"),
        ("triangle", "--max-length 2", "--max-length is 2: it must be at least 3"),
        ("triangle", "--device tpu9", "--device tpu9"),
        ("attention-maps", "--layer 3", "--layer is 3: this model has 1 to 2"),
        ("attention-maps", "--head 0", "--head is 0: it must be at least 1"),
        ("attention-maps", "--head 5", "--head is 5: this model has 1 to 4"),
        ("direction", "--seed -1", "--seed is -1: it must be at least 0"),
        ("direction", "--max-length 4", "too few or too short to probe left and right"),
        ("self-similarity", "--split 100,0,0", "no sample in documents"),
        ("throughput", "--lengths 2", "--lengths is 2: it must be at least 3"),
        ("throughput", "--rounds 0", "--rounds is 0"),
        ("throughput", "--tokens 0", "--tokens is 0"),
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


def test_help_needs_no_torch():
    code = "import sys\nfrom megatron_ddrp.lab.analysis import command\nsys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[4], timeout=60).returncode == 0


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
    assert is_png(tmp_path / "s.png")
    printed = capsys.readouterr().out
    assert "albert, layer 3: f(S) " in printed
    assert printed.startswith("albert takes at most 20 tokens: the sentences of all models are cut to 20\n")
