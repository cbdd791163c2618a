"""Kinds that predict parts of a text: a label per word, and the answer to a question."""

from __future__ import annotations

import functools
import math
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from megatron_ddrp.conversion.model_code import PIECES, SPAN, HeadForm, Labels
from megatron_ddrp.data.batches.batch import IGNORED_LABEL
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer
from megatron_ddrp.encoders.rows import Encoded, RowWriter
from megatron_ddrp.tasks.finetune.kinds.contract import (
    UNDEFINED,
    ConllFile,
    Kind,
    SquadFile,
    context_windows,
    pieces_of_answer,
    pieces_of_words,
    text_of_pieces,
    windows_of,
)
from megatron_ddrp.tasks.finetune.kinds.sequences import class_number, label_name, text_in
from megatron_ddrp.tasks.finetune.metrics import (
    ANSWER_F1,
    EXACT_MATCH,
    SCHEMES,
    SEQEVAL,
    SEQEVAL_STRICT,
    STRICT,
    Metric,
    Terms,
    by_number,
    macro_f1,
    prefix_groups,
    right,
    rules,
    scheme_of,
    share,
)
from megatron_ddrp.tasks.finetune.table_files import Columns, Example, Task, flat_answers

if TYPE_CHECKING:
    from torch import Tensor


OVERLAP = 4
"""Divisor of a row's pieces that gives the overlap of neighbouring rows of one sentence."""
SHOWN_TAGS = 10
"""Largest number of tags in a warning."""


@dataclass(frozen=True)
class Tags:
    """Tags of all sentences. The length is the number of sentences."""

    classes: np.ndarray
    """Class number of each word, sentence after sentence, float64 `[words]`; nan if undefined."""
    ends: np.ndarray
    """End of each sentence in `classes`, exclusive, int64 `[sentences]`."""
    labels: tuple[str, ...]
    """Names of the classes."""

    def __len__(self) -> int:
        return len(self.ends)

    def by_sentence(self) -> Iterator[list[str | None]]:
        """Yield the names of the tags of each sentence; None for a word without a prediction, or without a label."""
        begin = 0
        for end in self.ends.tolist():
            classes = self.classes[begin:end].tolist()
            yield [None if math.isnan(number) else self.labels[int(number)] for number in classes]
            begin = end


def _of_words(gold: Tags, predicted: Tags, terms: Callable[[np.ndarray, np.ndarray], Terms]) -> Terms:
    """Return the terms of the words, summed per sentence."""

    def of_sentences(values: np.ndarray) -> np.ndarray:
        sums = np.concatenate([np.zeros_like(values[:1]), np.cumsum(values, axis=0)])
        return np.diff(sums[[0, *gold.ends]], axis=0)

    first, second = terms(gold.classes, predicted.classes)
    return of_sentences(first), of_sentences(second)


class Tokens(Kind):
    """Kind that predicts one of several labels for each word of a sentence, as in named-entity recognition.

    A word's first piece has its label, its other pieces have none (Devlin et al., arXiv:1810.04805, section 5.3). A
    sentence that is too long for a row becomes several overlapping rows (`windows_of`): no word is dropped.

    An example's texts are the words; its label is their class numbers.
    """

    name = "tokens"
    own_metrics: ClassVar[Mapping[str, Metric]] = {
        "seqeval": SEQEVAL,
        STRICT: SEQEVAL_STRICT,
        "accuracy": Metric(partial(_of_words, terms=right), share),
        "macro-f1": Metric(partial(_of_words, terms=by_number), macro_f1),
    }
    head: ClassVar[HeadForm] = PIECES
    usual_columns: ClassVar[Columns] = Columns("tokens", None, "tags")
    label_columns = ("ner_tags",)
    output_files = {".conll": ConllFile}

    def check_labels(self, task: Task, is_guessed: bool) -> None:
        """Raise ValueError for tags without the rules that the metric needs."""
        if task.metric.startswith("seqeval"):
            rules(task.labels, task.metric == STRICT)

    def scheme(self, task: Task) -> str:
        """Return the scheme of the tags under the strict metric."""
        return scheme_of(task.labels) if task.metric == STRICT else ""

    def remarks(self, task: Task, labels: Mapping[str, Sequence[Any]]) -> Iterator[str]:
        """Yield a warning for each file without any entity, or with tags that the strict rules count as O.

        Raises ValueError for validation tags of IOB1 or IOE1, whose prefixes are those of IOB2 or IOE2.
        """
        yield from self.undefined(task, labels)
        if not (name := self.scheme(task)):
            return
        other, alike = SCHEMES[name].alike
        for file, rows in labels.items():
            groups = prefix_groups([task.labels[int(number)] for number in row] for row in rows)
            broken = [prefixes for prefixes in groups if not re.fullmatch(SCHEMES[name].entities, prefixes)]
            if file == "valid" and groups and all(re.fullmatch(alike, prefixes) for prefixes in groups):
                raise ValueError(
                    f"its tags are of {other}, for which --metric {STRICT} is not defined; use --metric seqeval, or "
                    f"write them as {name}"
                )
            if broken:
                shown = " ".join(f"{prefix}-" for prefix in broken[0][:SHOWN_TAGS])
                yield (
                    f"{file}: WARNING, {len(broken):,} of {len(groups):,} groups of neighbouring tags of one type "
                    f"break the rules of {name}, such as {shown}; their tags outside whole entities count as O"
                )

    def texts(self, cells: Mapping[str, Any], columns: Columns) -> tuple[str, ...]:
        """Return the words."""
        if columns.pair is not None:
            raise ValueError(f"--text-pair-column {columns.pair}: words have no second text; leave the flag out")
        words = cells[columns.text]
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise ValueError(f"{columns.text} is {repr(words)[:80]}, expected a list of words")
        if not words or "" in words:
            raise ValueError(f"{columns.text} is empty or holds an empty word, expected a list of words")
        return tuple(words)

    def label_names(self, cell: Any) -> Sequence[str]:
        """Return the tags of the words."""
        if not isinstance(cell, list):
            raise ValueError(f"label is {repr(cell)[:80]}, expected a list with the tag of each word")
        return tuple(label_name(name) for name in cell)

    def label(self, cell: Any, task: Task) -> list[float]:
        """Return the class number of each word."""
        return [float(class_number(name, task)) for name in self.label_names(cell)]

    def check(self, texts: Sequence[str], cell: Any) -> None:
        """Raise ValueError for a row with different numbers of tags and words."""
        if len(texts) != len(cell):
            raise ValueError(f"{len(cell)} tags for {len(texts)} words, expected one for each")

    def answers(self, task: Task, labels: Sequence[Sequence[float]]) -> Tags:
        """Return the tags of the sentences."""
        classes = np.concatenate([np.asarray(row, dtype=np.float64) for row in labels])
        return Tags(classes, np.cumsum([len(row) for row in labels]), task.labels)

    def as_values(self, task: Task, predictions: Tags) -> Iterable[Any]:
        """Yield the tags of each sentence; None for a word without a prediction."""
        return predictions.by_sentence()

    def read(self, task: Task, labels: Sequence[Any], predictions: Sequence[Any]) -> tuple[Tags, Tags]:
        """Return (labels, predictions)."""
        numbers: dict[str | None, float] = {UNDEFINED: math.nan, None: math.nan}  # earlier versions wrote the first
        numbers |= {label: float(number) for number, label in enumerate(task.labels)}
        for names in (*labels, *predictions):
            if not isinstance(names, list) or not all(
                isinstance(name, str | None) and name in numbers for name in names
            ):
                raise ValueError(f"{names!r:.80} is no list of labels")
        answers, predicted = (
            self.answers(task, [[numbers[name] for name in names] for names in side]) for side in (labels, predictions)
        )
        if not np.array_equal(answers.ends, predicted.ends):
            raise ValueError("a row has different numbers of predictions and labels")
        return answers, predicted

    def constant(self, task: Task, answers: Tags, label: int) -> Tags:
        """Return the tag for every word."""
        return replace(answers, classes=np.full(len(answers.classes), float(label)))

    def encode(self, task: Task, examples: Iterable[Example], tokenizer: Tokenizer, max_length: int) -> Encoded:
        """Return rows of whole words. Targets are class numbers `[all pieces]`, 0 for an unknown label."""
        writer, targets = RowWriter(tokenizer.pad_id), array("i")
        classes, ends = array("d"), array("q")
        room = max_length - tokenizer.rows.num_specials(1)
        for example in examples:
            words = [own[:room] for own in pieces_of_words(tokenizer, example.texts)]
            labels = np.broadcast_to(np.asarray(example.label, dtype=np.float64), len(words))
            firsts = np.nan_to_num(labels).astype(np.int64).tolist()
            for window in windows_of([len(own) for own in words], room, room // OVERLAP):
                text, marks = [], []
                for number in range(window.begin, window.end):
                    is_labelled = window.own_begin <= number < window.own_end
                    text += words[number]
                    marks += [firsts[number] if is_labelled else IGNORED_LABEL]
                    marks += [IGNORED_LABEL] * (len(words[number]) - 1)
                row, segments, (begin,) = tokenizer.rows.row([text])
                writer.add(row, segments)
                after = len(row) - begin - len(text)
                targets.extend([*[IGNORED_LABEL] * begin, *marks, *[IGNORED_LABEL] * after])
            classes.extend(labels.tolist())
            ends.append(len(classes))
        gold = Tags(np.array(classes), np.array(ends), task.labels)
        return writer.rows(np.array(targets), gold)

    def targets(self, encoded: Encoded, rows: np.ndarray) -> np.ndarray:
        """Return class numbers `[batch, longest row]`, IGNORED_LABEL on pieces without a label and on padding."""
        lengths = encoded.lengths[rows]
        padded = np.full((len(rows), lengths.max()), IGNORED_LABEL, dtype=np.int64)
        padded[_is_piece(lengths)] = encoded.targets[encoded.places(rows)]
        return padded

    def size(self, encoded: Encoded, rows: np.ndarray) -> int:
        """Return the number of labelled words."""
        return int(np.count_nonzero(encoded.targets[encoded.places(rows)] != IGNORED_LABEL))

    def loss_sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the cross entropy, summed over the labelled words."""
        from torch.nn.functional import cross_entropy

        return cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=IGNORED_LABEL, reduction="sum")

    def outcomes(self, outputs: Tensor, encoded: Encoded, rows: np.ndarray) -> tuple[np.ndarray, Tensor]:
        """Return the most probable class of every piece of the rows; nan if an output of the piece is not finite."""
        import torch

        valid = torch.from_numpy(_is_piece(encoded.lengths[rows])).to(outputs.device)
        of_pieces = outputs[valid]  # [pieces of the rows, labels]
        is_finite = of_pieces.isfinite().all(dim=-1)
        return encoded.places(rows), of_pieces.argmax(dim=-1).float().masked_fill(~is_finite, math.nan)

    def predictions(self, task: Task, encoded: Encoded, outcomes: np.ndarray) -> Tags:
        """Return the outcomes of each word's first piece."""
        return Tags(outcomes[encoded.targets != IGNORED_LABEL], encoded.answers.ends, task.labels)

    def beside(self, task: Task) -> tuple[str, ...]:
        """Return the name of the words' accuracy, unless it is the task's metric."""
        return () if task.metric == "accuracy" else ("accuracy",)


def _is_piece(lengths: np.ndarray) -> np.ndarray:
    """Return `[batch, longest row]`, True on the pieces of each row and False on padding."""
    return np.arange(lengths.max()) < lengths[:, None]


NO_ANSWER = "no answer"
"""Only label of a task with unanswerable questions; other tasks have no labels."""
PASSAGE_OVERLAP = 128
"""Number of pieces that neighbouring rows of one context share, at most half of a row's room."""
LONGEST_ANSWER = 30
"""Largest number of pieces of a predicted answer."""
LONGEST_QUESTION = 64
"""Largest number of pieces of a question; a question also takes at most about half of a row."""


class Answers(NamedTuple):
    """Label of an example: its gold answers, empty for an unanswerable question."""

    texts: tuple[str, ...]
    begins: tuple[int, ...]
    """First character of each answer in the context. The model learns the first answer."""


@dataclass(frozen=True)
class Windows(Encoded):
    """Rows of a question and a window over its context. Targets are the answer's first and last piece in the row.

    Both targets are 0, [CLS], if the window does not contain the whole answer.
    """

    spans: np.ndarray = field(default_factory=lambda: np.empty((0, 2), np.int32))
    """First and end character of each piece in the context, `[all pieces, 2]`; −1 outside the context."""
    questions: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    """Number of the question in each row, `[rows]`."""
    contexts: tuple[str, ...] = ()
    """Context of each question."""


class QuestionAnswering(Kind):
    """Kind that predicts a span of the context, or that there is no answer, as in SQuAD.

    An example's texts are question and context, its label `Answers`. Each piece gets two logits: to be the first piece
    of the answer, and to be the last (Devlin et al., arXiv:1810.04805, section 4.2). Long contexts become several
    overlapping rows; the span with the highest sum of its two logits over all rows wins. In tasks with unanswerable
    questions [CLS] competes with the spans (section 4.3 of the same paper).
    """

    name = "qa"
    own_metrics: ClassVar[Mapping[str, Metric]] = {"f1": ANSWER_F1, "exact-match": EXACT_MATCH}
    head: ClassVar[HeadForm] = SPAN
    usual_columns: ClassVar[Columns] = Columns("question", "context", "answers")
    output_files = {".json": SquadFile}

    def hub_labels(self, task: Task) -> Labels:
        """Return no names: the two outputs are the first and the last piece."""
        return Labels((), None)

    def texts(self, cells: Mapping[str, Any], columns: Columns) -> tuple[str, ...]:
        """Return question and context."""
        if columns.pair is None:
            raise ValueError("a question without a context; name the column of the context by --text-pair-column")
        return text_in(cells, columns.text), text_in(cells, columns.pair)

    def label_names(self, cell: Any) -> Sequence[str]:
        """Return `NO_ANSWER` for a question without an answer, otherwise nothing."""
        return () if _answers(cell).texts else (NO_ANSWER,)

    def label(self, cell: Any, task: Task) -> Answers:
        """Return the answers."""
        return _answers(cell)

    def check(self, texts: Sequence[str], cell: Any) -> None:
        """Raise ValueError for an answer that is not at its character of the context."""
        for text, begin in zip(*_answers(cell), strict=True):
            if not text.strip() or begin < 0 or texts[1][begin : begin + len(text)] != text:
                raise ValueError(
                    f"answer {text[:60]!r} is not at character {begin} of the context, expected the answer's own words "
                    "and the number of characters before them"
                )

    def answers(self, task: Task, labels: Sequence[Answers]) -> list[tuple[str, ...]]:
        """Return the gold answers to each question."""
        return [label.texts for label in labels]

    def as_values(self, task: Task, predictions: list[Any]) -> Iterable[Any]:
        """Yield the answer to each question, or its gold answers."""
        return predictions

    def read(self, task: Task, labels: Sequence[Any], predictions: Sequence[Any]) -> tuple[Any, Any]:
        """Return (gold answers, predictions)."""
        for gold, predicted in zip(labels, predictions, strict=True):
            if not (predicted is None or isinstance(predicted, str)) or not _are_texts(gold):
                raise ValueError(f"{predicted!r:.80} or {gold!r:.80} is no answer")
        return [tuple(gold) for gold in labels], list(predictions)

    def encode(self, task: Task, examples: Iterable[Example], tokenizer: Tokenizer, max_length: int) -> Windows:
        """Return rows of pairs of the question and a window: `[CLS] question [SEP] window [SEP]` for BERT."""
        writer = RowWriter(tokenizer.pad_id)
        targets, questions = array("q"), array("q")
        spans: list[np.ndarray] = []
        gold: list[tuple[str, ...]] = []
        contexts: list[str] = []
        locate = functools.lru_cache(maxsize=1)(functools.partial(_locate, tokenizer))  # questions share contexts
        lost = 0
        for number, example in enumerate(examples):
            question, context = example.texts
            asked = tokenizer.encode(question)[: min(LONGEST_QUESTION, max_length // 2 - 2)]
            room = max_length - len(asked) - tokenizer.rows.num_specials(2)
            pieces, places = locate(context)
            answer = _first_answer(example.label, places)
            first_row = len(questions)
            for begin, end in context_windows(len(pieces), room, min(PASSAGE_OVERLAP, room // 2)):
                row, segments, (_, before) = tokenizer.rows.row([asked, pieces[begin:end]])
                writer.add(row, segments)
                target = [0, 0]
                if answer is not None and begin <= answer[0] and answer[1] < end:
                    target = [before - begin + piece for piece in answer]
                targets.extend(target)
                around = (before, len(row) - before - (end - begin))
                spans.append(np.pad(places[begin:end], (around, (0, 0)), constant_values=-1))
                questions.append(number)
            lost += answer is not None and not any(targets[2 * first_row :])
            gold.append(example.label.texts if isinstance(example.label, Answers) else ())
            contexts.append(context)
        rows = vars(writer.rows(np.array(targets).reshape(-1, 2), gold)) | {"warning": _warning(lost, max_length)}
        of_pieces = np.concatenate([np.empty((0, 2), np.int32), *spans])
        return Windows(**rows, spans=of_pieces, questions=np.array(questions), contexts=tuple(contexts))

    def targets(self, encoded: Encoded, rows: np.ndarray) -> np.ndarray:
        """Return first piece, last piece and length of the rows, `[batch, 3]`."""
        return np.concatenate([encoded.targets[rows], encoded.lengths[rows][:, None]], axis=1)

    def loss_sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean of the cross entropies of first and last piece, summed over rows."""
        import torch

        positions = torch.arange(outputs.shape[1], device=outputs.device)
        is_padding = positions >= targets[:, 2:]  # [batch, seq]
        logits = outputs.masked_fill(is_padding[..., None], -math.inf)  # [batch, seq, 2]
        return torch.nn.functional.cross_entropy(logits, targets[:, :2], reduction="sum") / 2

    def blank(self, encoded: Encoded) -> np.ndarray:
        """Return zeros, `[rows, 4]`."""
        return np.zeros((len(encoded), 4))

    def outcomes(self, outputs: Tensor, encoded: Encoded, rows: np.ndarray) -> tuple[np.ndarray, Tensor]:
        """Return four values per row: score, first piece and last piece of its best span, and the score of [CLS].

        All four are nan if an output of the row is not finite. The score is −inf for a row without context.
        """
        import torch

        assert isinstance(encoded, Windows)
        lengths = encoded.lengths[rows]
        valid = np.arange(outputs.shape[1]) < lengths[:, None]  # [batch, seq]
        is_context = np.zeros_like(valid)
        is_context[valid] = encoded.spans[encoded.places(rows), 0] >= 0
        outside = ~torch.from_numpy(is_context).to(outputs.device)
        first, last = outputs.masked_fill(outside[..., None], -math.inf).unbind(dim=-1)  # [batch, seq] each
        best = best_spans(first, last, LONGEST_ANSWER)  # [batch, 3]
        found = torch.cat([best, outputs[:, 0].sum(dim=-1, keepdim=True)], dim=-1)
        padding = ~torch.from_numpy(valid).to(outputs.device)
        is_finite = outputs.masked_fill(padding[..., None], 0).isfinite().flatten(1).all(dim=1)
        return rows, torch.where(is_finite[:, None], found, math.nan)

    def predictions(self, task: Task, encoded: Encoded, outcomes: np.ndarray) -> list[str | None]:
        """Return the answer to each question: "" for no answer, None if a row of the question has no prediction."""
        assert isinstance(encoded, Windows)
        begins = encoded.ends - encoded.lengths
        by_question: list[list[int]] = [[] for _ in encoded.contexts]
        for row, question in enumerate(encoded.questions.tolist()):
            by_question[question].append(row)
        answers: list[str | None] = []
        for context, rows in zip(encoded.contexts, by_question, strict=True):
            of_rows = outcomes[rows]  # [rows of the question, 4]
            if np.isnan(of_rows).any():
                answers.append(None)
                continue
            best = int(of_rows[:, 0].argmax())
            score, first, last, _ = of_rows[best]
            is_none = score == -math.inf or (NO_ANSWER in task.labels and of_rows[:, 3].min() > score)
            place, length = begins[rows[best]], encoded.lengths[rows[best]]
            answers.append(
                "" if is_none else text_of_pieces(context, encoded.spans[place : place + length], int(first), int(last))
            )
        return answers

    def beside(self, task: Task) -> tuple[str, ...]:
        """Return the other metric of F1 and exact match."""
        return tuple(name for name in self.metrics if name != task.metric)


def best_spans(first: Tensor, last: Tensor, longest: int) -> Tensor:
    """Return score, first piece and last piece of each row's best span, float `[batch, 3]`; equal scores: the shortest.

    `first` and `last` are logits `[batch, seq]`, −inf at pieces where no answer may begin or end. The search covers all
    spans of at most `longest` pieces.
    """
    import torch

    seq = first.shape[1]
    best = first.new_zeros(len(first), 3)
    best[:, 0] = -math.inf
    for more in range(min(longest, seq)):  # number of pieces after the first
        scores, begins = (first[:, : seq - more] + last[:, more:]).max(dim=1)  # [batch] each
        found = torch.stack([scores, begins.to(scores.dtype), begins.to(scores.dtype) + more], dim=1)
        best = torch.where((scores > best[:, 0])[:, None], found, best)
    return best


def _warning(lost: int, max_length: int) -> str:
    if not lost:
        return ""
    return (
        f"no row of {max_length} pieces holds the whole answer to {lost:,} of the questions; the model learns that "
        "they have no answer; use a larger --max-seq-length"
    )


def _locate(tokenizer: Tokenizer, context: str) -> tuple[list[int], np.ndarray]:
    """Return the pieces of a context and their characters, int32 `[pieces, 2]`."""
    pieces, spans = tokenizer.encode_with_spans(context)
    return pieces, np.array(spans, dtype=np.int32).reshape(-1, 2)


def _first_answer(label: object, places: np.ndarray) -> tuple[int, int] | None:
    if not isinstance(label, Answers) or not label.texts:
        return None
    return pieces_of_answer(places, label.begins[0], label.begins[0] + len(label.texts[0]))


def _answers(cell: Any) -> Answers:
    """Return the answers of a cell in SQuAD's layout or in the layout of Hugging Face's datasets."""
    try:
        if isinstance(cell, str):
            raise TypeError
        flat = flat_answers(cell)
        answers = Answers(tuple(flat["text"]), tuple(flat["answer_start"]))
        if len(answers.texts) != len(answers.begins) or not _are_texts([*answers.texts]):
            raise TypeError
        if not all(isinstance(begin, int) for begin in answers.begins):
            raise TypeError
    except (KeyError, TypeError):
        raise ValueError(
            f'label is {repr(cell)[:80]}, expected {{"text": ["…"], "answer_start": [0]}}, or empty lists for a '
            "question without an answer"
        ) from None
    return answers


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)
