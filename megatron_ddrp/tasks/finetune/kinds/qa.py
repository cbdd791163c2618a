"""Question answering as in SQuAD: the answer is a part of a context, or there is none.

Each piece gets two logits: to be the first piece of the answer, and to be the last (Devlin et al., arXiv:1810.04805,
section 4.2). Long contexts become several overlapping rows; the span with the highest sum of its two logits over all
rows wins. In tasks with unanswerable questions [CLS] competes with the spans (section 4.3 of the same paper).
"""

from __future__ import annotations

import functools
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from megatron_ddrp.conversion.task_heads import SPAN, HeadForm, Labels
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer
from megatron_ddrp.encoders.rows import Encoded, RowWriter
from megatron_ddrp.tasks.finetune.kinds.contract import Kind
from megatron_ddrp.tasks.finetune.kinds.sequences import text_in
from megatron_ddrp.tasks.finetune.layouts import flat_answers
from megatron_ddrp.tasks.finetune.metrics import ANSWER_F1, EXACT_MATCH, Metric
from megatron_ddrp.tasks.finetune.output_files import SquadFile
from megatron_ddrp.tasks.finetune.task import Columns, Example, Task
from megatron_ddrp.tasks.finetune.windows import context_windows, pieces_of_answer, text_of_pieces

if TYPE_CHECKING:
    from torch import Tensor

NO_ANSWER = "no answer"
"""Only label of a task with unanswerable questions; other tasks have no labels."""
OVERLAP = 128
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
    """Kind that predicts a span of the context. An example's texts are question and context, its label `Answers`."""

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
            for begin, end in context_windows(len(pieces), room, min(OVERLAP, room // 2)):
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
