"""Scores of sentences beside a twin: loops in float64 over one sentence, one piece at a time, without batches."""

import math

import pytest
import torch

from megatron_ddrp.data.tokenizers.tokenizer import usual_rows
from megatron_ddrp.encoders.masked_lm import load_masked_lm, piece_logits
from megatron_ddrp.errors import UserError
from megatron_ddrp.tasks.minimal_pairs.pairs import SCORES, masked_rows, read_pairs
from megatron_ddrp.tasks.minimal_pairs.scoring import encode_pairs, score_sentences
from tests.unit.tasks.minimal_pairs.conftest import PAIRS, write_pairs

transformers = pytest.importorskip("transformers")
SENTENCES = [sentence for pair in PAIRS for sentence in pair]


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
    from megatron_ddrp.conversion.to_huggingface import export_checkpoint

    folder = tmp_path_factory.mktemp("exported") / "hf"
    export_checkpoint(checkpoints[request.param], folder)
    return checkpoints[request.param], folder


def scores(folder, score="l2r", budget=64, sentences=SENTENCES):
    encoder = load_masked_lm(folder)
    model = piece_logits(encoder, 0, torch.device("cpu"))
    return score_sentences(model, encoder.tokenizer, encoder.tokenizer.encode_batch(sentences), score, budget)


@pytest.mark.parametrize("score", SCORES)
def test_a_checkpoint_and_its_export_score_as_the_twin(both, score, tokenizer):
    exported = load_masked_lm(both[1]).module.model.double().eval()
    expected = torch.tensor([twin(exported, tokenizer, tokenizer.encode(text), score) for text in SENTENCES])
    assert expected.unique().numel() == len(SENTENCES)
    for folder in both:
        torch.testing.assert_close(torch.tensor(scores(folder, score)), expected.double(), rtol=0, atol=2e-4)


def test_the_kinds_differ_where_a_word_has_several_pieces_and_only_there(checkpoints):
    found = {score: scores(checkpoints["ddrp"], score) for score in SCORES}
    whole = scores(checkpoints["ddrp"], "pll", sentences=["the red cat, the dog."])
    assert whole == scores(checkpoints["ddrp"], "l2r", sentences=["the red cat, the dog."])
    assert whole == scores(checkpoints["ddrp"], "whole-word", sentences=["the red cat, the dog."])
    assert abs(found["pll"] - found["l2r"]).max() > 1e-3
    assert abs(found["l2r"] - found["whole-word"]).max() > 1e-3


@pytest.mark.parametrize("budget", [1, 40, 10_000])
def test_batches_change_nothing(checkpoints, budget):
    assert abs(scores(checkpoints["ddrp"], budget=budget) - scores(checkpoints["ddrp"])).max() < 1e-4


def test_equal_sentences_are_scored_once(checkpoints):
    done = []
    encoder = load_masked_lm(checkpoints["absolute"])
    model = piece_logits(encoder, 0, torch.device("cpu"))
    cat, dog = encoder.tokenizer.encode_batch(["the cat.", "the dog."])
    found = score_sentences(model, encoder.tokenizer, [cat, dog, cat], "pll", 100, done.append)
    assert sum(done) == len(cat) + len(dog)
    assert found[0] == found[2] != found[1]


class Pieces:
    """A vocabulary that marks the pieces that begin words."""

    cls_id, sep_id, mask_id = 0, 1, 2

    def __init__(self, *pieces, mark):
        import numpy as np

        self.pieces, self.rows = ["<s>", "</s>", "<mask>", *pieces], usual_rows(0, 1)
        self.word_starts = np.array([piece.startswith(("<", mark)) for piece in self.pieces])
        self.word_ends = np.zeros(len(self.pieces), bool)


@pytest.mark.parametrize("mark", ["\u2581", "\u0120"], ids=["SentencePiece", "byte-level BPE"])
@pytest.mark.parametrize(
    ("score", "expected"),
    [
        ("pll", ["?sings.", "the?s.", "thesing?.", "thesings?"]),
        ("l2r", ["?sings.", "the???", "thesing??", "thesings?"]),
        ("whole-word", ["?sings.", "the???", "the???", "the???"]),
    ],
)
def test_words_begin_at_the_mark_and_punctuation_ends_the_word_before_it(mark, score, expected):
    """A text's first piece begins a word without a mark, as byte-level BPE has it."""
    vocabulary = Pieces("the", f"{mark}sing", "s", ".", mark=mark)
    (rows,) = masked_rows([[3, 4, 5, 6]], vocabulary, score, 1000)
    shown = ["".join("?" if i == 2 else vocabulary.pieces[i].removeprefix(mark) for i in row[1:-1]) for row in rows.ids]
    assert shown == expected
    assert rows.places.tolist() == [1, 2, 3, 4]
    assert rows.targets.tolist() == [3, 4, 5, 6]


@pytest.mark.parametrize(
    ("score", "expected"),
    [
        ("pll", ["0?45", "03?5", "034?"]),
        ("l2r", ["0??5", "03?5", "034?"]),
        ("whole-word", ["0??5", "0??5", "034?"]),
    ],
)
def test_a_sentence_may_begin_inside_a_word(score, expected):
    """Its first word is not that of [CLS], which stays."""
    vocabulary = Pieces("s", "ing", "\u2581the", mark="\u2581")
    (rows,) = masked_rows([[3, 4, 5]], vocabulary, score, 1000)
    assert ["".join(map(str, row)).replace("2", "?") for row in rows.ids] == [f"{row}1" for row in expected]


def test_a_sentence_may_have_all_positions_of_the_encoder(tokenizer, tmp_path):
    (paradigm,) = read_pairs(write_pairs(tmp_path, [("the cat sings.", "the cat.")]))  # the cat sing ##s .
    assert [len(pieces) for side in encode_pairs(paradigm, tokenizer, 7) for pieces in side] == [5, 3]
    with pytest.raises(UserError, match="line 1: sentence_good has 5 pieces; expected 1 to 4, the number of positions"):
        encode_pairs(paradigm, tokenizer, 6)


@pytest.mark.parametrize("score", SCORES)
def test_specials_are_never_masked_nor_scored(tokenizer, score):
    sentences = tokenizer.encode_batch(SENTENCES)
    for rows in masked_rows(sentences, tokenizer, score, 50):
        assert (rows.ids[:, 0] == tokenizer.cls_id).all()
        assert (rows.ids[:, -1] == tokenizer.sep_id).all()
        assert (rows.places > 0).all() and (rows.places < rows.ids.shape[1] - 1).all()
        assert rows.ids.size <= max(50, rows.ids.shape[1])
