"""The contract of a kind of task: how files become rows, what the head learns, how predictions are written.

A kind is one file with a subclass of `Kind`, one line in `kinds/__init__.py`, and a test with its slow twin.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer
from megatron_ddrp.tasks.finetune.metrics import METRICS
from megatron_ddrp.tasks.finetune.rows import Encoded
from megatron_ddrp.tasks.finetune.task import Columns, Example, Task

Line = tuple[str, str, str]
"""(index, prediction, label) of a line in a file of predictions; the index counts the file's rows from 0."""


class Kind(ABC):
    """Base class of a kind of task. Instances hold no state."""

    head: ClassVar[str]
    """Name in `heads.HEADS` of the layers on top of the encoder."""
    usual_columns: ClassVar[Columns]
    """Columns to read if no flag names others."""

    @abstractmethod
    def texts(self, cells: Mapping[str, Any], columns: Columns) -> tuple[str, ...]:
        """Return the texts of a row of a file. Raises ValueError with the reason if a cell holds no text."""

    @abstractmethod
    def label_names(self, cell: Any) -> Sequence[str]:
        """Return the labels in a cell of the label column, as they are written; nothing for numbers and answers.

        Raises ValueError with the reason for a cell that no task of this kind can have.
        """

    @abstractmethod
    def label(self, cell: Any, task: Task) -> Any:
        """Return the label of a cell as `encode` takes it. Raises ValueError with the reason if it is not a label."""

    def check(self, texts: Sequence[str], cell: Any) -> None:
        """Raise ValueError with the reason if the texts of a row do not match the cell of its label."""
        return None

    def unlabelled(self, task: Task, texts: tuple[str, ...]) -> Any:
        """Return the placeholder label of a row without one."""
        return math.nan

    @abstractmethod
    def told(self, task: Task, predictions: Any) -> Iterable[Any]:
        """Yield the prediction of each example as a JSON value; null if it is undefined."""

    def baseline(self, task: Task, counts: Mapping[str, int], labels: Sequence[Any]) -> float | None:
        """Return what always predicting the most frequent label of the training rows scores on `labels`.

        `counts` says how often each label occurs in the training rows. Return None for kinds without such a
        prediction.
        """
        return None

    @abstractmethod
    def num_outputs(self, task: Task) -> int:
        """Return the width of the head's last layer."""

    @abstractmethod
    def encode(
        self, task: Task, examples: Iterable[Example], tokenizer: Tokenizer, max_length: int, pair_separators: int
    ) -> Encoded:
        """Return the rows of the examples, each of at most `max_length` pieces, specials included.

        `pair_separators` stand between the two texts of a pair: 2 in the RoBERTa family.
        """

    def targets(self, encoded: Encoded, rows: np.ndarray) -> np.ndarray:
        """Return the targets of some rows as `loss_sum` takes them."""
        return np.asarray(encoded.targets[rows])

    def size(self, encoded: Encoded, rows: np.ndarray) -> int:
        """Return the number of targets of some rows, by which the loss of a batch is divided."""
        return len(rows)

    @abstractmethod
    def loss_sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of a batch, summed over its targets."""

    @abstractmethod
    def blank(self, encoded: Encoded) -> np.ndarray:
        """Return zeros of the shape of all outcomes, float64 `[outcomes, …]`."""

    @abstractmethod
    def outcomes(self, outputs: Tensor, encoded: Encoded, rows: np.ndarray) -> tuple[np.ndarray, Tensor]:
        """Return the indices and the values of a batch's outcomes; values are nan where outputs are not finite."""

    @abstractmethod
    def predictions(self, task: Task, encoded: Encoded, outcomes: np.ndarray) -> Any:
        """Return all outcomes in the form that the metric takes, as `Encoded.answers` is."""

    def score(self, metric: str, answers: Any, predictions: Any) -> float | None:
        """Return the predictions' score, None where it is undefined."""
        return METRICS[metric](answers, predictions)

    def beside(self, task: Task) -> tuple[str, ...]:
        """Return the metrics that are reported beside the task's own."""
        return ()

    @abstractmethod
    def lines(self, task: Task, answers: Any, predictions: Any) -> Iterable[Line]:
        """Yield the lines of a file of predictions; none of the three may hold a tab or a line break."""

    @abstractmethod
    def read_lines(self, task: Task, lines: Sequence[Line]) -> tuple[Any, Any]:
        """Return (answers, predictions) of `lines`. Raises ValueError for lines that this kind does not write."""
