"""Kind that predicts any number of labels for a text or a pair of texts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from megatron_ddrp.tasks.finetune.kinds.sequences import SequenceKind, class_number, label_name
from megatron_ddrp.tasks.finetune.metrics import ACCURACY, F1, MACRO_F1, Metric
from megatron_ddrp.tasks.finetune.task import Columns, Task

if TYPE_CHECKING:
    from torch import Tensor


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
