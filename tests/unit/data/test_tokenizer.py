"""Tokenizers: BERT's own ids on any Unicode, special tokens that text cannot produce, word starts, save and load."""

import functools
import pickle

import numpy as np
import pytest
import sentencepiece
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.implementations import BertWordPieceTokenizer

from megatron_ddrp.data.tokenizers import libraries
from megatron_ddrp.data.tokenizers.tokenizer import build_tokenizer, load_tokenizer
from megatron_ddrp.data.tokenizers.vocabulary import warn_of_impossible
from tests.datasets import shared_asset
from tests.refusals import refused
from tests.sentencepiece_models import train_model
from tests.unit.conversion.conftest import wordpiece
from tests.unit.conversion.tokenizers_of_families import BERT, byte_level, unigram
from tests.unit.data.tokenizer_folders import built, numbered

SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LETTERS = "abcdefghijklmnopqrstuvwxyzABCXYZ0123456789éñöşα中文한\u0301'.,-[]#@ß"
VOCAB = [*SPECIALS, "mask", "MASK", "the", "un", "##aff", "##able", "cafe"]
VOCAB += list(dict.fromkeys(LETTERS)) + [f"##{letter}" for letter in dict.fromkeys(LETTERS)]


@pytest.fixture(scope="module")
def vocab_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("vocab") / "vocab.txt"
    path.write_text("".join(f"{piece}\n" for piece in VOCAB), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory):
    path = tmp_path_factory.mktemp("sp") / "test.model"
    path.write_bytes(shared_asset("test_model.model"))
    return path


ODD = "👩\u200d🚀 🇫🇷 ❤\ufe0f \u202eabc\u202c \u3000 \x85 \ufeff x\u0301\u0323 \u1100\u1161 \u0e33 \ud7a3"
ODD += " \U000e0041 \uffff 豈 \U0002f800"
SPECIAL_STRINGS = [*SPECIALS, "<s>", "</s>", "<unk>", "<pad>", "<mask>", "##s", "\u2581the"]
SENTENCES = ["the unaffable cafés", "naïve cats sat on 中文 mats", "don't [mask] the 🚀"]
KNOWN = LETTERS + " \t\n\r\x00\x0b\x1c\x7f\u00a0\u2028\u200b\u200d\ufffd\u0338\u0345\u1e9e\u0130\u03a3\ufb01_!~"
LETTER = st.one_of(st.sampled_from(KNOWN), st.sampled_from(ODD), st.characters(exclude_categories=("Cs",)))
PART = st.one_of(st.text(LETTER, max_size=40), st.sampled_from([*SPECIAL_STRINGS, ODD]))
TRICKY = st.lists(PART, max_size=5).map("".join)


def packed(tokenizer, texts):
    return [np.frombuffer(ids, tokenizer.dtype).tolist() for ids in tokenizer.encode_packed(texts)]


@pytest.mark.parametrize("lower", [True, False])
@settings(max_examples=150, deadline=None)
@given(text=TRICKY)
@example(text="UnAffable CAFÉ cafe\u0301s e\u0301.\u0301e =\u0338 a\x00b c\x1cd 中文a [MASK] [mask] ##s don't")
@example(text="a" * 100 + " " + "a" * 101 + " " + "中" * 150)
@example(text="The Unaffable CAFÉS, naïvely (2013–14) \u00a0 ﬁ İstanbul ΑΣ 한글 [CLS]")
def test_ids_are_berts_own(vocab_file, lower, text):
    ours, vocab = _wordpiece(vocab_file, lower), numbered(*VOCAB)
    theirs = BertWordPieceTokenizer(vocab, lowercase=lower, strip_accents=lower)
    theirs._tokenizer.encode_special_tokens = True  # ours never makes [MASK] of text
    expected = theirs.encode(text, add_special_tokens=False).ids
    assert ours.encode(text) == expected
    assert ours.encode(text) == expected, "the second look-up comes from the cache"
    assert ours.encode_batch([text, text]) == [expected, expected] and packed(ours, [text, ""]) == [expected, []]


@functools.cache
def _wordpiece(vocab_file, lower):
    return build_tokenizer(f"BertWordPiece{'LowerCase' if lower else 'Case'}", vocab_file)


def test_decoded_text_and_a_full_cache_that_changes_no_ids(vocab_file, monkeypatch):
    tokenizer = _wordpiece(vocab_file, lower=True)
    assert tokenizer.decode(tokenizer.encode("the unaffable cafes")) == "the unaffable cafes"
    words = [f"the{i} cafés [MASK] 中{i}文" for i in range(50)]
    expected = tokenizer.encode_batch(words * 2)
    monkeypatch.setattr(libraries, "CACHED_WORDS", 7)
    small = build_tokenizer("BertWordPieceLowerCase", vocab_file)
    assert small.encode_batch(words * 2) == expected and len(small._words) <= 7


@pytest.fixture(scope="module", params=["unigram", "bpe"])
def trained_sentencepiece(request, tmp_path_factory):
    """(our tokenizer, the library's processor) of a small model of that kind."""
    of_kind = {"unigram": {}, "bpe": {"model_type": "bpe", "byte_fallback": True}}[request.param]
    path = train_model(tmp_path_factory.mktemp(request.param) / "m.model", [*SENTENCES, "<s> tag"] * 20, **of_kind)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    return build_tokenizer("SentencePiece", tokenizer_model=path), processor


@settings(max_examples=150, deadline=None)
@given(text=TRICKY)
@example(text="The <s> [MASK] </s>\x00\u2581cats  \t\n don't 🚀")
def test_ids_equal_sentencepieces(trained_sentencepiece, text):
    ours, theirs = trained_sentencepiece
    expected = theirs.encode(text, out_type=int)
    assert ours.encode(text) == expected and packed(ours, [text, text]) == [expected] * 2


@pytest.fixture(scope="module", params=[functools.partial(byte_level, prefix=True), unigram], ids=["bytes", "unigram"])
def trained_huggingface(request, tmp_path_factory):
    """(our tokenizer, the library's) of a small tokenizer.json of that kind."""
    folder = tmp_path_factory.mktemp("hf")
    request.param(folder, BERT, template=False, texts=SENTENCES * 9)
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.encode_special_tokens = True
    return build_tokenizer("HuggingFace", tokenizer_model=folder), backend


@settings(max_examples=100, deadline=None)
@given(text=TRICKY)
@example(text="The [MASK] [CLS] cats  \t\n don't 🚀")
def test_ids_equal_tokenizers(trained_huggingface, text):
    ours, theirs = trained_huggingface
    never = set(ours.special_ids.tolist()) - {ours.unk_id}  # a unigram model may find "[MASK]" among its pieces
    expected = [ours.unk_id if i in never else i for i in theirs.encode(text, add_special_tokens=False).ids]
    assert ours.encode(text) == expected and ours.encode_batch([text, text]) == [expected] * 2
    assert packed(ours, [text]) == [expected]


@settings(max_examples=25, deadline=None)
@given(text=TRICKY)
@example(text=ODD)
def test_spans_of_any_text(vocab_file, trained_sentencepiece, trained_huggingface, text):
    """They go with the ids of `encode`, lie in the text, in order, and leave out only what has no piece."""
    wordpieces = _wordpiece(vocab_file, True), _wordpiece(vocab_file, False)
    for tokenizer in (*wordpieces, trained_sentencepiece[0], trained_huggingface[0]):
        ids, spans = tokenizer.encode_with_spans(text)
        assert ids == tokenizer.encode(text) and len(spans) == len(ids) and spans == sorted(spans)
        assert all(0 <= begin <= end <= len(text) for begin, end in spans)


def test_spans_are_characters_of_the_text_as_given(vocab_file, trained_sentencepiece, trained_huggingface):
    """The text has a character beyond 16 bits, a combining accent, ideographs and doubled blanks."""
    text = "\U0001f680 Cafe\u0301s, na\u00efve \u4e2d\u6587 don't  the\u00a0cats"
    words = ["\U0001f680", "Cafe\u0301s", ",", "na\u00efve", "\u4e2d\u6587", "don't", "the", "cats"]
    for tokenizer in (_wordpiece(vocab_file, True), trained_sentencepiece[0], trained_huggingface[0]):
        ids, spans = tokenizer.encode_with_spans(text)
        covered = {i for begin, end in spans for i in range(begin, end)}
        for word in words:
            begin = text.index(word)
            assert covered >= set(range(begin, begin + len(word))) - {text.index("\u0301")}, word
        for piece, (begin, end) in zip(ids, spans, strict=True):
            assert len(text[begin:end].split()) <= 1, tokenizer.pieces[piece]  # of one word


def test_wordpiece_attributes(vocab_file):
    tokenizer = build_tokenizer("BertWordPieceLowerCase", vocab_file)
    assert tokenizer.vocab_size == len(VOCAB) == len(tokenizer.pieces)
    roles = (tokenizer.pad_id, tokenizer.unk_id, tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id)
    assert roles == (0, 1, 2, 3, 4) == (*tokenizer.special_ids.tolist(),)
    assert tokenizer.word_starts.dtype == bool
    assert tokenizer.word_starts.tolist() == [not piece.startswith("##") for piece in VOCAB]
    assert tokenizer.fingerprint != build_tokenizer("BertWordPieceCase", vocab_file).fingerprint


def test_pieces_that_no_text_gives_are_counted(tmp_path):
    pieces = [*VOCAB[:5], "[unused1]", "the", "The", "##S", "##s", "caf\u00e9", "\u4e2d", "\uac00", "\u1100", "!"]
    lower = wordpiece(tmp_path / "v.txt", pieces, "BertWordPieceLowerCase")
    assert lower.count_impossible() == 4  # The, ##S, caf\u00e9, and a Hangul syllable, which comes apart
    for piece in ("The", "caf\u00e9", "\uac00"):
        assert pieces.index(piece) not in lower.encode(piece)
    assert build_tokenizer("BertWordPieceCase", tmp_path / "v.txt").count_impossible() == 0


def test_the_real_uncased_vocabulary_is_not_doubted(tmp_path):
    (tmp_path / "v.txt").write_bytes(shared_asset("vocab/bert-base-uncased-vocab.txt"))
    tokenizer = build_tokenizer("BertWordPieceLowerCase", tmp_path / "v.txt")
    assert tokenizer.vocab_size == 30522 and tokenizer.count_impossible() == 0
    assert warn_of_impossible(tokenizer) is None


CLEAN = "".join(f"{piece}\n" for piece in VOCAB)
BLANKS = {"mark": "\ufeff" + CLEAN, "blanks and CRLF": CLEAN.replace("\n", " \t\r\n")}
BLANKS["other blanks"] = CLEAN.replace("the\n", " the\u00a0\n").replace("[PAD]", "\t[PAD]")


@pytest.mark.parametrize("content", BLANKS.values(), ids=BLANKS)
def test_blanks_around_pieces_and_a_byte_order_mark_are_no_text(tmp_path, vocab_file, content):
    """BERT's reader (google-research/bert, `load_vocab`) strips each line."""
    (tmp_path / "v.txt").write_bytes(content.encode())
    ours, clean = (build_tokenizer("BertWordPieceLowerCase", path) for path in (tmp_path / "v.txt", vocab_file))
    assert ours.pieces == VOCAB and ours.fingerprint == clean.fingerprint
    assert ours.pieces[ours.encode("the")[0]] == "the"
    (tmp_path / "v.txt").write_bytes(vocab_file.read_bytes().replace(b"\n", b"\r\n")[:-2])  # no last newline
    other, clean = (build_tokenizer("BertWordPieceCase", path) for path in (tmp_path / "v.txt", vocab_file))
    assert other.fingerprint == clean.fingerprint and other.pieces == VOCAB


def test_a_blank_line_keeps_its_id_and_a_stripped_piece_twice_is_refused(tmp_path):
    tokenizer = wordpiece(tmp_path / "v.txt", [*VOCAB[:7], "", "the", "\u3000", "un", " "])
    assert tokenizer.encode("the un") == [8, 10] and tokenizer.pieces[7:] == ["", "the", "\u3000", "un", " "]
    line = rf"v.txt:{len(VOCAB) + 1}: 'the' is already on line 8"
    refused(line, wordpiece, tmp_path / "v.txt", [*VOCAB, "the "])


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_a_vocabulary_in_another_encoding_is_named(tmp_path, encoding):
    (tmp_path / "v.txt").write_bytes(CLEAN.encode(encoding))
    line = rf"v.txt: in {encoding[:6].upper()}[BL]?E?, expected UTF-8; .*iconv -f"
    refused(line, build_tokenizer, "BertWordPieceCase", tmp_path / "v.txt")


def test_sentencepiece_appends_what_the_model_lacks(sentencepiece_model):
    tokenizer = build_tokenizer("SentencePiece", tokenizer_model=sentencepiece_model)
    assert tokenizer.pieces[tokenizer.cls_id] == "<s>" and tokenizer.pieces[tokenizer.sep_id] == "</s>"
    assert tokenizer.pieces[1000:] == ["[PAD]", "[MASK]"] and tokenizer.vocab_size == 1002
    ids = tokenizer.encode("I saw a girl\nwith <s> [MASK] </s>")
    assert not set(ids) & {tokenizer.cls_id, tokenizer.sep_id, tokenizer.pad_id, tokenizer.mask_id}
    assert tokenizer.word_starts[ids[0]] and not tokenizer.word_starts.all()
    assert tokenizer.decode(tokenizer.encode("I saw a girl")) == "I saw a girl"
    assert isinstance(tokenizer.decode([tokenizer.cls_id, *ids, tokenizer.mask_id]), str)
    assert pickle.loads(pickle.dumps(tokenizer)).encode("I saw") == tokenizer.encode("I saw")


def test_huggingface_reads_roles_and_ignores_specials_in_text(tmp_path):
    specials = ["<go>", "<end>", "<pad>", "<mask>", "<unk>"]
    model = models.WordLevel(numbered(*specials, *"ab"), unk_token="<unk>")
    made, named = (model, pre_tokenizers.WhitespaceSplit()), {"cls": "<go>", "sep": {"content": "<end>"}}
    tokenizer = built(tmp_path / "hf", made, named, added=specials)
    tokenizer.save(tmp_path / "saved")
    for ours in (tokenizer, load_tokenizer(tmp_path / "saved"), pickle.loads(pickle.dumps(tokenizer))):
        assert (ours.cls_id, ours.sep_id, ours.mask_id) == (0, 1, 3) and ours.word_starts.all()
        assert ours.encode_batch(["a <mask> b <go>"]) == [ours.encode("a <mask> b <go>")] == [[5, 4, 6, 4]]
        assert ours.fingerprint == tokenizer.fingerprint


@pytest.mark.parametrize("kind", ["BertWordPieceLowerCase", "BertWordPieceCase", "SentencePiece"])
def test_save_and_load_give_an_equal_tokenizer(tmp_path, vocab_file, kind, request):
    model = request.getfixturevalue("sentencepiece_model") if kind == "SentencePiece" else None
    tokenizer = build_tokenizer(kind, None if model else vocab_file, model)
    tokenizer.save(tmp_path / "a" / "b")
    again = load_tokenizer(tmp_path / "a" / "b")
    assert again.fingerprint == tokenizer.fingerprint and again.pieces == tokenizer.pieces
    assert again.encode("The unaffable café") == tokenizer.encode("The unaffable café")


def test_a_changed_vocabulary_is_noticed(tmp_path, vocab_file):
    build_tokenizer("BertWordPieceCase", vocab_file).save(tmp_path)
    with (tmp_path / "vocab.txt").open("a") as stream:
        stream.write("more\n")
    refused("fingerprint differs", load_tokenizer, tmp_path)
    (tmp_path / "megatron_tokenizer.json").write_text("{}")
    refused("not a tokenizer description", load_tokenizer, tmp_path)


def test_mistakes_are_one_line(tmp_path, vocab_file):
    file, cased, folder = tmp_path / "file", "BertWordPieceCase", tmp_path / "without tokenizer.json"
    folder.mkdir()
    (folder / "merges.txt").touch()
    goes_with = "--tokenizer-model goes with --tokenizer-type SentencePiece or HuggingFace"
    no_effect = f"--tokenizer-model a.model has no effect beside --vocab-file: {goes_with}; leave one of the two out"
    for words, kind, content, paths in (
        (r"lacks \[CLS\], \[MASK\];", cased, b"[PAD]\n[UNK]\n[SEP]\na\n", {"vocab_file": file}),
        ("file: JSON; expected a vocab.txt", cased, b'{"version": "1.0"}\n', {"vocab_file": file}),
        ("file:2: not UTF-8; .*others need --tokenizer-type", cased, b"a\n\xff\n", {"vocab_file": file}),
        ("file:2: a piece with a zero byte", cased, b"a\n\0\0b\n", {"vocab_file": file}),
        ("empty", cased, b"", {"vocab_file": file}),
        (r"file:3: 'the' is already on line 2, .*\[unused-2\]", cased, b"a\nthe\r\nthe\r\n", {"vocab_file": file}),
        ("No such file", cased, b"", {"vocab_file": tmp_path / "none"}),
        (rf"needs --vocab-file \(a local path\); {goes_with}$", cased, b"", {"tokenizer_model": vocab_file}),
        (f"^{no_effect}$", cased, b"", {"vocab_file": vocab_file, "tokenizer_model": "a.model"}),
        ("--vocab-file v.txt has no effect", "SentencePiece", b"", {"vocab_file": "v.txt", "tokenizer_model": file}),
        ("expected one of BertWordPieceLowerCase,", "Bert", b"", {"vocab_file": vocab_file}),
        ("not a SentencePiece model", "SentencePiece", b"junk", {"tokenizer_model": file}),
        ("not a SentencePiece model", "SentencePiece", b"", {"tokenizer_model": file}),
        ("not a tokenizer.json", "HuggingFace", b"{}", {"tokenizer_model": file}),
        ("no such file; .* use --tokenizer-type BertWordP", "HuggingFace", b"", {"tokenizer_model": vocab_file.parent}),
        (r"tokenizer.json: no such file; .*save_pretrained", "HuggingFace", b"", {"tokenizer_model": folder}),
    ):
        file.write_bytes(content)
        refused(words, build_tokenizer, kind, **paths)
