"""Kind that predicts a class for a text or a pair of texts, and the base class of the kinds that read such rows.

Pairs are `[CLS] a [SEP] b [SEP]` with segments 0 and 1. A row that is too long loses pieces from the end of its longer
text.
"""

from __future__ import annotations

import json
import math
import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from megatron_ddrp.conversion.task_heads import SEQUENCE, HeadForm
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer
from megatron_ddrp.encoders.rows import Encoded, RowWriter, chunks, cut_warning, text_row, whole_length
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError
from megatron_ddrp.tasks.finetune.kinds.contract import Kind, Line
from megatron_ddrp.tasks.finetune.metrics import ACCURACY, F1, MACRO_F1, MATTHEWS, Metric
from megatron_ddrp.tasks.finetune.task import Columns, Example, Task

if TYPE_CHECKING:
    from torch import Tensor

_TOGETHER = 1000
"""Number of rows per call of the tokenizer."""


class SequenceKind(Kind):
    """Base class of the three kinds. A subclass interprets the outputs of a row."""

    head: ClassVar[HeadForm] = SEQUENCE
    usual_columns: ClassVar[Columns] = Columns("text", None, "label")
    text_columns = ("sentence", "sentence1", "premise", "question")
    label_columns = ("labels", "score", "target")
    pair_columns = {"sentence1": "sentence2", "premise": "hypothesis", "text": "text_pair", "question": "context"}

    def texts(self, cells: Mapping[str, Any], columns: Columns) -> tuple[str, ...]:
        """Return one text or a pair."""
        names = (columns.text, columns.pair) if columns.pair else (columns.text,)
        return tuple(text_in(cells, name) for name in names)

    def num_outputs(self, task: Task) -> int:
        """Return the number of labels; 1 for a regression."""
        return max(1, len(task.labels))

    def encode(
        self, task: Task, examples: Iterable[Example], tokenizer: Tokenizer, max_length: int, pair_separators: int = 1
    ) -> Encoded:
        """Return the rows of the examples."""
        writer = RowWriter(tokenizer.pad_id)
        labels: list[Any] = []
        cut = 0
        for some in chunks(examples, _TOGETHER):
            texts = zip(*(example.texts for example in some), strict=True)
            for row in zip(*(tokenizer.encode_batch(side) for side in texts), strict=True):
                writer.add(*text_row(row, tokenizer, max_length, pair_separators))
                cut += whole_length(row, pair_separators) > max_length
            labels += [example.label for example in some]
        rows = writer.rows(self.as_targets(np.array(labels, dtype=np.float64)))
        return replace(rows, warning=cut_warning(cut, len(rows), max_length), cut=cut)

    def as_targets(self, labels: np.ndarray) -> np.ndarray:
        """Convert float64 labels, `[rows, …]`, to the form that the loss takes."""
        return labels

    def blank(self, encoded: Encoded) -> np.ndarray:
        """Return zeros in the shape of the targets."""
        return np.zeros(encoded.targets.shape)

    def outcomes(self, outputs: Tensor, encoded: Encoded, rows: np.ndarray) -> tuple[np.ndarray, Tensor]:
        """Return the predictions of the rows; nan if an output of the row is not finite."""
        predicted = self.predict(outputs)
        is_finite = outputs.isfinite().all(dim=-1).view(-1, *[1] * (predicted.ndim - 1))
        return rows, predicted.masked_fill(~is_finite, math.nan)

    @abstractmethod
    def predict(self, outputs: Tensor) -> Tensor:
        """Return the predictions, float `[batch, …]`, for outputs `[batch, num_outputs]`."""

    def predictions(self, task: Task, encoded: Encoded, outcomes: np.ndarray) -> np.ndarray:
        """Return the outcomes."""
        return outcomes

    def lines(self, task: Task, answers: np.ndarray, predictions: np.ndarray) -> Iterable[Line]:
        """Yield one line per row."""
        for index, (prediction, answer) in enumerate(zip(predictions, answers, strict=True)):
            yield str(index), self.text_of(task, prediction), self.text_of(task, answer)

    def read_lines(self, task: Task, lines: Sequence[Line]) -> tuple[np.ndarray, np.ndarray]:
        """Return (labels, predictions), each `[rows, …]`."""
        found = []
        for number, (index, prediction, label) in enumerate(lines):
            if index != str(number):
                raise ValueError(f"row {index} is at the place of row {number}")
            found.append((self.value(task, label), self.value(task, prediction)))
        answers, predictions = zip(*found, strict=True)
        return np.array(answers, dtype=np.float64), np.array(predictions, dtype=np.float64)

    def as_values(self, task: Task, predictions: np.ndarray) -> Iterable[Any]:
        """Yield the prediction of each row."""
        for value in predictions:
            yield self.as_json(task, value) if np.isfinite(value).all() else None

    def as_json(self, task: Task, value: Any) -> Any:
        """Return a finite prediction as a JSON value."""
        return self.text_of(task, value)

    @abstractmethod
    def text_of(self, task: Task, value: Any) -> str:
        """Return one label or prediction as text."""

    @abstractmethod
    def value(self, task: Task, text: str) -> Any:
        """Return the label or prediction that `text_of` wrote as `text`. Raises ValueError for any other text."""


class Classification(SequenceKind):
    """Kind that predicts one of several labels."""

    name = "classification"
    own_metrics: ClassVar[Mapping[str, Metric]] = {
        "accuracy": ACCURACY,
        "f1": F1,
        "macro-f1": MACRO_F1,
        "matthews": MATTHEWS,
    }
    problem_type = "single_label_classification"

    def is_likely(self, columns: Sequence[str], cells: Callable[[], Sequence[Any]]) -> bool:
        """Return True: any other file is a classification."""
        return True

    def check_metric(self, name: str, labels: Sequence[str] = ()) -> None:
        """Raise `UserError` for an unknown metric, and for F1 of another number of labels than two."""
        super().check_metric(name, labels)
        if name == "f1" and len(labels) not in (0, 2):
            raise UserError(f"--metric f1: {len(labels)} labels, expected 2; use --metric macro-f1", WRONG_ARGUMENTS)

    def check_labels(self, task: Task, is_guessed: bool) -> None:
        """Raise ValueError for a single label, and for labels that may be numbers of a regression."""
        first = task.labels[0]
        if len(task.labels) < 2:
            raise ValueError(f"all rows have the label {first!r}, expected two labels or more")
        if is_guessed and all(re.fullmatch(r"-?\d+,\d+", name) for name in task.labels):
            raise ValueError(
                f"labels look like numbers with a decimal comma, such as {first}; write {first.replace(',', '.')}, or "
                "name the kind by --kind classification"
            )

    def score_name(self, task: Task) -> str:
        """Return the metric with its positive label if it is F1 of two classes: "f1 of 'yes'"."""
        return f"f1 of {task.labels[1]!r}" if task.metric == "f1" and len(task.labels) == 2 else task.metric

    def label_names(self, cell: Any) -> Sequence[str]:
        """Return the label."""
        return (label_name(cell),)

    def label(self, cell: Any, task: Task) -> float:
        """Return the class number."""
        return float(class_number(label_name(cell), task))

    def baseline(self, task: Task, counts: Mapping[str, int], labels: Sequence[float]) -> float | None:
        """Return the score of predicting the most frequent class for every row."""
        answers = np.array(labels)
        return self.score(task.metric, answers, np.full(len(answers), float(task.most_frequent(counts)))) or 0.0

    def constant_guess(self, task: Task, answers: np.ndarray) -> float | None:
        """Return the score of predicting the most frequent class of the answers for every row."""
        counts = {label: int((answers == number).sum()) for number, label in enumerate(task.labels)}
        return self.baseline(task, counts, answers.tolist())

    def as_targets(self, labels: np.ndarray) -> np.ndarray:
        """Return class numbers, int64 `[rows]`; labels with a nan (rows without labels) stay unchanged."""
        return labels if np.isnan(labels).any() else labels.astype(np.int64)

    def loss_sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the cross entropy, summed over rows."""
        from torch.nn.functional import cross_entropy

        return cross_entropy(outputs, targets, reduction="sum")

    def predict(self, outputs: Tensor) -> Tensor:
        """Return the number of the most probable class, `[batch]`."""
        return outputs.argmax(dim=-1).float()

    def text_of(self, task: Task, value: float) -> str:
        """Return the label."""
        return task.labels[int(value)] if math.isfinite(value) else "nan"

    def value(self, task: Task, text: str) -> float:
        """Return the class number."""
        return float(task.labels.index(text)) if text in task.labels else _nan(text)


def text_in(cells: Mapping[str, Any], column: str) -> str:
    """Return the text in a column. Raises ValueError for another type and for blank text."""
    text = cells[column]
    if not isinstance(text, str):
        raise ValueError(f"{column} is {repr(text)[:80]}, expected text")
    if not text.strip():
        raise ValueError(f"{column} is empty, expected text; fill it in or remove the row")
    return text


def label_name(cell: Any) -> str:
    """Return the name of a label: text unchanged, a whole number or a truth value as in JSON.

    Raises ValueError for anything else.
    """
    if isinstance(cell, str) and cell.strip() and not set(cell) & set("\t\n\r"):
        return cell
    if isinstance(cell, int):
        return json.dumps(cell)
    raise ValueError(f"label is {cell!r}, expected a name without tabs and line breaks, or a whole number")


def class_number(name: str, task: Task) -> int:
    """Return the class number of a label. Raises ValueError if the task does not have the label."""
    if name not in task.labels:
        known = ", ".join(task.labels[:20]) + (", …" if len(task.labels) > 20 else "")
        raise ValueError(f"label {name!r} is in no row of the training file; it has {known}")
    return task.labels.index(name)


def _nan(text: str) -> float:
    if text != "nan":
        raise ValueError(f"{text!r} is none of the task's labels")
    return math.nan
