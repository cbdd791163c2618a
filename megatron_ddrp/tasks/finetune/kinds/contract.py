"""Contract of a kind of task: its metrics and head, conversion of files to rows, loss, predictions and their files.

A kind is one file with a subclass of `Kind`, one line in `config/registry.py`, and a test with its slow twin. A kind
imports torch only in the methods that compute with it, because command lines read the facts.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from megatron_ddrp.conversion.task_heads import HeadForm, Labels
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer
from megatron_ddrp.encoders.rows import Encoded
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError
from megatron_ddrp.foreign import parse_json
from megatron_ddrp.tasks.finetune.metrics import Metric, drawn_rows, metrics_of_plugins
from megatron_ddrp.tasks.finetune.output_files import RowFile, as_text
from megatron_ddrp.tasks.finetune.task import Columns, Example, Task

if TYPE_CHECKING:
    from torch import Tensor

UNDEFINED = "nan"
"""Text of a row without a prediction in a file of predictions."""


class Kind(ABC):
    """Base class of a kind of task. Instances hold no state."""

    name: ClassVar[str]
    """Name on the command line and in files."""
    own_metrics: ClassVar[Mapping[str, Metric]]
    """Metrics by name; the first is the default. Plug-ins may add others."""
    head: ClassVar[HeadForm]
    """Form of the layers on top of the encoder."""
    problem_type: ClassVar[str | None] = None
    """Value of `problem_type` in a Hugging Face configuration."""
    usual_columns: ClassVar[Columns]
    """Default columns of the files."""
    text_columns: ClassVar[tuple[str, ...]] = ()
    """Further usual names of the column of texts, most usual first."""
    label_columns: ClassVar[tuple[str, ...]] = ()
    """Further usual names of the column of labels, most usual first."""
    pair_columns: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType({})
    """Usual column of texts → columns of the second text, the first that the file has; none if it has none."""
    output_files: ClassVar[Mapping[str, type[RowFile]]] = MappingProxyType({})
    """Further endings of files of predictions → their writers."""
    predicts_numbers: ClassVar[bool] = False
    """True if the outputs are numbers on the labels' scale, which a run may take out (`Run.scales_labels`)."""

    @property
    def metrics(self) -> dict[str, Metric]:
        """All metrics by name, those of plug-ins last. Raises `UserError` if a plug-in takes a name of the kind."""
        added = metrics_of_plugins(self.name)
        if taken := added.keys() & self.own_metrics.keys():
            raise UserError(f"METRICS names {min(taken)!r}, which --kind {self.name} has: choose another name")
        return {**self.own_metrics, **added}

    def is_likely(self, columns: Sequence[str], cells: Callable[[], Sequence[Any]]) -> bool:
        """Return whether a file with these columns is of this kind.

        `cells` reads the labels of the first rows; none without a column of labels.
        """
        labels = {self.usual_columns.label, *self.label_columns}
        return (self.usual_columns.pair or self.usual_columns.text) in columns and not labels.isdisjoint(columns)

    def check_metric(self, name: str, labels: Sequence[str] = ()) -> None:
        """Raise `UserError` if the kind does not have the metric, or has it only for other labels."""
        if name not in self.metrics:
            raise UserError(f"--metric {name}: --kind {self.name} has {', '.join(self.metrics)}", WRONG_ARGUMENTS)

    def check_labels(self, task: Task, is_guessed: bool) -> None:
        """Raise ValueError with the reason for labels of a training file that make no task.

        `is_guessed` is True if the command line does not name the kind.
        """
        return None

    def remarks(self, task: Task, labels: Mapping[str, Sequence[Any]]) -> Iterator[str]:
        """Yield warnings about the labels of development files, by the names of the files.

        Raises ValueError with the reason for labels of the validation file that the metric is not defined for.
        """
        return iter(())

    def undefined(self, task: Task, labels: Mapping[str, Sequence[Any]]) -> Iterator[str]:
        """Yield a warning for each file on whose labels even predictions without a fault have no score.

        It is for kinds whose predictions have the form of the answers.
        """
        for file, rows in labels.items():
            answers = self.answers(task, rows)
            if self.score(task.metric, answers, answers) is None:
                yield (
                    f"{file}: WARNING, no model scores above 0 by {task.metric} on its labels: they are all alike, or "
                    "none is positive"
                )

    def scheme(self, task: Task) -> str:
        """Return the name of the rules by which the metric reads the labels; empty without such rules."""
        return ""

    def score_name(self, task: Task) -> str:
        """Return the name of the metric as tables show it."""
        return task.metric

    def hub_labels(self, task: Task) -> Labels:
        """Return the labels for a Hugging Face configuration; a regression has one, named after the task."""
        return Labels(task.labels or (task.name,), self.problem_type)

    @abstractmethod
    def texts(self, cells: Mapping[str, Any], columns: Columns) -> tuple[str, ...]:
        """Return the texts of a row of a file. Raises ValueError with the reason if a cell holds no text."""

    @abstractmethod
    def label_names(self, cell: Any) -> Sequence[str]:
        """Return the names of the labels in a cell of the label column; nothing for numbers and answers.

        Raises ValueError with the reason for a cell that no task of this kind can have.
        """

    @abstractmethod
    def label(self, cell: Any, task: Task) -> Any:
        """Return the label of a cell in the form that `encode` takes. Raises ValueError with the reason otherwise."""

    def check(self, texts: Sequence[str], cell: Any) -> None:
        """Raise ValueError with the reason if the texts of a row do not match the cell of its label."""
        return None

    def unlabelled(self, task: Task) -> Any:
        """Return the placeholder label of a row without one."""
        return math.nan

    @abstractmethod
    def answers(self, task: Task, labels: Sequence[Any]) -> Any:
        """Return the labels of some rows, as `label` returns them, in the form that the metric takes."""

    @abstractmethod
    def as_values(self, task: Task, predictions: Any) -> Iterable[Any]:
        """Yield the prediction of each example as a JSON value, or its label; None if it is undefined."""

    @abstractmethod
    def read(self, task: Task, labels: Sequence[Any], predictions: Sequence[Any]) -> tuple[Any, Any]:
        """Return (answers, predictions) from the values that `as_values` yields. Raises ValueError for other values."""

    def text_of(self, value: Any) -> str:
        """Return a value of `as_values` as text without tabs and line breaks, for a file of predictions."""
        return UNDEFINED if value is None else json.dumps(value, ensure_ascii=False)

    def value_of(self, task: Task, text: str) -> Any:
        """Return the value that `text_of` wrote. Raises ValueError for any other text."""
        return None if text == UNDEFINED else parse_json(text)

    def cell_text(self, value: Any, ending: str) -> str:
        """Return a label or prediction in the form that a table has in a file with this ending.

        Raises ValueError with the reason if the file cannot hold it.
        """
        return as_text(value)

    def constant(self, task: Task, answers: Any, label: int) -> Any:
        """Return predictions of one label, by its number, for every row of `answers`; None for kinds without them."""
        return None

    def baseline(self, task: Task, counts: Mapping[str, int], answers: Any) -> float | None:
        """Return the score of always predicting the most frequent label of the training rows.

        `counts` has the number of training rows per label. Return None for kinds without such a prediction.
        """
        guess = self.constant(task, answers, task.most_frequent(counts)) if task.labels else None
        return None if guess is None else self.metrics[task.metric].counted(answers, guess)

    def constant_guess(self, task: Task, answers: Any) -> float | None:
        """Return the score of the most frequent answer for all rows, of runs that did not record their `baseline`.

        For numbers it is 0, which the undefined correlation with a constant counts as. None for kinds without one, and
        for the metric of a plug-in.
        """
        return 0.0 if self.predicts_numbers and task.metric in self.own_metrics else None

    def num_outputs(self, task: Task) -> int:
        """Return the width of the head's last layer: one per label, 2 for an answer's first and last piece."""
        return len(self.hub_labels(task).names) or 2

    @abstractmethod
    def encode(self, task: Task, examples: Iterable[Example], tokenizer: Tokenizer, max_length: int) -> Encoded:
        """Return the rows of the examples, in the tokenizer's form, each of at most `max_length` pieces in all."""

    def targets(self, encoded: Encoded, rows: np.ndarray) -> np.ndarray:
        """Return the targets of some rows in the form that `loss_sum` takes."""
        return np.asarray(encoded.targets[rows])

    def size(self, encoded: Encoded, rows: np.ndarray) -> int:
        """Return the number of targets of some rows; it divides the loss of a batch."""
        return len(rows)

    @abstractmethod
    def loss_sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of a batch, summed over its targets."""

    def blank(self, encoded: Encoded) -> np.ndarray:
        """Return zeros in the shape of all outcomes, float64 `[outcomes, …]`; by default there is one per target."""
        return np.zeros(encoded.targets.shape)

    @abstractmethod
    def outcomes(self, outputs: Tensor, encoded: Encoded, rows: np.ndarray) -> tuple[np.ndarray, Tensor]:
        """Return the indices and the values of a batch's outcomes; a value is nan if its outputs are not finite."""

    @abstractmethod
    def predictions(self, task: Task, encoded: Encoded, outcomes: np.ndarray) -> Any:
        """Return all outcomes in the form that the metric takes, the form of `Encoded.answers`."""

    def score(self, metric: str, answers: Any, predictions: Any) -> float | None:
        """Return the score of the predictions; None if it is undefined."""
        return self.metrics[metric].value(answers, predictions)

    def resampled_scores(self, task: Task, answers: Any, predictions: Any) -> np.ndarray:
        """Return the task's metric on every bootstrap sample of its rows, `[samples]`."""
        return self.metrics[task.metric].samples(drawn_rows(task.name, len(answers)), answers, predictions)

    def beside(self, task: Task) -> tuple[str, ...]:
        """Return the names of metrics that are reported in addition to the task's own."""
        return ()
