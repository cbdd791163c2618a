"""The command: what it writes, what it does not do twice, and what it refuses."""

import json
import shutil
from importlib.util import find_spec

import pytest
from safetensors.torch import load_file, save_file

from megatron_ddrp.conversion.to_huggingface import export_checkpoint
from megatron_ddrp.tasks.minimal_pairs.command import main
from tests.refusals import refused, wrong_arguments
from tests.unit.conversion.conftest import seal_again, write_checkpoint
from tests.unit.tasks.minimal_pairs.conftest import PAIRS, write_pairs


@pytest.fixture
def pairs(tmp_path):
    folder = write_pairs(tmp_path / "pairs", uid="agreement", field="morphology", linguistics_term="number")
    return write_pairs(folder, [("red cat sings.", "cat red sings."), ("é", "ü ü")], uid="order", field="syntax")


@pytest.fixture
def words(out, pairs, checkpoints):
    loads = [str(checkpoints[name]) for name in ("absolute", "ddrp")]
    return ["--data-dir", str(pairs), "--output-dir", str(out), "--workers", "1", "--load", *loads]


def lines(folder):
    return (folder / "scores.jsonl").read_text().splitlines()


def results_of(folder):
    return json.loads((folder / "results.json").read_text())


def test_results_are_written_and_nothing_is_scored_twice(words, out, tmp_path, capsys, checkpoints):
    copy = shutil.copytree(checkpoints["absolute"], tmp_path / "copy")
    main([*words, str(copy), "--dry-run"])
    shown = capsys.readouterr().out
    assert f"{copy}: left out, it has the same weights as {checkpoints['absolute']}" in shown
    assert "2 encoders x 2 paradigms, 7 pairs, score l2r, on cpu; 4 of 4 jobs to do" in shown
    assert not out.exists()
    main(words[:-1])
    first = lines(out)
    assert [json.loads(line)["paradigm"] for line in first] == ["agreement", "order"]
    main(words)
    assert "2 of 4 jobs to do" in capsys.readouterr().out
    assert lines(out)[:2] == first and len(lines(out)) == 4
    results = results_of(out)
    encoders = results["encoders"]
    assert [encoder["load"] for encoder in encoders] == words[-2:]
    for encoder, rows in zip(encoders, (lines(out)[:2], lines(out)[2:]), strict=True):
        right = {}
        for row in map(json.loads, rows):
            good = [a > b + 2e-5 for a, b in zip(row["good"], row["bad"], strict=True)]
            right[row["paradigm"]] = sum(good) / len(good)
            paradigm = encoder["paradigms"][row["paradigm"]]
            assert (paradigm["accuracy"], paradigm["pairs"]) == (right[row["paradigm"]], len(good))
        assert encoder["macro_average"] == pytest.approx(sum(right.values()) / 2)
        assert encoder["fields"] == {"morphology": right["agreement"], "syntax": right["order"]}
        assert encoder["linguistics_terms"] == {"number": right["agreement"]}
        assert encoder["standard_error"] > 0
    (pair,) = results["differences"]
    assert pair["difference"] == pytest.approx(encoders[0]["macro_average"] - encoders[1]["macro_average"])
    assert pair["over_paradigms"][0] <= pair["difference"] <= pair["over_paradigms"][1]
    assert pair["over_pairs"] is None
    text = (out / "table.md").read_text()
    assert f"| {checkpoints['ddrp']} |" in text.replace("\\", "")
    assert "| agreement | morphology | 5 |" in text
    assert "agreement,morphology,5," in (out / "tables" / "paradigms.csv").read_text()
    assert not find_spec("matplotlib") or (out / "heatmap.png").read_bytes().startswith(b"\x89PNG")


def test_a_mended_vocabulary_is_scored_anew(words, tmp_path, checkpoints, capsys):
    pytest.importorskip("transformers")
    export_checkpoint(checkpoints["absolute"], tmp_path / "hf", family_name="megatron_ddrp")
    words = [*words[:-2], str(tmp_path / "hf")]
    main(words)
    config = tmp_path / "hf" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"layer_norm_eps": 1e-3}))
    (tmp_path / "hf" / "export_sums.json").unlink()
    capsys.readouterr()
    main([*words, "--dry-run"])
    assert "2 of 2 jobs to do" in capsys.readouterr().out


def test_other_weights_other_sentences_and_another_score_are_other_jobs(words, out, tmp_path, pairs, tokenizer, capsys):
    run = write_checkpoint(tmp_path / "run", tokenizer, "mlm", position_encoding="rope")
    words = [*words[:-2], str(run)]
    main(words)
    before = lines(out)
    main([*words, "--score", "pll"])
    assert results_of(out)["score"] == "pll"
    main([*words, "--max-pairs", "1"])
    write_pairs(pairs, PAIRS[1:], uid="agreement")
    main(words)
    main([*words, "--random-init", "--seeds", "2"])
    found = lines(out)
    assert found[:2] == before and len(found) == 2 + 2 + 2 + 1 + 4
    assert len({tuple(json.loads(line)["good"]) for line in found[-4:]}) == 4  # two paradigms, two seeds
    assert "rope" not in capsys.readouterr().err
    drawn = [encoder["load"].partition(", ")[2] for encoder in results_of(out)["encoders"]]
    assert drawn == ["random weights, seed 1", "random weights, seed 2"]


def test_a_random_encoder_prefers_the_sentence_with_fewer_pieces(out, tmp_path, checkpoints):
    """What piece counts predict is all that random weights of the usual size see where the counts differ."""
    fewer = [("the cat sings.", "the cat singing a."), ("red red.", "red red red."), ("the dog is.", "the dog.")]
    folder = write_pairs(tmp_path / "pairs", fewer * 2)
    words = ["--data-dir", folder, "--load", checkpoints["absolute"], "--output-dir", out]
    main([*map(str, words), "--random-init", "--workers", "1"])
    (encoder,) = results_of(out)["encoders"]
    assert encoder["macro_average"] == encoder["piece_counts"] == pytest.approx(2 / 3)


def test_damaged_lines_of_the_store_sentences_without_a_piece_and_seeds_of_one_encoder_are_refused(words, out, pairs):
    wrong_arguments("needs --random-init", main, [*words, "--seeds", "2"])
    for text, count in (("\u200b\x00", 0), ("red " * 30, 30)):
        write_pairs(pairs, [("red", "cat"), ("red", text)], uid="bad")
        refused(rf"bad.jsonl, line 2: sentence_bad has {count} pieces; expected 1 to 22", main, words)
    (pairs / "bad.jsonl").unlink()
    main(words[:-1])
    path = out / "scores.jsonl"
    path.write_text(path.read_text().replace('"identical": 0', '"identical": 1', 1))
    refused("scores.jsonl, line 1: changed since it was written", main, words[:-1])


@pytest.mark.parametrize("checkpoint_folder", ["absolute"], indirect=True)
def test_a_run_that_saves_meanwhile_is_scored_at_the_checkpoint_that_was_chosen(training_run, out, tmp_path, capsys):
    data = write_pairs(tmp_path / "pairs", [("red cat runs", "cat red runs")])
    main(["--data-dir", str(data), "--output-dir", str(out), "--workers", "1", "--load", str(training_run)])
    assert "weights of the masked language model from iter_0000003;" in capsys.readouterr().out
    (row,) = map(json.loads, lines(out))
    assert (row["load"], row["checkpoint"]) == (str(training_run), str(training_run / "iter_0000003"))
    assert (out / "results.json").is_file() and (training_run / "iter_0000005").is_dir()


def test_jobs_that_nobody_does_are_no_success(words, monkeypatch):
    monkeypatch.setattr("megatron_ddrp.tasks.minimal_pairs.scoring.drain", lambda *_, **__: None)
    refused(r"4 jobs are missing in .*out, and the tables are not written", main, words)
    main([*words, "--no-wait"])


@pytest.mark.slow
def test_workers_share_the_jobs_and_score_the_same(words, out, tmp_path):
    main(words)
    main([*words[:2], "--output-dir", str(tmp_path / "shared"), "--workers", "2", *words[6:]])
    assert len(lines(tmp_path / "shared")) == 4
    assert results_of(tmp_path / "shared") == results_of(out)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", ["everywhere", "one word"])
def test_scores_that_are_not_finite_end_with_1_after_the_tables(words, out, tmp_path, tokenizer, capsys, value, place):
    """The weights of one word reach only the pairs with that word."""
    run = write_checkpoint(tmp_path / "run", tokenizer, "mlm", position_encoding="rope")
    (path,) = run.rglob("*.safetensors")
    weights = load_file(path)
    name = next(name for name, tensor in weights.items() if tensor.ndim == 2 and len(tensor) >= len(tokenizer.pieces))
    weights[name][slice(None) if place == "everywhere" else tokenizer.pieces.index("red")] = value
    save_file(weights, path)
    seal_again(path)
    said = r"scores that are not finite, in pairs out of 7: .*; they count as wrong"
    error = refused(said, main, [*words[:-2], str(run), words[-1]])
    assert f"{run} (" in str(error) and words[-1] not in str(error) and error.exit_code == 1
    table = (out / "table.md").read_text()
    assert "undefined" in table and "written to" in capsys.readouterr().out
    refused("scores that are not finite", main, [*words[:-2], str(run), words[-1]])
