"""Words as pieces, and windows over long sentences and contexts."""

import io

import numpy as np
import pytest

from megatron_ddrp.data.tokenizers.tokenizer import build_tokenizer
from megatron_ddrp.tasks.finetune.kinds.contract import (
    Window,
    context_windows,
    pieces_of_answer,
    pieces_of_words,
    windows_of,
)

WORDS = ["Un", "##happ", "##y", "New", "York", "caf", "##é", "!", ".", "中", "文"]


@pytest.fixture(scope="module")
def wordpiece(tmp_path_factory):
    path = tmp_path_factory.mktemp("words") / "vocab.txt"
    path.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]) + "\n")
    return build_tokenizer("BertWordPieceCase", path)


@pytest.fixture(scope="module")
def sentencepiece_tokenizer(tmp_path_factory):
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["unhappy cafés in New York", "ein Dörfchen 中文 お茶", "Привет, мир!"] * 20),
        model_writer=model,
        vocab_size=70,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    path = tmp_path_factory.mktemp("sp") / "m.model"
    path.write_bytes(model.getvalue())
    return build_tokenizer("SentencePiece", tokenizer_model=path)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=specials, initial_alphabet=alphabet)
    backend.train_from_iterator(["the unhappy cats in New York"] * 9, trainer)
    folder = tmp_path_factory.mktemp("hf")
    backend.save(str(folder / "tokenizer.json"))
    return build_tokenizer("HuggingFace", tokenizer_model=folder)


def spelled(tokenizer, words):
    return [[tokenizer.pieces[i] for i in pieces] for pieces in pieces_of_words(tokenizer, words)]


def test_pieces_of_words_in_wordpiece(wordpiece):
    words = ["Unhappy", "New York", "\x00\u200b", "café!", "中文", "nothing", "", "York"]
    assert spelled(wordpiece, words) == [
        ["Un", "##happ", "##y"],
        ["New", "York"],
        ["[UNK]"],
        ["caf", "##é", "!"],
        ["中", "文"],
        ["[UNK]"],
        ["[UNK]"],
        ["York"],
    ]


MANY = ["unhappy", "Привет", "мир", "\x00", "中", "文", ",", "cafe\u0301s", "ﬁ", "\U0001f680", "お茶", "-LRB-"]


def test_pieces_of_words_in_sentencepiece_are_those_of_each_word_alone(sentencepiece_tokenizer):
    """A piece never spans two words here, so the words can be taken one by one; a lone ▁ is the next word's."""
    alone = [
        sentencepiece_tokenizer.encode(word) or [sentencepiece_tokenizer.unk_id] for word in MANY if word != "\x00"
    ]
    assert pieces_of_words(sentencepiece_tokenizer, [word for word in MANY if word != "\x00"]) == alone
    assert spelled(sentencepiece_tokenizer, ["中", "文"])[1][0] == "▁"


def test_pieces_of_words_in_byte_level_bpe_are_those_behind_a_blank(byte_level):
    pieces = pieces_of_words(byte_level, MANY)
    assert pieces[0] == byte_level.encode(MANY[0])
    assert pieces[1:] == [byte_level.encode(" " + word) for word in MANY[1:]]
    assert byte_level.pieces[pieces[1][0]].startswith("Ġ")


def test_no_piece_is_lost(wordpiece, sentencepiece_tokenizer, byte_level):
    for tokenizer in (wordpiece, sentencepiece_tokenizer, byte_level):
        pieces = [piece for own in pieces_of_words(tokenizer, MANY) for piece in own]
        in_text = tokenizer.encode(" ".join(MANY))
        assert [p for p in pieces if p != tokenizer.unk_id] == [p for p in in_text if p != tokenizer.unk_id]


def test_windows_by_hand():
    assert windows_of([], 4, 2) == []
    assert windows_of([1, 2, 1], 4, 2) == [Window(0, 3, 0, 3)]
    # Words of one piece: 0123 | 2345 | 4567, and of each pair of shared words one goes to either side.
    assert windows_of([1] * 8, 4, 2) == [Window(0, 4, 0, 3), Window(2, 6, 3, 5), Window(4, 8, 5, 8)]
    assert windows_of([9, 1, 9], 4, 2) == [Window(0, 1, 0, 1), Window(1, 2, 1, 2), Window(2, 3, 2, 3)]


def test_windows_of_any_sentence_label_every_word_once():
    rng = np.random.default_rng(3)
    longest = 0
    for _ in range(300):
        room = int(rng.integers(1, 12))
        lengths = rng.integers(1, 7, size=rng.integers(1, 30)).tolist()
        windows = windows_of(lengths, room, overlap=room // 4)
        longest = max(longest, len(windows))
        assert [w for window in windows for w in range(window.own_begin, window.own_end)] == list(range(len(lengths)))
        for window in windows:
            assert window.begin <= window.own_begin < window.own_end <= window.end
            assert sum(min(length, room) for length in lengths[window.begin : window.end]) <= room
    assert longest > 5


def test_context_windows_cover_the_context_and_share_the_overlap():
    assert context_windows(0, 5, 2) == [(0, 0)]
    assert context_windows(5, 5, 2) == [(0, 5)]
    assert context_windows(6, 5, 2) == [(0, 5), (3, 6)]
    assert context_windows(11, 5, 2) == [(0, 5), (3, 8), (6, 11)]
    for pieces in range(40):
        windows = context_windows(pieces, 7, 3)
        assert {p for begin, end in windows for p in range(begin, end)} == set(range(pieces))
        assert all(former[1] - latter[0] == 3 for former, latter in zip(windows, windows[1:], strict=False))


def test_pieces_of_an_answer(byte_level):
    context = "the cafés in New York, the unhappy"
    ids, spans = byte_level.encode_with_spans(context)
    for answer in ("New York", "cafés", "York", "unhappy", "the"):
        begin = context.index(answer)
        first, last = pieces_of_answer(np.array(spans), begin, begin + len(answer))
        assert context[spans[first][0] : spans[last][1]].strip() == answer
    assert pieces_of_answer(np.array([(0, 2), (3, 5)]), 2, 3) is None
