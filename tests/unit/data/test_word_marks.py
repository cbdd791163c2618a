"""Words by the marks of a vocabulary, at begins, at ends or nowhere: masks, notes, scores and another vocabulary."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models, pre_tokenizers

from megatron_ddrp.config.registry import MASKINGS
from megatron_ddrp.conversion.tokenizer_files import plan_transfer
from megatron_ddrp.data.batches.masking import Masker
from megatron_ddrp.data.batches.word_counts import WordFinder, count_rare_words
from megatron_ddrp.data.tokenizers.tokenizer import BEGIN, END, NONE, build_tokenizer, word_begins
from megatron_ddrp.data.tokenizers.vocabulary import warn_of_unmarked_words
from megatron_ddrp.tasks.minimal_pairs.pairs import masked_rows
from tests.datasets import write_dataset
from tests.sentencepiece_models import train_model

TEXT = "the unaffable cats sat on singing mats"
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SUFFIX = {"treat_whitespace_as_suffix": True}
LETTERS = list("theunafblcsoigm")


def sentencepiece(**options):
    return lambda folder: build_tokenizer("SentencePiece", tokenizer_model=train_model(folder / "m.model", **options))


def bpe(pieces, splitter, **options):
    """Return a maker of a BPE tokenizer.json without merges: a piece is one character, with its mark."""

    def make(folder):
        names = dict.fromkeys([*SPECIALS, *pieces])
        model = models.BPE({piece: i for i, piece in enumerate(names)}, [], unk_token="[UNK]", **options)
        backend = RustTokenizer(model)
        if splitter is not None:
            backend.pre_tokenizer = splitter
        backend.save(str(folder / "tokenizer.json"))
        return build_tokenizer("HuggingFace", tokenizer_model=folder)

    return make


WITH_END = [*LETTERS, *(letter + "</w>" for letter in LETTERS)]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
ENDS = pre_tokenizers.Sequence(
    [pre_tokenizers.Split(" ", "merged_with_previous"), pre_tokenizers.ByteLevel(False, use_regex=False)]
)
BARE = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(False)])
KINDS = {
    "unigram": (sentencepiece(), BEGIN),
    "unigram, suffix": (sentencepiece(**SUFFIX), END),
    "bpe, suffix": (sentencepiece(model_type="bpe", **SUFFIX), END),
    "char, suffix": (sentencepiece(model_type="char", vocab_size=30, **SUFFIX), END),
    "suffix, no dummy": (sentencepiece(add_dummy_prefix=False, **SUFFIX), END),
    "</w>": (bpe(WITH_END, pre_tokenizers.WhitespaceSplit(), end_of_word_suffix="</w>"), END),
    "</w>, byte-level": (bpe(WITH_END, BARE, end_of_word_suffix="</w>"), END),
    "byte-level": (bpe(ALPHABET, pre_tokenizers.ByteLevel(False)), BEGIN),
    "byte-level, begins": (bpe([*ALPHABET, "\u0120a"], pre_tokenizers.ByteLevel(False)), BEGIN),
    "metaspace": (bpe([*LETTERS, "\u2581"], pre_tokenizers.Metaspace()), BEGIN),
    "blanks": (bpe([*LETTERS, " "], None), BEGIN),
}
UNMARKED = {
    "byte-level without blanks": bpe(ALPHABET, BARE),
    "letters": bpe(LETTERS, pre_tokenizers.WhitespaceSplit()),
    "sentencepiece": sentencepiece(
        texts=["thecats", "satonmats", "singing"] * 30, vocab_size=20, add_dummy_prefix=False
    ),
}


def words_of(tokenizer, ids):
    """Return the texts of the words of one row of ids."""
    begins = word_begins(tokenizer.word_starts, tokenizer.word_ends, np.array([ids]))[0]
    begins[0] = True
    words = [[ids[k] for k in range(i, j)] for i, j in _spans(begins)]
    strip = str.maketrans({"\u2581": "", "\u0120": "", " ": ""})
    return ["".join(tokenizer.pieces[i] for i in word).replace("</w>", "").translate(strip) for word in words]


def _spans(begins):
    first = np.flatnonzero(begins).tolist()
    return list(zip(first, [*first[1:], len(begins)], strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_words_are_the_texts_own(tmp_path, kind):
    make, side = KINDS[kind]
    tokenizer = make(tmp_path)
    assert tokenizer.word_side == side and warn_of_unmarked_words(tokenizer) is None
    assert words_of(tokenizer, tokenizer.encode(TEXT)) == TEXT.split()


@pytest.mark.parametrize("kind", UNMARKED)
def test_a_vocabulary_without_marks_is_said_and_its_pieces_are_words(tmp_path, kind):
    tokenizer = UNMARKED[kind](tmp_path)
    assert tokenizer.word_side == NONE and tokenizer.word_starts.all() and not tokenizer.word_ends.any()
    assert "marks neither begins nor ends of words" in warn_of_unmarked_words(tokenizer)


def test_a_list_of_words_needs_no_marks(tmp_path):
    backend = RustTokenizer(models.WordLevel({p: i for i, p in enumerate([*SPECIALS, *TEXT.split()])}, "[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = build_tokenizer("HuggingFace", tokenizer_model=tmp_path)
    assert words_of(tokenizer, tokenizer.encode(TEXT)) == TEXT.split() and not warn_of_unmarked_words(tokenizer)


@pytest.fixture(params=["unigram, suffix", "</w>"])
def suffixed(request, tmp_path):
    return KINDS[request.param][0](tmp_path)


@pytest.mark.parametrize("masking", ["whole-word", "ngram"])
def test_masks_take_words_whole(suffixed, masking):
    text = "cats sat on mats the"  # of at most four pieces each
    ids = suffixed.encode(text)
    row = np.array([[suffixed.cls_id, *ids, suffixed.sep_id, suffixed.pad_id]] * 500)
    inside = np.where(row == suffixed.pad_id, 0, 1)
    _, labels = Masker(suffixed, 0.4, masking=MASKINGS.find(masking)())(row, inside, np.zeros(500, int), np.arange(500))
    predicted = labels[:, 1 : 1 + len(ids)] >= 0
    begins = word_begins(suffixed.word_starts, suffixed.word_ends, np.array(ids))
    begins[0] = True
    assert len(_spans(begins)) == 5 and max(j - i for i, j in _spans(begins)) > 1
    for i, j in _spans(begins):
        assert (predicted[:, i:j].all(1) | ~predicted[:, i:j].any(1)).all()
        assert 0 < predicted[:, i].mean() < 1


def test_scores_mask_the_words_own_pieces(suffixed):
    ids = suffixed.encode("the cats sat")
    begins = word_begins(suffixed.word_starts, suffixed.word_ends, np.array(ids))
    begins[0] = True
    word = np.cumsum(begins)
    for score in ("l2r", "whole-word"):
        [rows] = masked_rows([ids], suffixed, score, 1000)
        for masked, place in zip(rows.ids == suffixed.mask_id, rows.places, strict=True):
            same = word == word[place - 1]
            expected = same & (np.arange(len(ids)) >= place - 1) if score == "l2r" else same
            assert masked[1:-1].tolist() == expected.tolist()


def test_notes_are_of_whole_words(suffixed, tmp_path):
    documents = [suffixed.encode(text) for text in ("cats sat", "the cats", "mats cats the")]
    dataset = write_dataset(tmp_path / "d", [[ids] for ids in documents])
    finder = WordFinder(suffixed)
    rare = count_rare_words([(dataset, (0, 3))], finder, (1, 9))
    pieces = np.split(rare.pieces, rare.ends[:-1])
    found = {tuple(word.tolist()): int(count) for word, count in zip(pieces, rare.counts, strict=True)}
    assert found == {tuple(suffixed.encode(w)): n for w, n in (("cats", 3), ("sat", 1), ("the", 2), ("mats", 1))}
    row = [suffixed.cls_id, *documents[2], suffixed.sep_id]
    notes = finder.number(rare, np.array([row]), np.array([True]))[0]
    first, cats = 1 + len(suffixed.encode("mats")), len(suffixed.encode("cats"))
    assert not notes[:first].any(), "the first word of a row may be the end of a longer one"
    assert notes[first] > 0 and (notes[first + 1 : first + cats] == -notes[first]).all() and notes[first + cats] > 0
    cut = [suffixed.cls_id, *documents[2][: first + cats - 2], suffixed.sep_id]
    assert not finder.number(rare, np.array([cut]), np.array([False]))[0].any(), "a word without its end is cut"


def test_a_mask_keeps_the_blanks_beside_it(tmp_path):
    ours = KINDS["unigram, suffix"][0](tmp_path)
    begin, _, end = (ours.encode(text) for text in ("the ", "cats ", "sat"))
    assert ours.encode_with_masks("the [MASK] sat") == [*begin, ours.mask_id, *end]
    joined = ours.encode_with_masks("the[MASK]s sat")
    assert not ours.word_ends[joined[joined.index(ours.mask_id) - 1]], "the mask continues the word"
    assert ours.encode_with_masks(TEXT) == ours.encode(TEXT)


@pytest.mark.parametrize(
    ("old", "new", "by_text"),
    [
        ("unigram, suffix", "unigram, suffix", False),
        ("unigram, suffix", "char, suffix", False),
        ("</w>", "unigram, suffix", False),
        ("unigram", "unigram, suffix", True),
        ("unigram, suffix", "unigram", True),
        ("</w>", "unigram", True),
    ],
)
def test_pieces_of_two_vocabularies_are_compared_by_what_both_mark(tmp_path, old, new, by_text):
    folders = [tmp_path / "old", tmp_path / "new"]
    for folder in folders:
        folder.mkdir()
    ours, theirs = KINDS[old][0](folders[0]), KINDS[new][0](folders[1])
    plan = plan_transfer(ours, theirs)
    assert plan.by_text == by_text and ("by text alone" in plan.summary()) == by_text
    strip = str.maketrans({"\u2581": "", " ": ""})
    for i, parts in enumerate(plan.parts):
        if i not in theirs.special_ids and parts and theirs.pieces[i].translate(strip):
            spelled = "".join(ours.pieces[k] for k in parts).replace("</w>", "").translate(strip)
            assert spelled == theirs.pieces[i].translate(strip)
            if not by_text:
                assert ours.word_ends[parts[-1]] == theirs.word_ends[i] and not ours.word_ends[parts[:-1]].any()
    if old == new:
        assert plan.parts[:-2] == [[i] for i in range(theirs.vocab_size - 2)]


def test_byte_level_marks_at_ends_of_words(tmp_path):
    make = bpe([*ALPHABET, "e\u0120", "s\u0120"], ENDS)
    tokenizer = make(tmp_path)
    layout = json.loads((tmp_path / "tokenizer.json").read_text())
    layout["model"]["merges"] = [["e", "\u0120"], ["s", "\u0120"], ["t", "\u0120"], ["n", "\u0120"], ["g", "\u0120"]]
    for piece in ("t\u0120", "n\u0120", "g\u0120"):
        layout["model"]["vocab"][piece] = len(layout["model"]["vocab"])
    (tmp_path / "tokenizer.json").write_text(json.dumps(layout))
    tokenizer = build_tokenizer("HuggingFace", tokenizer_model=tmp_path)
    assert tokenizer.word_side == END and words_of(tokenizer, tokenizer.encode(TEXT)) == TEXT.split()
