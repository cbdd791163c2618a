"""Minimal pairs: tiny masked LMs with random weights, sentences beside a twin in float64 loops, and the command."""

import json
import math
import re
import shutil
import statistics
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from scipy.stats import ttest_1samp

from megatron_ddrp.conversion.to_huggingface import export_checkpoint
from megatron_ddrp.data.tokenizers.tokenizer import usual_rows
from megatron_ddrp.encoders.masked_lm import HuggingFaceLogits, load_masked_lm, piece_logits
from megatron_ddrp.tasks.minimal_pairs import pairs, scoring
from megatron_ddrp.tasks.minimal_pairs.command import main
from megatron_ddrp.tasks.minimal_pairs.pairs import SCORES, Paradigm, masked_rows, read_pairs
from megatron_ddrp.tasks.minimal_pairs.scoring import encode_pairs, score_sentences
from tests.refusals import refused, wrong_arguments
from tests.unit.conversion.conftest import SIZES, WORDS, seal_again, write_checkpoint
from tests.unit.tasks.conftest import tokenizer_of

PAIRS = [
    ("the cat sings.", "the cat sing."),
    ("red dogs run, birds sing.", "red dogs runs, birds sing."),
    ("the bird runs.", "the birds runs."),
    ("blue cats sing.", "cats blue sing."),
    ("the dog runsing.", "the dog runing the."),
]
"""With the pieces of `WORDS`: `sings` is sing ##s, `runsing` run ##s ##ing."""


def write_pairs(folder, pairs=PAIRS, uid="toy", **more):
    """A file of minimal pairs as BLiMP has them; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"sentence_good": good, "sentence_bad": bad, "UID": uid, **more} for good, bad in pairs]
    (folder / f"{uid}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    return tokenizer_of(tmp_path_factory.mktemp("pieces"), WORDS)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory, tokenizer):
    """Folders that training saved, by their position encoding; deberta has a mask decoder."""
    folder = tmp_path_factory.mktemp("runs")
    return {
        name: write_checkpoint(folder / name, tokenizer, "mlm", position_encoding=name)
        for name in ("absolute", "ddrp", "deberta")
    }


SENTENCES = [sentence for pair in PAIRS for sentence in pair]
CPU = torch.device("cpu")


def twin(model, tokenizer, pieces, score):
    """Salazar et al., equation 2, and Kauf and Ivanova's two variants, from the logits `[seq, vocab]` of whole rows."""
    words = []
    for name in [tokenizer.pieces[i] for i in pieces]:
        words.append(words[-1] if name.startswith("##") else len(words))
    total = 0.0
    for t, target in enumerate(pieces):
        row = list(pieces)
        for other in range(len(pieces)):
            in_word = words[other] == words[t]
            if other == t or (score == "whole-word" and in_word) or (score == "l2r" and in_word and other > t):
                row[other] = tokenizer.mask_id
        with torch.no_grad():
            logits = model(torch.tensor([[tokenizer.cls_id, *row, tokenizer.sep_id]])).logits[0, t + 1].tolist()
        total += logits[target] - math.log(sum(math.exp(logit) for logit in logits))
    return total


@pytest.fixture(scope="module", params=["absolute", "ddrp", "deberta"])
def both(request, checkpoints, tmp_path_factory):
    """A checkpoint and its export: BERT's classes for absolute, our own for the others."""
    folder = tmp_path_factory.mktemp("exported") / "hf"
    export_checkpoint(checkpoints[request.param], folder)
    return checkpoints[request.param], folder


def scores(folder, score="l2r", budget=64, sentences=SENTENCES):
    encoder = load_masked_lm(folder)
    model = piece_logits(encoder, 0, CPU)
    return score_sentences(model, encoder.tokenizer, encoder.tokenizer.encode_batch(sentences), score, budget)


@pytest.mark.parametrize("score", SCORES)
def test_a_checkpoint_and_its_export_score_as_the_twin(both, score, tokenizer):
    exported = load_masked_lm(both[1]).module.model.double().eval()
    expected = torch.tensor([twin(exported, tokenizer, tokenizer.encode(text), score) for text in SENTENCES])
    assert expected.unique().numel() == len(SENTENCES)
    for folder in both:
        torch.testing.assert_close(torch.tensor(scores(folder, score)), expected.double(), rtol=0, atol=2e-4)


def test_the_kinds_differ_where_a_word_has_several_pieces_and_equal_sentences_are_scored_once(checkpoints):
    found = {score: scores(checkpoints["ddrp"], score) for score in SCORES}
    whole = [scores(checkpoints["ddrp"], score, sentences=["the red cat, the dog."]) for score in SCORES]
    assert whole == [whole[0]] * 3
    for one, other in (("pll", "l2r"), ("l2r", "whole-word")):
        assert abs(found[one] - found[other]).max() > 1e-3
    for budget in (1, 40, 10_000):
        assert abs(scores(checkpoints["ddrp"], budget=budget) - found["l2r"]).max() < 1e-4
    done = []
    encoder = load_masked_lm(checkpoints["absolute"])
    model = piece_logits(encoder, 0, CPU)
    cat, dog = encoder.tokenizer.encode_batch(["the cat.", "the dog."])
    found = score_sentences(model, encoder.tokenizer, [cat, dog, cat], "pll", 20, done.append)
    assert done == [4, 2], "rows of 5 pieces, at most 20 pieces at a time"
    assert found[0] == found[2] != found[1]


class Pieces:
    """A vocabulary that marks the pieces that begin words."""

    cls_id, sep_id, mask_id = 0, 1, 2

    def __init__(self, *pieces):
        self.pieces, self.rows = ["<s>", "</s>", "<mask>", *pieces], usual_rows(0, 1)
        self.word_starts = np.array([piece.startswith(("<", "\u2581")) for piece in self.pieces])
        self.word_ends = np.zeros(len(self.pieces), bool)


MASKED = {
    "pll": (["?sings.", "the?s.", "thesing?.", "thesings?"], ["0?45", "03?5", "034?"]),
    "l2r": (["?sings.", "the???", "thesing??", "thesings?"], ["0??5", "03?5", "034?"]),
    "whole-word": (["?sings.", "the???", "the???", "the???"], ["0??5", "0??5", "034?"]),
}


@pytest.mark.parametrize("score", MASKED)
def test_words_begin_at_the_mark_and_punctuation_ends_the_word_before_it(score):
    """A text's first piece begins a word without a mark, as byte-level BPE has it; a sentence may begin inside a word.

    Its first word is not that of [CLS], which stays.
    """
    whole, inside = MASKED[score]
    vocabulary = Pieces("the", "\u2581sing", "s", ".")
    (rows,) = masked_rows([[3, 4, 5, 6]], vocabulary, score, 1000)
    pieces = ["?" if piece == "<mask>" else piece.removeprefix("\u2581") for piece in vocabulary.pieces]
    assert ["".join(pieces[i] for i in row[1:-1]) for row in rows.ids] == whole
    assert rows.places.tolist() == [1, 2, 3, 4] and rows.targets.tolist() == [3, 4, 5, 6]
    (rows,) = masked_rows([[3, 4, 5]], Pieces("s", "ing", "\u2581the"), score, 1000)
    assert ["".join(map(str, row)).replace("2", "?") for row in rows.ids] == [f"{row}1" for row in inside]


def test_a_sentence_may_have_all_positions_of_the_encoder(tokenizer, tmp_path):
    (paradigm,) = read_pairs(write_pairs(tmp_path, [("the cat sings.", "the cat.")]))  # the cat sing ##s .
    assert [len(pieces) for side in encode_pairs(paradigm, tokenizer, 7) for pieces in side] == [5, 3]
    said = "line 1: sentence_good has 5 pieces; expected 1 to 4, the number of positions"
    refused(said, encode_pairs, paradigm, tokenizer, 6)


def assert_logits(model, is_narrow):
    """Compare the logits of one place of each row with those of the whole rows."""
    ids, places = torch.randint(4, 20, (3, 7)), torch.tensor([1, 5, 3])
    with torch.inference_mode():
        expected = model(ids).logits[torch.arange(3), places]
        one_place = HuggingFaceLogits(model)
        torch.testing.assert_close(one_place(ids, places), expected, rtol=0, atol=1e-5 if is_narrow else 0)
    assert one_place.is_narrow == is_narrow
    assert expected.std() > 1e-3


@pytest.mark.parametrize("family", ["bert", "electra", "deberta-v2"])
def test_the_head_sees_one_place_and_gives_the_logits_of_the_whole_row(family, torch_seed):
    """This holds in any family: where the head sees nothing, `HuggingFaceLogits` sees it in the first rows."""
    config = transformers.AutoConfig.for_model(family, **SIZES)
    assert_logits(transformers.AutoModelForMaskedLM.from_config(config).eval(), is_narrow=True)


def test_a_head_that_takes_its_states_elsewhere_gets_the_whole_row(torch_seed):
    class Elsewhere(torch.nn.Module):
        """The head reads the states of a second pass, at a place of its own."""

        def __init__(self, model):
            super().__init__()
            self.model, self.config, self.base_model = model, model.config, model.base_model

        def forward(self, ids):
            output = self.model(ids)
            output["logits"] = output.logits + torch.arange(output.logits.shape[1])[:, None]
            return output

    assert_logits(Elsewhere(transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)).eval()), is_narrow=False)


GOOD = '{"sentence_good": "a b", "sentence_bad": "b a"}\n'


def test_a_bad_file_a_folder_without_files_and_a_uid_in_two_files_are_refused_in_one_line(tmp_path):
    refused("holds no .jsonl file", read_pairs, tmp_path)
    write_pairs(tmp_path / "blimp" / "data", uid="zero")
    refused(f"sentence_bad; maybe --data-dir {tmp_path}/blimp/data$", read_pairs, tmp_path)
    for content, reason in (
        (GOOD + "\n" + '{"sentence_good": "a b"}\n', "line 3: sentence_bad is missing"),
        (GOOD + '{"sentence_good": " ", "sentence_bad": "b"}\n', "line 2: sentence_good is ' '"),
        (GOOD[:-2] + ', "UID": 7}\n', "line 1: UID is 7"),
    ):
        (tmp_path / "pairs.jsonl").write_text(content)
        refused(f"pairs.jsonl.*{re.escape(reason)}", read_pairs, tmp_path)
    (tmp_path / "pairs.jsonl").unlink()
    write_pairs(tmp_path, uid="one")
    (tmp_path / "two.jsonl").write_text((tmp_path / "one.jsonl").read_text())
    refused("two.jsonl: UID 'one' is in .*one.jsonl too", read_pairs, tmp_path)


def test_a_pair_belongs_to_its_uid_else_to_its_file(tmp_path):
    write_pairs(tmp_path / "data", uid="island", field="syntax/semantics", linguistics_term="islands")
    (tmp_path / "data" / "own.jsonl").write_text("\ufeff" + GOOD + "\n" + GOOD)
    island, own = read_pairs(tmp_path)
    assert (island.uid, island.field, island.term, len(island)) == ("island", "syntax_semantics", "islands", len(PAIRS))
    assert (own.uid, own.field, own.places) == ("own", "", [f"{own.file}, line {number}" for number in (1, 3)])
    assert [list(pair) for pair in zip(island.good, island.bad, strict=True)] == [list(pair) for pair in PAIRS]


def test_a_sample_is_the_same_every_time_and_known_by_its_sentences(tmp_path):
    write_pairs(tmp_path)
    (whole,), (first,), (again,) = read_pairs(tmp_path), read_pairs(tmp_path, 3), read_pairs(tmp_path, 3)
    assert len(first) == 3 and first == again
    assert [whole.good[whole.places.index(place)] for place in first.places] == first.good
    assert first.digest == again.digest != whole.digest
    assert read_pairs(tmp_path, 99)[0] == whole


def test_published_levels_are_shown_where_they_cover_all_paradigms(tmp_path):
    summary = tmp_path / "raw_results" / "summary"
    summary.mkdir(parents=True)
    row = {"UID": "a", "ngram": 0.1, "lstm": 0.2, "txl": 0.3, "gpt2": 0.4}
    (summary / "models_summary.jsonl").write_text(json.dumps(row) + "\n")
    levels = {"5-gram": {"a": 0.1}, "LSTM": {"a": 0.2}, "Transformer-XL": {"a": 0.3}, "GPT-2": {"a": 0.4}}
    assert pairs.published_levels(tmp_path, ["a"]) == levels
    (summary / "human_validation_summary.csv").write_text('"Condition","total_mean"\n"a",0.9\n')
    assert pairs.published_levels(tmp_path / "data", ["a"]) == levels | {"human": {"a": 0.9}}
    assert pairs.published_levels(tmp_path, ["a", "b"]) == {}
    assert pairs.published_levels(tmp_path / "data" / "deeper", ["a"]) == {}
    (summary / "models_summary.jsonl").write_text("{}\n")
    refused("not BLiMP's summary of models", pairs.published_levels, tmp_path, ["a"])


def row(good, bad):
    pieces = {"pieces_good": [5, 5, 4, 6][: len(good)], "pieces_bad": [5] * len(good)}
    return {"good": good, "bad": bad, "identical": 1} | pieces


def encoder(name, *accuracies, count=100):
    """A result whose n-th paradigm has this many hundredths right, the first pairs first."""
    cells = {
        f"p{n}": pairs.ParadigmScore(np.arange(count) < share * count, ties=0, undefined=0, piece_counts=0.5)
        for n, share in enumerate(accuracies)
    }
    return pairs.Result(name, cells)


def test_ties_numbers_that_are_none_and_piece_counts():
    for rounding in (-1e-5, 1e-5):
        found = pairs.cell(row([-1.0, -2.0, None, -3.0], [-2.0, -2.0 + rounding, -5.0, None]))
        assert found.right.tolist() == [True, False, False, False]
        assert (found.ties, found.undefined, found.accuracy) == (1, 2, 0.25)
    assert pairs.cell(row([-2.0, -2.0], [-2.0 - 4e-5, -2.0 + 4e-5])).right.tolist() == [True, False]
    # Shorter 1 of 4, equally long 2 of which one has identical pieces: ½, and a tie.
    assert pairs.cell(row([0.0] * 4, [0.0] * 4)).piece_counts == (1 + 0.5) / 4


def test_standard_errors_are_those_of_a_mean():
    result = encoder("e", 0.7, 0.4)
    of_pairs = [statistics.stdev(map(float, cell.right)) / 10 for cell in result.cells.values()]
    assert result.macro_average == pytest.approx(0.55)
    assert [cell.standard_error for cell in result.cells.values()] == pytest.approx(of_pairs)
    assert result.standard_error == pytest.approx(math.hypot(*of_pairs) / 2)
    assert result.paradigm_error == pytest.approx(statistics.stdev([0.7, 0.4]) / math.sqrt(2))
    lonely = encoder("e", 1.0, count=1)
    assert lonely.standard_error is None and lonely.paradigm_error is None


def test_the_interval_is_students_over_paradigms_or_over_the_pairs_of_one():
    for better, worse in (((0.7, 0.6, 0.4), (0.5, 0.55, 0.1)), ((0.7,), (0.5,))):
        first, second = encoder("first", *better), encoder("second", *worse)
        gains = [np.subtract(first.cells[uid].right, second.cells[uid].right, dtype=float) for uid in first.cells]
        values = [gain.mean() for gain in gains] if len(gains) > 1 else gains[0]
        found = pairs.difference(first, second)
        assert found.seeds.mean == pytest.approx(first.macro_average - second.macro_average)
        assert found.items == pytest.approx(tuple(ttest_1samp(values, 0).confidence_interval(0.95)))


def test_the_table_and_the_heat_map_have_one_unit():
    paradigms = {uid: Paradigm(uid, Path("pairs.jsonl")) for uid in ("p0", "p1")}
    report = scoring.Report(paradigms, [encoder("e", 0.7, 0.4)], {}, "l2r")
    table = scoring.all_tables(report, [])["scores"]
    assert list(table.header[:4]) == ["encoder", "macro average", "± pairs", "± paradigms"]
    of_pairs = 100 * math.sqrt((0.7 * 0.3 + 0.4 * 0.6) / 99) / 2
    assert list(table.rows[0][:4]) == ["e", "55.00", f"{of_pairs:.2f}", "15.00"]  # (0.7 - 0.4) / 2 over paradigms
    fields = {"p0": "syntax", "p1": "syntax"}
    cells, bar = scoring.draw_heat_map({"e": {"p0": 0.7, "p1": 0.25}}, 1, fields).axes
    (image,) = cells.images
    assert [float(text.get_text()) for text in cells.texts] == image.get_array()[:, 0].tolist() == [70, 25]
    assert image.get_clim() == bar.get_ylim() == (0, 100) and "[%]" in bar.get_ylabel()


def test_the_interval_of_a_single_paradigm_is_named_after_its_pairs():
    paradigms, results = {"p0": Paradigm("p0", Path("pairs.jsonl"))}, [encoder("a", 0.6), encoder("b", 0.5)]
    report = scoring.Report(paradigms, results, {}, "l2r")
    (found,) = scoring.summary(report, report.differences)["differences"]
    assert found["over_pairs"] == report.differences[0].items is not None and found["over_paradigms"] is None
    assert (found["first"], found["second"], found["difference"]) == ("a", "b", pytest.approx(0.1))


@pytest.fixture
def pairs_folder(tmp_path):
    folder = write_pairs(tmp_path / "pairs", uid="agreement", field="morphology", linguistics_term="number")
    return write_pairs(folder, [("red cat sings.", "cat red sings."), ("é", "ü ü")], uid="order", field="syntax")


@pytest.fixture
def words(out, pairs_folder, checkpoints):
    loads = [str(checkpoints[name]) for name in ("absolute", "ddrp")]
    return ["--data-dir", str(pairs_folder), "--output-dir", str(out), "--workers", "1", "--load", *loads]


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
        right = {row["paradigm"]: pairs.cell(row).accuracy for row in map(json.loads, rows)}
        told = {uid: (paradigm["accuracy"], paradigm["pairs"]) for uid, paradigm in encoder["paradigms"].items()}
        assert told == {"agreement": (right["agreement"], 5), "order": (right["order"], 2)}
        assert encoder["macro_average"] == pytest.approx(sum(right.values()) / 2)
        assert encoder["fields"] == {"morphology": right["agreement"], "syntax": right["order"]}
        assert encoder["linguistics_terms"] == {"number": right["agreement"]}
        assert encoder["standard_error"] > 0
        assert encoder["piece_counts"] == pytest.approx((3 / 5 + 1.5 / 2) / 2)  # fewer pieces win, as many are half
    (pair,) = results["differences"]
    assert pair["difference"] == pytest.approx(encoders[0]["macro_average"] - encoders[1]["macro_average"])
    assert pair["over_paradigms"][0] <= pair["difference"] <= pair["over_paradigms"][1]
    assert pair["over_pairs"] is None
    text = (out / "table.md").read_text()
    assert f"| {checkpoints['ddrp']} |" in text.replace("\\", "")
    assert "| agreement | morphology | 5 |" in text
    assert "agreement,morphology,5," in (out / "tables" / "paradigms.csv").read_text()
    assert not find_spec("matplotlib") or (out / "heatmap.png").read_bytes().startswith(b"\x89PNG")


def test_other_sentences_scores_and_weights_are_other_jobs(words, out, tmp_path, pairs_folder, tokenizer, capsys):
    run = write_checkpoint(tmp_path / "run", tokenizer, "mlm", position_encoding="rope")
    words = [*words[:-2], str(run)]
    main(words)
    before = lines(out)
    main([*words, "--score", "pll"])
    assert results_of(out)["score"] == "pll"
    main([*words, "--max-pairs", "1"])
    write_pairs(pairs_folder, PAIRS[1:], uid="agreement")
    main(words)
    main([*words, "--random-init", "--seeds", "2"])
    found = lines(out)
    assert found[:2] == before and len(found) == 2 + 2 + 2 + 1 + 4
    assert len({tuple(json.loads(line)["good"]) for line in found[-4:]}) == 4  # two paradigms, two seeds
    assert "rope" not in capsys.readouterr().err
    drawn = [encoder["load"].partition(", ")[2] for encoder in results_of(out)["encoders"]]
    assert drawn == ["random weights, seed 1", "random weights, seed 2"]


def test_damaged_lines_sentences_without_a_piece_and_seeds_of_one_encoder_are_refused(words, out, pairs_folder):
    wrong_arguments("needs --random-init", main, [*words, "--seeds", "2"])
    write_pairs(pairs_folder, [("red", "cat"), ("red", "\u200b\x00")], uid="bad")
    refused("bad.jsonl, line 2: sentence_bad has 0 pieces; expected 1 to 22", main, words)
    (pairs_folder / "bad.jsonl").unlink()
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


@pytest.mark.parametrize(("value", "place"), [(math.nan, "everywhere"), (-math.inf, "one word")])
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
