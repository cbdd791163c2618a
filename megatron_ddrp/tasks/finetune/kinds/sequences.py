"""Kinds that predict one class, or several, for a text or a pair of texts."""

from __future__ import annotations

import json
import math
import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from megatron_ddrp.conversion.model_code import SEQUENCE, HeadForm
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer
from megatron_ddrp.encoders.rows import Encoded, RowWriter, chunks, cut_warning, text_row, whole_length
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError
from megatron_ddrp.tasks.finetune.kinds.contract import UNDEFINED, Kind
from megatron_ddrp.tasks.finetune.metrics import ACCURACY, F1, MACRO_F1, MATTHEWS, Metric
from megatron_ddrp.tasks.finetune.table_files import Columns, Example, Task

if TYPE_CHECKING:
    from torch import Tensor


_TOGETHER = 1000
"""Number of rows per call of the tokenizer."""


class SequenceKind(Kind):
    """Base class of the three kinds. A subclass interprets the outputs of a row.

    Pairs are `[CLS] a [SEP] b [SEP]` with segments 0 and 1. A row that is too long loses pieces from the end of its
    longer text.
    """

    head: ClassVar[HeadForm] = SEQUENCE
    usual_columns: ClassVar[Columns] = Columns("text", None, "label")
    text_columns = ("sentence1", "premise", "question", "sentence")
    label_columns = ("labels", "score", "target")
    pair_columns = {
        "sentence1": ("sentence2",),
        "premise": ("hypothesis",),
        "text": ("text_pair",),
        "question": ("sentence", "context"),
    }

    def texts(self, cells: Mapping[str, Any], columns: Columns) -> tuple[str, ...]:
        """Return one text or a pair."""
        names = (columns.text, columns.pair) if columns.pair else (columns.text,)
        return tuple(text_in(cells, name) for name in names)

    def remarks(self, task: Task, labels: Mapping[str, Sequence[Any]]) -> Iterator[str]:
        """Yield a warning for each file whose labels leave the metric undefined."""
        return self.undefined(task, labels)

    def encode(self, task: Task, examples: Iterable[Example], tokenizer: Tokenizer, max_length: int) -> Encoded:
        """Return the rows of the examples."""
        writer = RowWriter(tokenizer.pad_id)
        labels: list[Any] = []
        cut = 0
        for some in chunks(examples, _TOGETHER):
            texts = zip(*(example.texts for example in some), strict=True)
            for row in zip(*(tokenizer.encode_batch(side) for side in texts), strict=True):
                writer.add(*text_row(row, tokenizer.rows, max_length)[:2])
                cut += whole_length(row, tokenizer.rows) > max_length
            labels += [example.label for example in some]
        rows = writer.rows(self.answers(task, labels))
        return replace(rows, warning=cut_warning(cut, len(rows), max_length), cut=cut)

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

    def answers(self, task: Task, labels: Sequence[Any]) -> np.ndarray:
        """Return the labels, float64 `[rows, …]`."""
        return np.array(labels, dtype=np.float64)

    def as_values(self, task: Task, predictions: np.ndarray) -> Iterable[Any]:
        """Yield the prediction of each row."""
        for value in predictions:
            yield self.as_json(task, value) if np.isfinite(value).all() else None

    @abstractmethod
    def as_json(self, task: Task, value: Any) -> Any:
        """Return a finite prediction as the JSON value that `label` takes."""

    def read(self, task: Task, labels: Sequence[Any], predictions: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
        """Return (labels, predictions), each `[rows, …]`; nan for None."""

        def side(values: Sequence[Any]) -> np.ndarray:
            return self.answers(task, [self.unlabelled(task) if v is None else self.label(v, task) for v in values])

        return side(labels), side(predictions)


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
        if len(task.labels) < 2:
            raise ValueError(f"all rows have the label {task.labels[0]!r}, expected two labels or more")
        if not is_guessed or not all(re.fullmatch(r"[+-]?\d+([.,]\d+)?", name) for name in task.labels):
            return
        for name in task.labels:
            if "," in name:
                raise ValueError(
                    f"labels look like numbers with a decimal comma, such as {name}; write {name.replace(',', '.')}, "
                    "or name the kind by --kind classification"
                )
            if "." in name:  # only in rows behind those that the guess has seen
                raise ValueError(
                    f"labels look like whole numbers in the first rows and like {name} in later ones; name the kind by "
                    "--kind regression or --kind classification"
                )

    def remarks(self, task: Task, labels: Mapping[str, Sequence[Any]]) -> Iterator[str]:
        """Yield warnings, also of a label -1 beside 0, 1, 2, …; the three labels from -1 to 1 may be a scale."""
        yield from super().remarks(task, labels)
        if len(task.labels) > 2 and task.labels == tuple(map(str, range(-1, len(task.labels) - 1))):
            condition = "unless the labels are a scale, " * (len(task.labels) == 3)
            yield (
                "WARNING, label -1 is how Hugging Face's datasets mark rows without a label; it is a class here: "
                f"{condition}remove these rows"
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

    def constant(self, task: Task, answers: np.ndarray, label: int) -> np.ndarray:
        """Return the class for every row."""
        return np.full(len(answers), float(label))

    def constant_guess(self, task: Task, answers: np.ndarray) -> float | None:
        """Return the score of predicting the most frequent class of the answers for every row."""
        counts = {label: int((answers == number).sum()) for number, label in enumerate(task.labels)}
        return self.baseline(task, counts, answers)

    def loss_sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the cross entropy, summed over rows."""
        from torch.nn.functional import cross_entropy

        return cross_entropy(outputs, targets.long(), reduction="sum")

    def predict(self, outputs: Tensor) -> Tensor:
        """Return the number of the most probable class, `[batch]`."""
        return outputs.argmax(dim=-1).float()

    def as_json(self, task: Task, value: float) -> str:
        """Return the label."""
        return task.labels[int(value)]

    def text_of(self, value: str | None) -> str:
        """Return the label itself."""
        return value or UNDEFINED

    def value_of(self, task: Task, text: str) -> str | None:
        """Return the label."""
        return None if text == UNDEFINED and text not in task.labels else text


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
        numbers = "; for numbers give --kind regression" * all(label.lstrip("-").isdigit() for label in task.labels)
        raise ValueError(f"label {name!r} is in no row of the training file; it has {known}{numbers}")
    return task.labels.index(name)


_OF_VECTORS = {label_name(number) for number in (0, 1, False, True)}


class MultiLabel(SequenceKind):
    """Kind that predicts any number of labels, or none. A cell holds a list, or text with `|` between the labels."""

    name = "multi-label"
    own_metrics: ClassVar[Mapping[str, Metric]] = {"f1": F1, "macro-f1": MACRO_F1, "accuracy": ACCURACY}
    problem_type = "multi_label_classification"
    usual_columns: ClassVar[Columns] = Columns("text", None, "labels")

    def is_likely(self, columns: Sequence[str], cells: Callable[[], Sequence[Any]]) -> bool:
        """Return whether every label is a list."""
        return bool(cells()) and all(isinstance(cell, list) for cell in cells())

    def check_labels(self, task: Task, is_guessed: bool) -> None:
        """Raise ValueError without any label."""
        if not task.labels:
            raise ValueError("no row has a label, expected one label or more")

    def remarks(self, task: Task, labels: Mapping[str, Sequence[Any]]) -> Iterator[str]:
        """Yield warnings. Raises ValueError for rows that all have the labels 0 and 1: vectors of two classes."""
        if len(task.labels) > 1 and set(task.labels) <= _OF_VECTORS and all(map(all, labels["valid"])):
            raise ValueError(
                f"every row has the labels {' and '.join(task.labels)}, as vectors of 0 and 1 do; write a list of the "
                "row's labels"
            )
        return super().remarks(task, labels)

    def cell_text(self, value: Any, ending: str) -> str:
        """Return several labels with `|` between them, the form that training reads."""
        if not isinstance(value, list):
            return super().cell_text(value, ending)
        names = [super(MultiLabel, self).cell_text(label, ending) for label in value]
        if parted := [name for name in names if "|" in name]:
            raise ValueError(f"label {parted[0]!r} has a |, which separates labels in {ending}; write .jsonl")
        return "|".join(names)

    def label_names(self, cell: Any) -> Sequence[str]:
        """Return the labels, each once."""
        if isinstance(cell, str):
            if cell.startswith("["):
                raise ValueError(f"label is {cell[:80]!r}, expected labels with | between them, such as A|B")
            return tuple(dict.fromkeys(name.strip() for name in cell.split("|") if name.strip()))
        if not isinstance(cell, list):
            raise ValueError(f"label is {cell!r}, expected a list of labels")
        names = tuple(dict.fromkeys(label_name(name) for name in cell))
        if set(names) <= _OF_VECTORS and len(names) < len(cell):
            raise ValueError(f"label is {cell!r:.60}, a vector of 0 and 1; write a list of the row's labels")
        return names

    def label(self, cell: Any, task: Task) -> list[float]:
        """Return 1 for each label of the row and 0 for the others."""
        numbers = {class_number(name, task) for name in self.label_names(cell)}
        return [float(number in numbers) for number in range(len(task.labels))]

    def constant(self, task: Task, answers: np.ndarray, label: int) -> np.ndarray:
        """Return the label alone for every row."""
        return np.zeros_like(answers) + np.eye(len(task.labels))[label]

    def unlabelled(self, task: Task) -> list[float]:
        """Return nan for each label."""
        return [math.nan] * len(task.labels)

    def as_json(self, task: Task, value: np.ndarray) -> list[str]:
        """Return the labels."""
        return [label for label, chosen in zip(task.labels, value, strict=True) if chosen]

    def loss_sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean binary cross entropy over labels, summed over rows."""
        from torch.nn.functional import binary_cross_entropy_with_logits

        losses = binary_cross_entropy_with_logits(outputs, targets.to(outputs.dtype), reduction="none")
        return losses.mean(dim=-1).sum()

    def predict(self, outputs: Tensor) -> Tensor:
        """Return 1 for each label with a probability above 0.5, otherwise 0, `[batch, labels]`."""
        return (outputs > 0).float()
