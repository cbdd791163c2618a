"""Roles that share a piece, text that a vocabulary cannot spell, and words by the marks of a vocabulary."""

import itertools
import json
import pickle
from dataclasses import replace

import numpy as np
import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models, pre_tokenizers, processors

from megatron_ddrp.config.registry import MASKINGS
from megatron_ddrp.conversion.tokenizer_files import plan_transfer
from megatron_ddrp.data.batches.masking import Masker
from megatron_ddrp.data.batches.word_counts import WordFinder, count_rare_words
from megatron_ddrp.data.dataset.merging import merge
from megatron_ddrp.data.preprocess.pipeline import PreprocessConfig, preprocess
from megatron_ddrp.data.tokenizers import tokenizer as tokenizer_module
from megatron_ddrp.data.tokenizers.tokenizer import BEGIN, DROPPED, END, NONE, build_tokenizer
from megatron_ddrp.data.tokenizers.vocabulary import SPECIALS, warn_of_unmarked_words, warn_of_vocabulary
from megatron_ddrp.tasks.minimal_pairs.pairs import masked_rows
from tests.datasets import write_dataset
from tests.refusals import wrong_arguments
from tests.sentencepiece_models import train_model
from tests.unit.conversion.conftest import wordpiece
from tests.unit.data import tokenizer_folders as folders
from tests.unit.data.tokenizer_folders import ADDED, ALPHABET, BYTES, NAMES, built, byte_bpe, numbered, plain_bpe, write

WHOLE = "\u010a \U0001f680 na\u00efve \u4e2d\u6587 <c> [MASK] <u> \x00 the"


def refusal(folder, kind="HuggingFace"):
    return str(wrong_arguments(".", build_tokenizer, kind, tokenizer_model=folder))


OPEN = {"wordlevel": lambda: (models.WordLevel(numbered(*ADDED, "a"), "<u>"), None)}
OPEN |= {"bpe": lambda: plain_bpe("abc", "<u>"), "unigram": lambda: folders.unigram("abc", 4)}
CLOSED = {"byte-level": byte_bpe, "fallback": lambda: plain_bpe([*"abc", *BYTES], byte_fallback=True)}


@pytest.mark.parametrize("file", ["special_tokens_map.json", "tokenizer_config.json"])
def test_a_mask_with_another_role_is_refused(tmp_path, file):
    for roles, shared in (
        ({"mask": "<c>"}, "'<c>' is [CLS] and [MASK]"),
        ({"mask": "<u>"}, "'<u>' is [MASK] and [UNK]"),
        ({"mask": "<s>", "pad": "<s>"}, "'<s>' is [SEP], [PAD] and [MASK]"),
    ):
        folder = write(tmp_path, byte_bpe(), NAMES | roles, file)
        assert shared in refusal(folder) and str(folder) in refusal(folder)


@pytest.mark.parametrize("role", ["cls", "sep", "pad"])
@pytest.mark.parametrize("made", OPEN)
def test_an_unknown_piece_with_another_role_is_refused(tmp_path, made, role):
    own = f"'<u>' is [{role.upper()}] and [UNK]"
    assert own in refusal(write(tmp_path / "a", OPEN[made](), NAMES | {role: "<u>"}))
    # The settings name another piece as [UNK], but the model gives <u>.
    assert own in refusal(write(tmp_path / "b", OPEN[made](), NAMES | {role: "<u>", "unk": "a"}))
    # By the description that a run keeps, as a resumed run reads it.
    built(tmp_path / "c", OPEN[made]()).save(tmp_path / "run")
    path = tmp_path / "run" / "megatron_tokenizer.json"
    description = json.loads(path.read_text())
    description["special_tokens"][role] = "<u>"
    path.write_text(json.dumps(description))
    wrong_arguments(r"'<u>' is \[", tokenizer_module.load_tokenizer, tmp_path / "run")


@pytest.mark.parametrize("shared", [("cls",), ("sep",), ("cls", "sep"), ("pad",), ("sep", "pad")])
@pytest.mark.parametrize("made", CLOSED)
def test_an_unknown_piece_that_no_text_gives_is_said(tmp_path, made, shared):
    tokenizer = built(tmp_path, CLOSED[made](), NAMES | dict.fromkeys(shared, "<u>"))
    [line] = warn_of_vocabulary(tokenizer)
    assert line.startswith("'<u>' is [UNK] and [") and "no text gives it" in line
    ids = tokenizer.encode(WHOLE)
    assert not set(ids) & set(tokenizer.special_ids.tolist()) and not tokenizer.count_dropped([WHOLE])
    row = np.array([[tokenizer.cls_id, *ids, tokenizer.sep_id]] * 400)
    _, labels = Masker(tokenizer)(row, np.ones_like(row), np.zeros(400, int), np.arange(400))
    assert (labels[:, [0, -1]] < 0).all() and (labels >= 0).any()
    assert tokenizer.count_unknown(row) == 0, "[SEP] after a document is not unknown text"


@pytest.mark.parametrize("newer", [False, True])
def test_settings_that_differ_are_read_as_by_transformers(tmp_path, newer):
    transformers = pytest.importorskip("transformers")
    write(tmp_path, OPEN["bpe"](), NAMES | {"mask": "a"}, "special_tokens_map.json")
    write(tmp_path, OPEN["bpe"](), NAMES | {"mask": "b"})
    path = tmp_path / "tokenizer_config.json"
    more = {"tokenizer_class": "PreTrainedTokenizerFast"} | ({"added_tokens_decoder": {}} if newer else {})
    path.write_text(json.dumps(json.loads(path.read_text()) | more))
    tokenizer = built(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    assert tokenizer.pieces[tokenizer.mask_id] == transformers.AutoTokenizer.from_pretrained(tmp_path).mask_token
    assert tokenizer.pieces[tokenizer.mask_id] == ("b" if newer else "a")


def test_classifier_separator_and_padding_may_share_a_piece_and_settings_name_the_unknown_one(tmp_path):
    for name, made in (OPEN | CLOSED).items():
        tokenizer = built(tmp_path / name, made(), NAMES | {"sep": "<c>", "pad": "<c>"})
        assert tokenizer.cls_id == tokenizer.sep_id == tokenizer.pad_id and not warn_of_vocabulary(tokenizer)
    tokenizer = built(tmp_path, byte_bpe(unknown="<s>"))  # as in CLIP's files, whose model names the end of a text
    assert tokenizer.pieces[tokenizer.unk_id] == "<u>" and not warn_of_vocabulary(tokenizer)
    for number, (made, unknown) in enumerate(itertools.product(CLOSED.values(), ("", "<no>"))):
        change = {"change": lambda layout, unknown=unknown: layout["model"].update(unk_token=unknown)}
        tokenizer = built(tmp_path / str(number), made(), **change)
        assert tokenizer.encode(WHOLE) and not warn_of_vocabulary(tokenizer), "one that is not needed may be missing"


@pytest.mark.parametrize("around", ["", "<c> $A", "<c> $A <s>"])
def test_a_decoders_tokenizer_needs_no_piece_but_a_mask(tmp_path, around):
    """EuroBERT's folder names a beginning, an end that also pads, and a mask."""
    folder = write(tmp_path, byte_bpe(), {"bos": "<c>", "eos": "<s>", "pad": "<s>", "mask": "<m>"}, added=ADDED[:4])
    if around:
        backend = RustTokenizer.from_file(str(folder / "tokenizer.json"))
        ends = [(name, backend.token_to_id(name)) for name in ("<c>", "<s>")]
        backend.post_processor = processors.TemplateProcessing(around, special_tokens=ends)
        backend.save(str(folder / "tokenizer.json"))
    tokenizer = built(folder)
    roles = {role: tokenizer.pieces[getattr(tokenizer, f"{role}_id")] for role in NAMES}
    assert roles == {"cls": "<c>", "sep": "<s>", "pad": "<s>", "mask": "<m>", "unk": "<s>"}
    tokenizer.save(tmp_path / "run")
    again = tokenizer_module.load_tokenizer(tmp_path / "run")
    for kept in ("cls_id", "unk_id", "fingerprint"):
        assert getattr(again, kept) == getattr(tokenizer, kept)
    row = np.array([[tokenizer.cls_id, *tokenizer.encode(WHOLE), tokenizer.sep_id, tokenizer.pad_id]] * 400)
    valid = np.ones_like(row)
    valid[:, -1] = 0
    masked, labels = Masker(tokenizer)(row, valid, np.zeros(400, int), np.arange(400))
    assert (labels[:, [0, -2, -1]] < 0).all() and (masked[:, -2:] == tokenizer.sep_id).all() and (labels >= 0).any()


def without(*lost):
    return [piece for piece in ALPHABET if piece not in lost]


def test_only_pieces_for_every_byte_exclude_unknown_text(tmp_path):
    rows = [
        (byte_bpe(without("a")), False),
        (byte_bpe(without(*"\u00c0\u00c1\u00f5\u00ff")), True),  # bytes that UTF-8 never has
        (byte_bpe(end_of_word_suffix="</w>"), False),
        (byte_bpe([*ALPHABET, *(p + "</w>" for p in ALPHABET)], end_of_word_suffix="</w>"), True),
        ((byte_bpe()[0], pre_tokenizers.Whitespace()), False),
        ((byte_bpe()[0], pre_tokenizers.Sequence([pre_tokenizers.Digits(), byte_bpe()[1]])), True),
        (plain_bpe([*"abc", *BYTES]), False),  # the bytes are there and the rule is not
        (plain_bpe([*"abc", *BYTES[:100], *BYTES[101:]], byte_fallback=True), False),
        (plain_bpe([*"abc", *BYTES[:0xF5]], byte_fallback=True), True),
        (folders.unigram([*"abc", *BYTES], 4, byte_fallback=True), False),  # finds "<u>" in a text
        ((folders.unigram(ALPHABET, 4)[0], pre_tokenizers.ByteLevel()), True),
    ]
    for number, (made, closed) in enumerate(rows):
        folder = write(tmp_path / str(number), made, NAMES | {"cls": "<u>"})
        if closed:
            assert warn_of_vocabulary(built(folder)), number
        else:
            assert "'<u>' is [CLS] and [UNK]" in refusal(folder), number


@pytest.mark.parametrize(
    ("options", "shared"),
    [
        ({"unk_piece": "[MASK]"}, "[MASK] and [UNK]"),
        ({"unk_piece": "<cls>", "bos_id": -1}, "[CLS] and [UNK]"),
        ({"unk_piece": "<cls>", "bos_id": -1, "byte_fallback": True}, None),
        ({}, ""),
    ],
)
def test_sentencepiece_roles(tmp_path, options, shared):
    model = train_model(tmp_path / "m.model", **options)
    if shared:
        assert shared in refusal(model, "SentencePiece")
    else:
        lines = warn_of_vocabulary(build_tokenizer("SentencePiece", tokenizer_model=model))
        assert len(lines) == (shared is None)


@pytest.mark.parametrize(
    ("made", "change", "reason"),
    [
        (lambda: folders.unigram("abc", 4), {"unk_id": None}, "its Unigram model fails .* unk_id is missing"),
        (lambda: folders.unigram([*"abc", *BYTES], 4, byte_fallback=True), {"unk_id": None}, "unk_id is missing"),
        (OPEN["wordlevel"], {"unk_token": "<no>"}, "its WordLevel model fails .* unk_token is '<no>'"),
        (OPEN["bpe"], {"unk_token": "<no>"}, "its BPE model fails .* unk_token is '<no>'"),
        (lambda: (models.WordPiece(numbered(*ADDED, *ALPHABET)), byte_bpe()[1]), {"unk_token": "<no>"},
         "its WordPiece model fails"),  # a long word is unknown to it, whatever the alphabet
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_added", [False, True])
def test_a_model_that_fails_at_unknown_text_is_refused(tmp_path, made, change, reason, is_added):
    """An unknown piece that is only an added token does not help the model."""
    lost = change.get("unk_token")
    added = [*ADDED, *([lost] if is_added and lost else [])]
    folder = write(tmp_path, made(), change=lambda layout: layout["model"].update(change), added=added)
    wrong_arguments(reason, build_tokenizer, "HuggingFace", tokenizer_model=folder)


@pytest.mark.parametrize(
    ("made", "text", "dropped"),
    [
        (lambda: plain_bpe("abc "), "ab zz c \u4e2d\U0001f680", 4),
        (lambda: plain_bpe("abc ", fuse_unk=True), "zzz a", 3),
        (lambda: (plain_bpe("abc")[0], pre_tokenizers.WhitespaceSplit()), "a z  b\n", 1),  # blanks are split off
        (lambda: plain_bpe([*"abc ", *BYTES[:0x80]], byte_fallback=True), "z\u00e9\u4e2d a", 2),
        (lambda: byte_bpe(without("\u00e4", "\u00b8")), "a \u4e2d\u4e2d", 2),  # two bytes of each are missing
        (lambda: byte_bpe(without("z")), "<m>z[MASK]", 1),
        (lambda: plain_bpe(["a", "b</w>"], end_of_word_suffix="</w>"), "ba", 2),  # neither b nor a</w>
        (lambda: plain_bpe("ab", "<u>"), "az", 0),  # unknown, not dropped
        (byte_bpe, WHOLE, 0),
    ],
)
def test_dropped_characters_are_said_and_counted(tmp_path, made, text, dropped):
    tokenizer = built(tmp_path, made())
    backend = RustTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.encode_special_tokens = True
    expected = backend.encode(text, add_special_tokens=False).ids
    for ours in (tokenizer, pickle.loads(pickle.dumps(tokenizer))):
        assert ours.count_dropped([text, "", text]) == 2 * dropped and ours.encode(text) == expected
    assert len(warn_of_vocabulary(tokenizer)) == bool(dropped) and DROPPED not in tokenizer.pieces


def test_preprocessing_counts_dropped_characters_in_summary_and_manifests(tmp_path, capsys):
    folder = write(tmp_path / "bpe", (plain_bpe("theca")[0], pre_tokenizers.WhitespaceSplit()))
    (tmp_path / "in.jsonl").write_text('{"text": "the cat zz"}\n{"text": "z"}\n')
    flags = {"tokenizer_type": "HuggingFace", "tokenizer_model": str(folder)}
    config = PreprocessConfig((str(tmp_path / "in.jsonl"),), str(tmp_path / "o"), **flags)
    result = preprocess(config)
    assert "0.00% unknown pieces, 3 characters dropped" in result.summary()  # t of cat is there, z is not
    told = capsys.readouterr().err
    assert "are dropped from every text" in told and "3 characters are dropped beside 6 tokens" in told
    prefixes = [*result.prefixes, *preprocess(replace(config, output_prefix=str(tmp_path / "p"))).prefixes]
    assert json.loads((tmp_path / "o_text_document.json").read_text())["dropped_characters"] == 3
    assert merge(tmp_path / "both", prefixes).manifest["dropped_characters"] == 6


def test_random_merges_and_cuts_of_a_foreign_file_are_switched_off(tmp_path):
    made = models.BPE(numbered(*ADDED, "a", "b", "ab"), [("a", "b")], dropout=0.9, unk_token="<u>"), None

    def cut(layout):
        layout["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
        layout["padding"] = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None}
        layout["padding"] |= {"pad_id": 2, "pad_type_id": 0, "pad_token": "<p>"}

    tokenizer = built(tmp_path, made, change=cut)
    for ours in (tokenizer, pickle.loads(pickle.dumps(tokenizer))):
        assert {tuple(ours.encode("ab" * 5)) for _ in range(20)} == {(7,) * 5}
        assert {tuple(ids) for ids in ours.encode_batch(["ab" * 5, "ab"] * 9)} == {(7,) * 5, (7,)}


def test_only_the_mask_of_a_masked_text_is_special(tmp_path):
    ours = built(tmp_path, plain_bpe("ab", "<u>"))
    unknown, a, mask, b = 4, 5, 3, 6
    assert ours.encode_with_masks("<c>a<m><s>b<p>") == [unknown, a, mask, unknown, b, unknown]
    assert ours.encode("<m>") == [unknown] * 3, "without masks they are the characters of their names"
    ours = wordpiece(tmp_path / "vocab.txt", [*SPECIALS, "a", "[", "]", "cls"], "BertWordPieceLowerCase")
    assert ours.encode_with_masks("[CLS] a [MASK] [CLS]") == [6, 8, 7, 5, 4, 6, 8, 7]
    tokenizer = built(tmp_path, byte_bpe())
    spelled = [tokenizer.pieces.index(letter) for letter in "a<m>"]
    assert pickle.loads(pickle.dumps(tokenizer)).encode("a<m>") == tokenizer.encode("a<m>") == spelled


def test_marks_of_byte_order_are_not_text_and_a_normalizer_may_write_the_bytes(tmp_path):
    plain = built(tmp_path, OPEN["bpe"]())
    for file in tmp_path.iterdir():
        file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    tokenizer = built(tmp_path)
    assert tokenizer.fingerprint == plain.fingerprint and tokenizer.pieces[tokenizer.cls_id] == "<c>"
    bytes_first = {"type": "Sequence", "normalizers": [{"type": "ByteLevel"}]}
    change = {"change": lambda layout: layout.update(normalizer=bytes_first)}
    tokenizer = built(tmp_path, (byte_bpe()[0], None), **change)
    assert tokenizer.spells_all and not tokenizer.count_dropped([WHOLE])


def test_a_special_piece_without_a_role_is_special_too(tmp_path):
    """No text gives it, and masking never draws it; an added piece that is not special is text."""

    def change(layout):
        (plain,) = [token for token in layout["added_tokens"] if token["content"] == "<plain>"]
        plain["special"] = False

    tokenizer = built(tmp_path, plain_bpe("abc", "<u>"), added=(*ADDED, "<extra>", "<plain>"), change=change)
    extra, plain = (tokenizer.pieces.index(name) for name in ("<extra>", "<plain>"))
    assert extra in tokenizer.special_ids and plain not in tokenizer.special_ids
    assert extra not in Masker(tokenizer)._random_pieces and plain in Masker(tokenizer)._random_pieces


TEXT = "the unaffable cats sat on singing mats"
SUFFIX = {"treat_whitespace_as_suffix": True}
LETTERS = list("theunafblcsoigm")


def sentencepiece(**options):
    return lambda folder: build_tokenizer("SentencePiece", tokenizer_model=train_model(folder / "m.model", **options))


def bpe(pieces, splitter, **options):
    """Return a maker of a BPE tokenizer.json without merges: a piece is one character, with its mark."""
    return lambda folder: built(folder, (plain_bpe(pieces, "<u>", **options)[0], splitter))


def word_pieces(folder):
    model = models.WordPiece(numbered(*ADDED, *LETTERS, *(f"##{letter}" for letter in LETTERS)), unk_token="<u>")
    return built(folder, (model, pre_tokenizers.WhitespaceSplit()))


WITH_END = [*LETTERS, *(letter + "</w>" for letter in LETTERS)]
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
    "WordPiece": (word_pieces, BEGIN),
}
UNMARKED = {
    "byte-level without blanks": bpe(ALPHABET, BARE),
    "letters": bpe(LETTERS, pre_tokenizers.WhitespaceSplit()),
    "no dummy": sentencepiece(texts=["thecats", "satonmats", "singing"] * 30, vocab_size=20, add_dummy_prefix=False),
}
BLANKS = str.maketrans({"\u2581": "", "\u0120": "", " ": ""})


def spans_of(tokenizer, ids):
    """Return the begin and the end of each word among ids."""
    begins = tokenizer_module.word_begins(tokenizer.word_starts, tokenizer.word_ends, np.array(ids))
    begins[0] = True
    return list(itertools.pairwise([*np.flatnonzero(begins).tolist(), len(ids)]))


def words_of(tokenizer, ids):
    """Return the texts of the words among ids."""
    words = ["".join(tokenizer.pieces[k] for k in ids[i:j]) for i, j in spans_of(tokenizer, ids)]
    return [word.replace("</w>", "").replace("##", "").translate(BLANKS) for word in words]


@pytest.mark.parametrize("kind", KINDS)
def test_words_are_the_texts_own(tmp_path, kind):
    make, side = KINDS[kind]
    tokenizer = make(tmp_path)
    assert tokenizer.word_side == side and warn_of_unmarked_words(tokenizer) is None
    assert tokenizer.word_starts[tokenizer.special_ids].all()
    assert words_of(tokenizer, tokenizer.encode(TEXT)) == TEXT.split()


@pytest.mark.parametrize("kind", UNMARKED)
def test_a_vocabulary_without_marks_is_said_and_its_pieces_are_words(tmp_path, kind):
    tokenizer = UNMARKED[kind](tmp_path)
    assert tokenizer.word_side == NONE and tokenizer.word_starts.all() and not tokenizer.word_ends.any()
    assert "marks neither begins nor ends of words" in warn_of_unmarked_words(tokenizer)


def test_a_list_of_words_needs_no_marks_and_marks_may_be_at_ends_of_words(tmp_path):
    words = models.WordLevel(numbered(*SPECIALS, *TEXT.split()), "[UNK]")
    tokenizer = built(tmp_path, (words, pre_tokenizers.WhitespaceSplit()), {}, added=())
    assert words_of(tokenizer, tokenizer.encode(TEXT)) == TEXT.split() and not warn_of_unmarked_words(tokenizer)
    bpe([*ALPHABET, "e\u0120", "s\u0120"], ENDS)(tmp_path)
    layout = json.loads((tmp_path / "tokenizer.json").read_text())
    layout["model"]["merges"] = [[letter, "\u0120"] for letter in "estng"]
    for piece in ("t\u0120", "n\u0120", "g\u0120"):
        layout["model"]["vocab"][piece] = len(layout["model"]["vocab"])
    (tmp_path / "tokenizer.json").write_text(json.dumps(layout))
    tokenizer = built(tmp_path)
    assert tokenizer.word_side == END and words_of(tokenizer, tokenizer.encode(TEXT)) == TEXT.split()


@pytest.fixture(params=["unigram, suffix", "</w>"])
def suffixed(request, tmp_path):
    return KINDS[request.param][0](tmp_path)


@pytest.mark.parametrize("masking", ["whole-word", "ngram"])
def test_masks_take_words_whole(suffixed, masking):
    ids = suffixed.encode("cats sat on mats the")  # of at most four pieces each
    row = np.array([[suffixed.cls_id, *ids, suffixed.sep_id, suffixed.pad_id]] * 500)
    inside = np.where(row == suffixed.pad_id, 0, 1)
    _, labels = Masker(suffixed, 0.4, masking=MASKINGS.find(masking)())(row, inside, np.zeros(500, int), np.arange(500))
    predicted, spans = labels[:, 1 : 1 + len(ids)] >= 0, spans_of(suffixed, ids)
    assert len(spans) == 5 and max(j - i for i, j in spans) > 1
    for i, j in spans:
        assert (predicted[:, i:j].all(1) | ~predicted[:, i:j].any(1)).all()
        assert 0 < predicted[:, i].mean() < 1


def test_scores_mask_the_words_own_pieces(suffixed):
    ids = suffixed.encode("the cats sat")
    word = np.concatenate([[number] * (j - i) for number, (i, j) in enumerate(spans_of(suffixed, ids))])
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
        ("unigram, suffix", "char, suffix", False),
        ("</w>", "unigram, suffix", False),
        ("unigram", "unigram, suffix", True),
        ("</w>", "unigram", True),
    ],
)
def test_pieces_of_two_vocabularies_are_compared_by_what_both_mark(tmp_path, old, new, by_text):
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    ours, theirs = KINDS[old][0](tmp_path / "old"), KINDS[new][0](tmp_path / "new")
    plan = plan_transfer(ours, theirs)
    assert plan.by_text == by_text and ("by text alone" in plan.summary()) == by_text
    for i, parts in enumerate(plan.parts):
        if i not in theirs.special_ids and parts and theirs.pieces[i].translate(BLANKS):
            spelled = "".join(ours.pieces[k] for k in parts).replace("</w>", "").translate(BLANKS)
            assert spelled == theirs.pieces[i].translate(BLANKS)
            if not by_text:
                assert ours.word_ends[parts[-1]] == theirs.word_ends[i] and not ours.word_ends[parts[:-1]].any()
