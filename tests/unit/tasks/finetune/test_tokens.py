"""Token classification: words as pieces, windows, labels, and the loss beside its twin."""

import math

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from megatron_ddrp.data.batches.batch import IGNORED_LABEL
from megatron_ddrp.data.tokenizers.tokenizer import build_tokenizer
from megatron_ddrp.tasks.finetune.kinds import KINDS
from megatron_ddrp.tasks.finetune.kinds.contract import context_windows, pieces_of_answer, pieces_of_words, windows_of
from megatron_ddrp.tasks.finetune.kinds.tokens import Tags
from megatron_ddrp.tasks.finetune.table_files import Example, Task
from tests.sentencepiece_models import train_model
from tests.unit.tasks.conftest import SPECIAL, tokenizer_of

MANY = ["unhappy", "Привет", "мир", "\x00", "中", "文", ",", "cafe\u0301s", "ﬁ", "\U0001f680", "お茶", "-LRB-"]


def test_pieces_of_words_and_of_an_answer_are_those_of_the_text(tmp_path):
    """A piece never spans two words here, so the words can be taken one by one; a lone ▁ is the next word's."""
    pieces = ["Un", "##happ", "##y", "New", "York", "caf", "##é", "!", ".", "中", "文"]
    wordpiece = tokenizer_of(tmp_path, pieces, "BertWordPieceCase")
    texts = ["unhappy cafés in New York", "ein Dörfchen 中文 お茶", "Привет, мир!"] * 20
    path = train_model(tmp_path / "m.model", texts, vocab_size=70)
    sentencepiece = build_tokenizer("SentencePiece", tokenizer_model=path)
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet)
    backend.train_from_iterator(["the unhappy cats in New York"] * 9, trainer)
    (tmp_path / "hf").mkdir()
    backend.save(str(tmp_path / "hf" / "tokenizer.json"))
    byte_level = build_tokenizer("HuggingFace", tokenizer_model=tmp_path / "hf")

    def spelled(tokenizer, words):
        return [[tokenizer.pieces[i] for i in pieces] for pieces in pieces_of_words(tokenizer, words)]

    words = ["Unhappy", "New York", "\x00\u200b", "café!", "中文", "nothing", "", "York"]
    expected = ("Un ##happ ##y", "New York", "[UNK]", "caf ##é !", "中 文", "[UNK]", "[UNK]", "York")
    assert spelled(wordpiece, words) == [pieces.split() for pieces in expected]
    visible = [word for word in MANY if word != "\x00"]
    alone = [sentencepiece.encode(word) or [sentencepiece.unk_id] for word in visible]
    assert pieces_of_words(sentencepiece, visible) == alone
    assert spelled(sentencepiece, ["中", "文"])[1][0] == "▁"
    pieces = pieces_of_words(byte_level, MANY)
    assert pieces == [byte_level.encode(MANY[0]), *(byte_level.encode(" " + word) for word in MANY[1:])]
    assert byte_level.pieces[pieces[1][0]].startswith("Ġ")
    for tokenizer in (wordpiece, sentencepiece, byte_level):
        pieces = [piece for own in pieces_of_words(tokenizer, MANY) for piece in own]
        in_text = tokenizer.encode(" ".join(MANY))
        assert [p for p in pieces if p != tokenizer.unk_id] == [p for p in in_text if p != tokenizer.unk_id]
    context = "the cafés in New York, the unhappy"
    ids, spans = byte_level.encode_with_spans(context)
    for answer in ("New York", "cafés", "York", "unhappy", "the"):
        begin = context.index(answer)
        first, last = pieces_of_answer(np.array(spans), begin, begin + len(answer))
        assert context[spans[first][0] : spans[last][1]].strip() == answer
    assert pieces_of_answer(np.array([(0, 2), (3, 5)]), 2, 3) is None


def test_windows_by_hand_and_of_any_sentence_label_every_word_once():
    assert windows_of([], 4, 2) == []
    assert windows_of([1, 2, 1], 4, 2) == [(0, 3, 0, 3)]
    # Words of one piece: 0123 | 2345 | 4567, and of each pair of shared words one goes to either side.
    assert windows_of([1] * 8, 4, 2) == [(0, 4, 0, 3), (2, 6, 3, 5), (4, 8, 5, 8)]
    assert windows_of([9, 1, 9], 4, 2) == [(0, 1, 0, 1), (1, 2, 1, 2), (2, 3, 2, 3)]
    by_hand = {0: [(0, 0)], 5: [(0, 5)], 6: [(0, 5), (3, 6)], 11: [(0, 5), (3, 8), (6, 11)]}
    assert {pieces: context_windows(pieces, 5, 2) for pieces in by_hand} == by_hand
    for pieces in range(40):
        windows = context_windows(pieces, 7, 3)
        assert {p for begin, end in windows for p in range(begin, end)} == set(range(pieces))
        assert all(former[1] - latter[0] == 3 for former, latter in zip(windows, windows[1:], strict=False))
    rng, longest = np.random.default_rng(3), 0
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


KIND = KINDS["tokens"]
NAMES = {"PER": ["ada", "max"], "LOC": ["ulm", "rome"], "ORG": ["acme", "fiat"], "MISC": ["roman", "latin"]}
TAGS = ("O", *(f"{prefix}-{name}" for prefix in "BI" for name in NAMES))
TASK = Task("ner", "seqeval", "tokens", TAGS)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tokenizer_of(tmp_path_factory.mktemp("tokens"), ["un", "##happ", "##y", "ada"])


def encode(tokenizer, examples, max_length=16, task=TASK):
    return KIND.encode(task, examples, tokenizer, max_length)


def test_the_first_piece_of_a_word_has_its_label(tokenizer):
    def by_row(values):
        return [part.tolist() for part in np.split(np.asarray(values), encoded.ends[:-1])]

    encoded = encode(tokenizer, [Example(("unhappy", "Ada", "\u200b"), [0.0, 1.0, 2.0]), Example(("ada",), [3.0])])
    unk, cls, sep, un, happ, y, ada = (tokenizer.unk_id, tokenizer.cls_id, tokenizer.sep_id, 5, 6, 7, 8)
    assert by_row(encoded.pieces) == [[cls, un, happ, y, ada, unk, sep], [cls, ada, sep]]
    no = IGNORED_LABEL
    assert by_row(encoded.targets) == [[no, 0, no, no, 1, 2, no], [no, 3, no]]
    assert KIND.targets(encoded, np.array([1, 0])).tolist() == [[no, 3, no, no, no, no, no], [no, 0, no, no, 1, 2, no]]
    assert KIND.size(encoded, np.array([0, 1])) == 4
    assert list(encoded.answers.by_sentence()) == [["O", "B-PER", "B-LOC"], ["B-ORG"]]


def test_long_sentences_and_words_keep_their_labels_and_none_is_there_twice(tokenizer):
    rng = np.random.default_rng(0)
    words = [("ada", "unhappy")[number] for number in rng.integers(0, 2, 40)]
    labels = rng.integers(0, 9, 40)
    encoded = encode(tokenizer, [Example(("ada",), [1.0]), Example(tuple(words), labels.astype(float).tolist())])
    assert len(encoded) > 5 and encoded.lengths.max() <= 16
    assert encoded.targets[encoded.targets != IGNORED_LABEL].tolist() == [1, *labels]
    begins = encoded.ends[1:-1]  # of the sentence's later rows, which begin with words that the row before labels
    assert (encoded.targets[begins + 1] == IGNORED_LABEL).all()
    firsts = encoded.pieces[encoded.targets != IGNORED_LABEL]
    assert [tokenizer.pieces[piece] for piece in firsts] == ["ada", *(w.replace("unhappy", "un") for w in words)]
    encoded = encode(tokenizer, [Example(("un" + "happ" * 20, "ada"), [5.0, 1.0])], max_length=8)
    assert encoded.lengths.tolist() == [8, 3]
    assert encoded.answers.classes.tolist() == encoded.targets[encoded.targets != IGNORED_LABEL].tolist() == [5, 1]


def test_the_loss_is_that_of_its_twin(tokenizer):
    """−Σ log softmax of the labels, from float64 lists."""
    encoded = encode(tokenizer, [Example(("unhappy", "ada"), [0.0, 7.0]), Example(("ada",), [3.0])])
    torch.manual_seed(0)
    outputs = torch.randn(2, 6, 9, dtype=torch.float64)
    targets = torch.from_numpy(KIND.targets(encoded, np.array([0, 1])))
    twin = 0.0
    for row, position, label in ((0, 1, 0), (0, 4, 7), (1, 1, 3)):
        logits = outputs[row, position].tolist()
        twin -= logits[label] - math.log(sum(math.exp(value) for value in logits))
    assert KIND.loss_sum(outputs, targets).item() == pytest.approx(twin, rel=1e-12)


def test_outcomes_are_the_likeliest_classes_and_nan_where_a_logit_is(tokenizer):
    encoded = encode(tokenizer, [Example(("ada", "ada"), [0.0, 1.0]), Example(("ada",), [1.0])])
    outputs = torch.zeros(2, 4, 9)
    outputs[0, 1, 3] = outputs[1, 1, 8] = outputs[0, 0, 1] = 1.0
    outputs[0, 2, 0] = math.inf
    places, values = KIND.outcomes(outputs, encoded, np.array([0, 1]))
    assert places.tolist() == list(range(7))
    outcomes = KIND.blank(encoded)
    outcomes[places] = values
    np.testing.assert_array_equal(KIND.predictions(TASK, encoded, outcomes).classes, [3, math.nan, 8])


def tags(*sentences):
    classes = [float(TAGS.index(tag)) if tag != "nan" else math.nan for row in sentences for tag in row.split()]
    return Tags(np.array(classes), np.cumsum([len(row.split()) for row in sentences]), TAGS)


def test_a_word_without_a_prediction_has_no_score_and_the_baseline_is_the_most_frequent_tag():
    assert KIND.score("seqeval", tags("O B-PER I-PER", "B-LOC"), tags("O B-PER nan", "O")) is None
    few = KIND.answers(TASK, [[0.0, 1.0], [0.0]])
    assert KIND.baseline(TASK, {"O": 9, "B-LOC": 1}, few) == 0.0
    words = Task("pos", "accuracy", "tokens", TAGS)
    assert KIND.baseline(words, {"O": 9, "B-LOC": 1}, few) == pytest.approx(2 / 3)


def test_values_say_the_same_again_and_nan_is_a_tag():
    gold, predicted = tags("O B-PER I-PER", "B-LOC"), tags("O nan O", "I-LOC")
    sides = [list(KIND.as_values(TASK, side)) for side in (gold, predicted)]
    assert sides[1] == [["O", None, "O"], ["I-LOC"]]
    earlier = [[name or "nan" for name in names] for names in sides[1]]  # as earlier versions wrote it
    for values in (sides[1], earlier):
        for before, after in zip((gold, predicted), KIND.read(TASK, sides[0], values), strict=True):
            np.testing.assert_array_equal(before.classes, after.classes)
            np.testing.assert_array_equal(before.ends, after.ends)
    # It is the ISO code of Min Nan in the tags of languages.
    task = Task("languages", "accuracy", "tokens", ("eng", "nan"))
    side = Tags(np.array([0.0, 1.0, math.nan]), np.array([3]), task.labels)
    values = list(KIND.as_values(task, side))
    assert values == [["eng", "nan", None]]
    np.testing.assert_array_equal(KIND.read(task, values, values)[1].classes, side.classes)


def test_rows_that_are_no_sentences_and_values_of_another_kind_are_refused():
    for tokens, tags, expected in (
        ("no list", ["O"], "tokens is 'no list', expected a list of words"),
        ([], [], "tokens is empty or holds an empty word, expected a list of words"),
        (["a", ""], [], "tokens is empty or holds an empty word, expected a list of words"),
        (["a", 3], ["O", "O"], r"tokens is \['a', 3\], expected a list of words"),
        (["a"], "O", "label is 'O', expected a list with the tag of each word"),
        (["a"], ["B-X"], "label 'B-X' is in no row of the training file"),
        (["a"], [""], "label is '', expected a name"),
        (["a", "b"], ["O"], "1 tags for 2 words, expected one for each"),
    ):
        with pytest.raises(ValueError, match=expected):
            texts = KIND.texts({"tokens": tokens, "tags": tags}, KIND.usual_columns)
            KIND.label(tags, TASK)
            KIND.check(texts, tags)
    for told, gold in ((["O"], ["O", "O"]), (["X"], ["O"]), ("O", ["O"]), ([["O"]], ["O"]), ({"O": 1}, ["O"])):
        with pytest.raises(ValueError):
            KIND.read(TASK, [gold], [told])
