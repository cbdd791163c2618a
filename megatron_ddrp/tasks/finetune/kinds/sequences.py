"""Kinds that predict a class, several classes or a number for a text or a pair of texts.

Pairs are `[CLS] a [SEP] b [SEP]` with segments 0 and 1. A row that is too long loses pieces from the end of its longer
text.
"""

from __future__ import annotations

import json
import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer
from megatron_ddrp.encoders.rows import Encoded, RowWriter, chunks, text_row, told_cut, whole_length
from megatron_ddrp.foreign import parse_json
from megatron_ddrp.tasks.finetune.kinds.contract import Kind, Line
from megatron_ddrp.tasks.finetune.metrics import METRICS, Metric
from megatron_ddrp.tasks.finetune.task import Columns, Example, Task

_TOGETHER = 1000
"""Number of rows per call of the tokenizer."""


class SequenceKind(Kind):
    """Base class of the three kinds. A subclass interprets the outputs of a row."""

    head: ClassVar[str] = "sequence"
    usual_columns: ClassVar[Columns] = Columns("text", None, "label")

    def texts(self, cells: Mapping[str, Any], columns: Columns) -> tuple[str, ...]:
        """Return one text or a pair."""
        names = (columns.text, columns.pair) if columns.pair else (columns.text,)
        return tuple(text_of(cells, name) for name in names)

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
        return replace(rows, warning=told_cut(cut, len(rows), max_length), cut=cut)

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
        return rows, torch.where(is_finite, predicted, math.nan)

    @abstractmethod
    def predict(self, outputs: Tensor) -> Tensor:
        """Return the predictions, float `[batch, …]`, for outputs `[batch, num_outputs]`."""

    def predictions(self, task: Task, encoded: Encoded, outcomes: np.ndarray) -> np.ndarray:
        """Return the outcomes."""
        return outcomes

    def lines(self, task: Task, answers: np.ndarray, predictions: np.ndarray) -> Iterable[Line]:
        """Yield one line per row."""
        for index, (prediction, answer) in enumerate(zip(predictions, answers, strict=True)):
            yield str(index), self.spelled(task, prediction), self.spelled(task, answer)

    def read_lines(self, task: Task, lines: Sequence[Line]) -> tuple[np.ndarray, np.ndarray]:
        """Return (labels, predictions), each `[rows, …]`."""
        found = []
        for number, (index, prediction, label) in enumerate(lines):
            if index != str(number):
                raise ValueError(f"row {index} is at the place of row {number}")
            found.append((self.value(task, label), self.value(task, prediction)))
        answers, predictions = zip(*found, strict=True)
        return np.array(answers, dtype=np.float64), np.array(predictions, dtype=np.float64)

    def told(self, task: Task, predictions: np.ndarray) -> Iterable[Any]:
        """Yield the prediction of each row."""
        for value in predictions:
            yield self.as_json(task, value) if np.isfinite(value).all() else None

    def as_json(self, task: Task, value: Any) -> Any:
        """Return a finite prediction as a JSON value."""
        return self.spelled(task, value)

    @abstractmethod
    def spelled(self, task: Task, value: Any) -> str:
        """Return one label or prediction as text."""

    @abstractmethod
    def value(self, task: Task, text: str) -> Any:
        """Return the label or prediction that `spelled` wrote as `text`. Raises ValueError for any other text."""


class Classification(SequenceKind):
    """Kind that predicts one of several labels."""

    metrics: ClassVar[Mapping[str, Metric]] = METRICS["classification"]

    def label_names(self, cell: Any) -> Sequence[str]:
        """Return the label."""
        return (written(cell),)

    def label(self, cell: Any, task: Task) -> float:
        """Return the class number."""
        return float(number_of(written(cell), task))

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
        return nn.functional.cross_entropy(outputs, targets, reduction="sum")

    def predict(self, outputs: Tensor) -> Tensor:
        """Return the number of the most probable class, `[batch]`."""
        return outputs.argmax(dim=-1).float()

    def spelled(self, task: Task, value: float) -> str:
        """Return the label."""
        return task.labels[int(value)] if math.isfinite(value) else "nan"

    def value(self, task: Task, text: str) -> float:
        """Return the class number."""
        return float(task.labels.index(text)) if text in task.labels else _nan(text)


class MultiLabel(SequenceKind):
    """Kind that predicts any number of labels, or none. A cell holds a list, or text with `|` between the labels."""

    metrics: ClassVar[Mapping[str, Metric]] = METRICS["multi-label"]
    usual_columns: ClassVar[Columns] = Columns("text", None, "labels")

    def label_names(self, cell: Any) -> Sequence[str]:
        """Return the labels, each once."""
        if isinstance(cell, str):
            if cell.startswith("["):
                raise ValueError(f"label is {cell[:80]!r}, expected labels with | between them, such as A|B")
            return tuple(dict.fromkeys(name.strip() for name in cell.split("|") if name.strip()))
        if not isinstance(cell, list):
            raise ValueError(f"label is {cell!r}, expected a list of labels")
        return tuple(dict.fromkeys(written(name) for name in cell))

    def label(self, cell: Any, task: Task) -> list[float]:
        """Return 1 for each label of the row and 0 for the others."""
        numbers = {number_of(name, task) for name in self.label_names(cell)}
        return [float(number in numbers) for number in range(len(task.labels))]

    def baseline(self, task: Task, counts: Mapping[str, int], labels: Sequence[list[float]]) -> float | None:
        """Return the score of predicting only the most frequent label for every row."""
        answers = np.array(labels)
        predictions = np.zeros_like(answers)
        predictions[:, task.most_frequent(counts)] = 1
        return self.score(task.metric, answers, predictions) or 0.0

    def unlabelled(self, task: Task, texts: tuple[str, ...]) -> list[float]:
        """Return nan for each label."""
        return [math.nan] * len(task.labels)

    def as_json(self, task: Task, value: np.ndarray) -> list[str]:
        """Return the labels."""
        return [label for label, chosen in zip(task.labels, value, strict=True) if chosen]

    def loss_sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean binary cross entropy over labels, summed over rows."""
        losses = nn.functional.binary_cross_entropy_with_logits(outputs, targets.to(outputs.dtype), reduction="none")
        return losses.mean(dim=-1).sum()

    def predict(self, outputs: Tensor) -> Tensor:
        """Return 1 for each label with a probability above 0.5, otherwise 0, `[batch, labels]`."""
        return (outputs > 0).float()

    def spelled(self, task: Task, value: np.ndarray) -> str:
        """Return the labels as a JSON list."""
        if not np.isfinite(value).all():
            return "nan"
        return json.dumps(self.as_json(task, value), ensure_ascii=False)

    def value(self, task: Task, text: str) -> list[float]:
        """Return 1 or 0 for each label."""
        if text == "nan":
            return [math.nan] * len(task.labels)
        chosen = parse_json(text)
        if not isinstance(chosen, list) or not set(chosen) <= set(task.labels):
            raise ValueError(f"{text!r} is no list of labels")
        return [float(label in chosen) for label in task.labels]


class Regression(SequenceKind):
    """Kind that predicts a number."""

    metrics: ClassVar[Mapping[str, Metric]] = METRICS["regression"]
    predicts_numbers: ClassVar[bool] = True

    def label_names(self, cell: Any) -> Sequence[str]:
        """Return nothing, because numbers have no names. Raises ValueError for a cell without a number."""
        self._number(cell)
        return ()

    def label(self, cell: Any, task: Task) -> float:
        """Return the number."""
        return self._number(cell)

    def _number(self, cell: Any) -> float:
        try:
            number = math.nan if isinstance(cell, bool) else float(cell)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(f"label is {cell!r}, expected a number such as 1.5, with a decimal point")
        return number

    def loss_sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the squared error, summed over rows."""
        return nn.functional.mse_loss(outputs[:, 0], targets.float(), reduction="sum")

    def as_json(self, task: Task, value: float) -> float:
        """Return the number."""
        return float(value)

    def predict(self, outputs: Tensor) -> Tensor:
        """Return the predicted numbers, `[batch]`."""
        return outputs[:, 0]

    def spelled(self, task: Task, value: float) -> str:
        """Return the number with all its digits."""
        return repr(float(value))

    def value(self, task: Task, text: str) -> float:
        """Return the number."""
        return float(text)


def text_of(cells: Mapping[str, Any], column: str) -> str:
    """Return the text in a column. Raises ValueError for another type and for blank text."""
    text = cells[column]
    if not isinstance(text, str):
        raise ValueError(f"{column} is {repr(text)[:80]}, expected text")
    if not text.strip():
        raise ValueError(f"{column} is empty, expected text; fill it in or remove the row")
    return text


def written(cell: Any) -> str:
    """Return the name of a label: text unchanged, a whole number or a truth value as in JSON.

    Raises ValueError for anything else.
    """
    if isinstance(cell, str) and cell.strip() and not set(cell) & set("\t\n\r"):
        return cell
    if isinstance(cell, int):
        return json.dumps(cell)
    raise ValueError(f"label is {cell!r}, expected a name without tabs and line breaks, or a whole number")


def number_of(name: str, task: Task) -> int:
    """Return the class number of a label. Raises ValueError if the task does not have the label."""
    if name not in task.labels:
        known = ", ".join(task.labels[:20]) + (", …" if len(task.labels) > 20 else "")
        raise ValueError(f"label {name!r} is in no row of the training file; it has {known}")
    return task.labels.index(name)


def _nan(text: str) -> float:
    if text != "nan":
        raise ValueError(f"{text!r} is none of the task's labels")
    return math.nan
