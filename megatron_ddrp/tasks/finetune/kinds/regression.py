"""Kind that predicts a number for a text or a pair of texts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from megatron_ddrp.tasks.finetune.kinds.sequences import SequenceKind
from megatron_ddrp.tasks.finetune.metrics import PEARSON, SPEARMAN, Metric
from megatron_ddrp.tasks.finetune.table_files import Task

if TYPE_CHECKING:
    from torch import Tensor


LARGEST_LABEL = 3.4028234e38  # of float32


class Regression(SequenceKind):
    """Kind that predicts a number."""

    name = "regression"
    own_metrics: ClassVar[Mapping[str, Metric]] = {"pearson": PEARSON, "spearman": SPEARMAN}
    problem_type = "regression"
    predicts_numbers = True

    def is_likely(self, columns: Sequence[str], cells: Callable[[], Sequence[Any]]) -> bool:
        """Return whether all labels that are there are numbers and some have a decimal point."""
        there = [cell for cell in cells() if str(cell).strip().lower() not in ("", "na", "null", "none")]
        points = (isinstance(cell, float) or (isinstance(cell, str) and "." in cell) for cell in there)
        return None not in map(self._as_number, there) and any(points)

    def label_names(self, cell: Any) -> Sequence[str]:
        """Return nothing, because numbers have no names. Raises ValueError for a cell without a number."""
        self._number(cell)
        return ()

    def label(self, cell: Any, task: Task) -> float:
        """Return the number."""
        return self._number(cell)

    def _as_number(self, cell: Any) -> float | None:
        try:
            return None if isinstance(cell, bool) or "_" in str(cell) else float(cell)  # Python reads 1_5 as 15
        except (TypeError, ValueError, OverflowError):
            return None

    def _number(self, cell: Any) -> float:
        number = self._as_number(cell)
        if number is None or not math.isfinite(number):
            raise ValueError(f"label is {cell!r}, expected a number such as 1.5; mend or remove the row")
        if abs(number) > LARGEST_LABEL:
            raise ValueError(f"label is {cell!r}, expected at most {LARGEST_LABEL:g} in size; use another unit")
        return number

    def loss_sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the squared error, summed over rows."""
        from torch.nn.functional import mse_loss

        return mse_loss(outputs[:, 0], targets.float(), reduction="sum")

    def as_json(self, task: Task, value: float) -> float:
        """Return the number."""
        return float(value)

    def predict(self, outputs: Tensor) -> Tensor:
        """Return the predicted numbers, `[batch]`."""
        return outputs[:, 0]
