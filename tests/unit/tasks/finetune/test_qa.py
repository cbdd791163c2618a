"""Question answering: windows and their targets, spans beside their twin, and answers in every script."""

import itertools
import json
import math
import re
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models, normalizers, pre_tokenizers

from megatron_ddrp.data.tokenizers.tokenizer import build_tokenizer, usual_rows
from megatron_ddrp.tasks.finetune.kinds import KINDS
from megatron_ddrp.tasks.finetune.kinds.contract import text_of_pieces
from megatron_ddrp.tasks.finetune.kinds.tokens import NO_ANSWER, Answers, best_spans
from megatron_ddrp.tasks.finetune.table_files import Example, Task
from tests.unit.tasks.conftest import SPECIAL, tokenizer_of

KIND = KINDS["qa"]
TASK, WITH_UNANSWERABLE = Task("squad", "f1", "qa"), Task("squad2", "f1", "qa", (NO_ANSWER,))
PIECES = ["who", "wrote", "?", "ada", "love", "##lace", "it", ".", "caf", "##e"]
CONTEXT = "It: Ada  Lovelace wrote it."
CELLS = {"question": "Who?", "context": CONTEXT, "answers": {"text": ["Ada"], "answer_start": [4]}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tokenizer_of(tmp_path_factory.mktemp("qa"), PIECES)


def example(context=CONTEXT, *answers):
    return Example(("Who wrote it?", context), Answers(answers, tuple(context.index(text) for text in answers)))


def encode(tokenizer, examples, max_length=64, task=TASK):
    return KIND.encode(task, examples, tokenizer, max_length)


def spelled(tokenizer, encoded, row):
    begin = encoded.ends[row] - encoded.lengths[row]
    return [tokenizer.pieces[piece] for piece in encoded.pieces[begin : encoded.ends[row]]]


def test_a_row_is_question_and_context_and_its_targets_the_answer(tokenizer, monkeypatch):
    encoded = encode(tokenizer, [example(CONTEXT, "Ada  Lovelace", "Ada"), example(CONTEXT)])
    row = "[CLS] who wrote it ? [SEP] it [UNK] ada love ##lace wrote it . [SEP]"
    assert spelled(tokenizer, encoded, 0) == row.split()
    assert encoded.segments.tolist() == 2 * [*[0] * 6, *[1] * 9]
    assert encoded.targets.tolist() == [[8, 10], [0, 0]]
    assert encoded.answers == [("Ada  Lovelace", "Ada"), ()]
    assert [CONTEXT[begin:end] for begin, end in encoded.spans[8:11]] == ["Ada", "Love", "lace"]
    assert (encoded.spans[[*range(6), 14]] == -1).all()
    monkeypatch.setattr(tokenizer, "own_rows", usual_rows(tokenizer.cls_id, tokenizer.sep_id, True))
    encoded = encode(tokenizer, [example(CONTEXT, "Ada")])
    assert spelled(tokenizer, encoded, 0)[4:8] == ["?", "[SEP]", "[SEP]", "it"]
    assert encoded.targets.tolist() == [[9, 9]]


def test_long_contexts_become_windows_and_the_answer_is_in_those_that_hold_it(tokenizer):
    context = "it " * 30 + "Ada Lovelace " + "it " * 5
    encoded = encode(tokenizer, [example("Ada wrote it.", "Ada"), example(context, "Ada Lovelace")], max_length=16)
    assert encoded.lengths.max() == 16 and encoded.questions.tolist() == [0, *[1] * (len(encoded) - 1)]
    holders = 0
    for row in range(1, len(encoded)):
        pieces, (first, last) = spelled(tokenizer, encoded, row), encoded.targets[row]
        whole = "ada love ##lace" in " ".join(pieces)
        holders += whole
        assert (pieces[first : last + 1] == ["ada", "love", "##lace"]) if whole else (first, last) == (0, 0)
    assert holders >= 1
    seen = {tuple(span) for span in encoded.spans[encoded.ends[0] :] if span[0] >= 0}
    assert len(seen) == 38  # every piece of the context is in some window
    encoded = encode(tokenizer, [example("it " * 25)], max_length=16)
    windows = [own[own[:, 0] >= 0] for own in np.split(encoded.spans, encoded.ends[:-1])]
    half = len(windows[0]) // 2  # of a row is shared, so that a border cuts no short answer
    for before, after in zip(windows, windows[1:], strict=False):
        assert np.array_equal(before[len(windows[0]) - half :], after[:half])


def test_answers_that_no_row_holds_are_counted_and_the_shortest_rows_hold_some(tokenizer):
    long = example("it " * 20 + "Ada " * 12 + "it", "Ada " * 11 + "Ada")
    encoded = encode(tokenizer, [example(CONTEXT, "Ada"), long], max_length=16)
    assert encoded.warning.startswith("no row of 16 pieces holds the whole answer to 1 of the questions")
    assert not encoded.targets[encoded.questions == 1].any()
    assert encode(tokenizer, [long]).warning == ""
    encoded = encode(tokenizer, [example(CONTEXT, "Ada")], max_length=8)
    assert encoded.lengths.max() == 8 and len(encoded) > 2
    assert (encoded.targets > 0).all(axis=1).any()


def spans_twin(first, last, longest):
    """The best (score, first, last) by trying all pairs, the shortest and then the earliest among equals."""
    pairs = [(i, j) for i, j in itertools.product(range(len(first)), repeat=2) if i <= j < i + longest]
    return max(((first[i] + last[j], i, j) for i, j in pairs), key=lambda span: (span[0], span[1] - span[2], -span[1]))


def test_best_spans_are_those_of_the_twin():
    for longest in (1, 3, 30):
        torch.manual_seed(longest)
        first, last = torch.randint(-4, 5, (2, 40, 12), dtype=torch.float64)  # whole numbers: some sums are equal
        first[:, :2] = last[:, :2] = -math.inf
        found = best_spans(first, last, longest).tolist()
        assert found == [list(spans_twin(a, b, longest)) for a, b in zip(first.tolist(), last.tolist(), strict=True)]


def test_the_loss_is_that_of_its_twin_and_knows_no_padding(tokenizer):
    """Σ over rows of (−log softmax at the first − log softmax at the last piece) / 2, in float64 over true lengths."""
    encoded = encode(tokenizer, [example("Ada wrote it.", "Ada"), example(CONTEXT)])
    torch.manual_seed(0)
    outputs = torch.randn(2, int(encoded.lengths.max()), 2, dtype=torch.float64)
    targets = torch.from_numpy(KIND.targets(encoded, np.array([0, 1])))
    twin = 0.0
    for row, (length, places) in enumerate(zip(encoded.lengths.tolist(), encoded.targets.tolist(), strict=True)):
        for side, place in enumerate(places):
            logits = outputs[row, :length, side].tolist()
            twin -= (logits[place] - math.log(sum(math.exp(value) for value in logits))) / 2
    assert encoded.lengths[0] < encoded.lengths[1]
    assert KIND.loss_sum(outputs, targets).item() == pytest.approx(twin, rel=1e-12)


def predict(encoded, outputs, task=TASK):
    outcomes = KIND.blank(encoded)
    rows, values = KIND.outcomes(outputs, encoded, np.arange(len(encoded)))
    outcomes[rows] = values
    return KIND.predictions(task, encoded, outcomes)


def test_the_answer_is_the_contexts_own_text_with_the_accent_of_its_last_letter(tokenizer):
    context = "It: CAFE\u0301  Love\u0300lace\u2028wrote"
    encoded = encode(tokenizer, [Example(("Who?", context), math.nan)])
    pieces = spelled(tokenizer, encoded, 0)
    outputs = torch.zeros(1, len(pieces), 2)
    outputs[0, pieces.index("caf"), 0] = outputs[0, pieces.index("##lace"), 1] = 5
    outputs[0, 1, 0] = outputs[0, len(pieces) - 1, 1] = 9  # neither the question nor [SEP] is an answer
    assert predict(encoded, outputs) == ["CAFE\u0301  Love\u0300lace"]


def test_the_best_window_answers_and_cls_competes_where_questions_may_have_no_answer(tokenizer):
    context = "Ada " + "it " * 20 + "Lovelace"
    encoded = encode(tokenizer, [example(context)], max_length=16)
    outputs = torch.zeros(len(encoded), 16, 2)
    place = spelled(tokenizer, encoded, 0).index("ada")
    end = spelled(tokenizer, encoded, len(encoded) - 1).index("##lace")
    outputs[0, place], outputs[-1, end - 1, 0], outputs[-1, end, 1] = 2.0, 2.0, 3.0
    assert predict(encoded, outputs) == ["Lovelace"]
    outputs[:, 0] = 3.0  # [CLS] of all windows: 6 against 5
    assert predict(encoded, outputs) == ["Lovelace"]
    assert predict(encoded, outputs, WITH_UNANSWERABLE) == [""]
    outputs[1, 0] = 2.0  # the lowest of all windows counts: 4 against 5
    assert predict(encoded, outputs, WITH_UNANSWERABLE) == ["Lovelace"]


def test_outputs_that_are_not_finite_give_no_prediction(tokenizer):
    encoded = encode(tokenizer, [example("Ada wrote it.", "Ada"), example(CONTEXT)])
    outputs = torch.zeros(2, int(encoded.lengths.max()), 2)
    outputs[0, int(encoded.lengths[0]) :] = math.nan  # padding
    outputs[1, 3, 1] = math.nan
    answers = predict(encoded, outputs)
    assert answers == ["Ada", None] and KIND.score("f1", encoded.answers, answers) is None
    encoded = encode(tokenizer, [example("Ada wrote it.", "Ada"), example("it " * 20 + "Ada", "Ada")], max_length=16)
    assert encoded.questions.tolist().count(1) > 2
    for row in (1, 2, len(encoded) - 1):
        outputs = torch.zeros(len(encoded), 16, 2)
        outputs[row, 3, 0] = math.nan
        assert predict(encoded, outputs) == ["Ada", None]
    encoded = encode(tokenizer, [Example(("Who?", "\u200b"), math.nan)])  # a context without a piece
    assert predict(encoded, torch.zeros(1, int(encoded.lengths[0]), 2)) == [""]


def test_texts_and_cells():
    texts = [KIND.text_of(value) for value in KIND.as_values(TASK, [("a\tb\n", "ü")])]
    assert texts == ['["a\\tb\\n", "ü"]'] and KIND.text_of(None) == "nan"
    told = [KIND.value_of(TASK, text) for text in ("nan", "null", '"x"')]  # earlier versions wrote null
    assert KIND.read(TASK, [["a"], [], ["b"]], told) == ([("a",), (), ("b",)], [None, None, "x"])
    for predicted, answers in ((3, []), ("x", 3), ("x", [3]), (["x"], [])):
        with pytest.raises(ValueError):
            KIND.read(TASK, [answers], [predicted])
    with pytest.raises(ValueError):
        KIND.value_of(TASK, "x")
    assert KIND.texts(CELLS, KIND.usual_columns) == ("Who?", CONTEXT)
    for answers in (CELLS["answers"], [{"text": "Ada", "answer_start": 4}]):
        assert KIND.label(answers, TASK) == Answers(("Ada",), (4,))
    assert KIND.label_names(CELLS["answers"]) == () and KIND.label_names([]) == (NO_ANSWER,)


def test_rows_that_are_no_questions():
    for wrong, expected in (
        ({"question": " "}, "question is empty, expected text"),
        ({"context": None}, "context is None, expected text"),
        ({"answers": "Ada"}, "label is 'Ada', expected {\"text\": "),
        ({"answers": {"text": ["Ada"]}}, 'expected {"text": '),
        ({"answers": {"text": ["Ada"], "answer_start": []}}, 'expected {"text": '),
        ({"answers": {"text": ["Ada"], "answer_start": ["4"]}}, 'expected {"text": '),
        ({"answers": {"text": ["Ada"], "answer_start": [5]}}, "answer 'Ada' is not at character 5 of the context"),
        ({"answers": {"text": [""], "answer_start": [4]}}, "answer '' is not at character 4 of the context"),
    ):
        row = CELLS | wrong
        with pytest.raises(ValueError, match=re.escape(expected)):
            texts = KIND.texts(row, KIND.usual_columns)
            KIND.label(row["answers"], TASK)
            KIND.check(texts, row["answers"])


SENTENCES = json.loads((Path(__file__).parents[3] / "golden" / "scripts.json").read_text(encoding="utf-8"))
"""Script → a sentence of it, or a few words."""
BERT = pre_tokenizers.BertPreTokenizer()
STRIPPED = normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])
RULES = {
    "lower": (normalizers.BertNormalizer(), BERT),
    "cased": (normalizers.BertNormalizer(lowercase=False, strip_accents=False), BERT),
    "nfc": (normalizers.NFC(), pre_tokenizers.Whitespace()),
    "nfkc": (normalizers.NFKC(), pre_tokenizers.Metaspace()),
    "stripped": (STRIPPED, pre_tokenizers.WhitespaceSplit()),
}
"""Kind of tokenizer → its normalizer and pre-tokenizer."""


def tokenizer_for(texts, folder, name, single):
    """A tokenizer whose pieces are the characters of the texts, or with `single` their words as far as it sees them."""
    normalizer, splitter = RULES[name]
    seen = [normalizer.normalize_str(text) for text in texts]
    parts = {word for text in seen for word, _ in splitter.pre_tokenize_str(text)}
    pieces = sorted({character for part in parts for character in part} | {"\u2581"})
    pieces = [*pieces, *(sorted(parts) if single else ())]
    pieces = dict.fromkeys([*SPECIAL, *pieces, *(f"##{piece}" for piece in pieces)])
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    backend = RustTokenizer(models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=1000))
    backend.normalizer, backend.pre_tokenizer = normalizer, splitter
    backend.save(str(folder / "tokenizer.json"))
    return build_tokenizer("HuggingFace", tokenizer_model=folder)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("single", [True, False], ids=["words", "characters"])
def test_the_gold_pieces_give_the_gold_text_in_every_script(tmp_path, name, single):
    wrong = {}
    texts = [unicodedata.normalize(form, text) for text in SENTENCES.values() for form in ("NFC", "NFD")]
    tokenizer = tokenizer_for(texts, tmp_path, name, single)
    for context in texts:
        begin = 0
        for gold in context.split(" "):
            rows = encode(tokenizer, [Example(("who", context), Answers((gold,), (begin,)))], 4000)
            first, last = rows.targets[0]
            (found,) = KIND.predictions(TASK, rows, np.array([[9.0, first, last, 0.0]]))
            if found != gold:
                wrong[gold] = found
            begin += len(gold) + 1
    assert wrong == {}


def test_an_answer_ends_where_the_pieces_or_the_characters_end():
    for context, spans, first, last, expected in (
        ("\U0001f469\u200d\U0001f4bb", [(0, 1), (2, 3)], 0, 0, "\U0001f469"),  # the pieces separate the cluster
        ("\U0001f469\u200d\U0001f4bb", [(0, 1), (2, 3)], 0, 1, "\U0001f469\u200d\U0001f4bb"),
        ("\u092e\u0948\u0902 a", [(0, 1), (1, 2)], 0, 0, "\u092e"),
        ("\u092e\u0948\u0902 a", [(0, 1), (1, 2), (4, 5)], 0, 1, "\u092e\u0948\u0902"),
        ("no \u0600\u0661\u0662", [(0, 2), (4, 6)], 1, 1, "\u0600\u0661\u0662"),
        ("\u05e9\u05dc\u200f a", [(0, 2), (4, 5)], 0, 0, "\u05e9\u05dc"),  # a mark of direction is no part of a letter
        ("cafe \u0301", [(0, 4)], 0, 0, "cafe"),
    ):
        assert text_of_pieces(context, np.array(spans), first, last) == expected
