"""What a kind of task is: how its examples become rows, what its head learns, and how its predictions are written.

A kind is one file with a subclass of `Kind`, one line in `kinds/__init__.py`, and a test with its slow twin.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer
from megatron_ddrp.tasks.finetune.metrics import METRICS
from megatron_ddrp.tasks.finetune.rows import Encoded
from megatron_ddrp.tasks.finetune.task import Example, Task

Line = tuple[str, str, str]
"""(index, prediction, label) of a line in a file of predictions; the index counts the file's rows from 0."""


class Kind(ABC):
    """One kind of task. Instances hold no state."""

    head: ClassVar[str]
    """Name in `heads.HEADS`: what stands on top of the encoder."""

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

    @abstractmethod
    def lines(self, task: Task, answers: Any, predictions: Any) -> Iterable[Line]:
        """Yield the lines of a file of predictions; none of the three may hold a tab or a line break."""

    @abstractmethod
    def read_lines(self, task: Task, lines: Sequence[Line]) -> tuple[Any, Any]:
        """Return (answers, predictions) of `lines`. Raises ValueError for lines that this kind does not write."""
