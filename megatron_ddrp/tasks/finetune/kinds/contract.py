"""What a kind of task is: how its files are read and become rows, what its head learns, how predictions are written.

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
    """One kind of task. Instances hold no state."""

    head: ClassVar[str]
    """Name in `heads.HEADS`: what stands on top of the encoder."""
    usual_columns: ClassVar[Columns]
    """Columns that are read where no flag names others and a file has them."""

    @abstractmethod
    def texts(self, cells: Mapping[str, Any], columns: Columns) -> tuple[str, ...]:
        """Return the texts of a row of a file. Raises ValueError with the reason where they are none."""

    @abstractmethod
    def label_names(self, cell: Any) -> Sequence[str]:
        """Return the labels that the cell of a label column holds, as they are written; none where it is a number or an
        answer. Raises ValueError with the reason for a cell that no task of this kind can have.
        """

    @abstractmethod
    def label(self, cell: Any, task: Task) -> Any:
        """Return the label of a cell as `encode` takes it. Raises ValueError with the reason where it is none."""

    def check(self, texts: Sequence[str], cell: Any) -> None:
        """Raise ValueError with the reason where the texts of a row and its label's cell do not go together."""
        return None

    def unlabelled(self, task: Task, texts: tuple[str, ...]) -> Any:
        """Return what stands for the label of a row that has none."""
        return math.nan

    @abstractmethod
    def told(self, task: Task, predictions: Any) -> Iterable[Any]:
        """Yield the prediction of each example as a JSON value; null where there is none."""

    def baseline(self, task: Task, counts: Mapping[str, int], labels: Sequence[Any]) -> float | None:
        """Return what always predicting the most frequent label of the training rows scores on `labels`.

        `counts` says how often each label stands in the training rows. None where there is no such prediction.
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
        """Return what the loss of a batch is divided by: how many targets its rows have."""
        return len(rows)

    @abstractmethod
    def loss_sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of a batch, summed over its targets."""

    @abstractmethod
    def blank(self, encoded: Encoded) -> np.ndarray:
        """Return zeros of the shape of all outcomes, float64 `[outcomes, …]`."""

    @abstractmethod
    def outcomes(self, outputs: Tensor, encoded: Encoded, rows: np.ndarray) -> tuple[np.ndarray, Tensor]:
        """Return which outcomes a batch gives, and their values; nan where the head's outputs are not finite."""

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
