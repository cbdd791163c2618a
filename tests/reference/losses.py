"""Slow twin of the masked-LM loss and of the reduction over the global batch (MLM in eq. 19).

For a predicted token with logits z and label y:  loss = log(sum_v exp(z_v)) - z_y.
MLM over a batch = sum over the predicted tokens of the global batch ÷ their global count, however they were split into
micro-batches or ranks; never a mean of means. Everything is torch.float64 and differentiable.
"""

import torch
from torch import Tensor

IGNORED_LABEL = -100
"""Label of a token that is not predicted."""


def log_sum_exp(row: Tensor) -> Tensor:
    """log(sum_v exp(row[v])), `[V]` to a scalar; entries of -inf (a padded vocabulary) count as nothing."""
    largest = max(logit.item() for logit in row)
    total = torch.zeros((), dtype=torch.float64)
    for logit in row:
        if logit.item() != float("-inf"):
            total = total + torch.exp(logit - largest)
    return largest + torch.log(total)


def masked_lm(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of the cross-entropies of the predicted tokens: logits `[N, V]`, labels `[N]` (-100 = not predicted)."""
    loss = torch.zeros((), dtype=torch.float64)
    for row, label in zip(logits, labels.tolist(), strict=True):
        if label != IGNORED_LABEL:
            loss = loss + log_sum_exp(row) - row[label]
    return loss


def global_mean(sums: list[Tensor], counts: list[int]) -> Tensor:
    """Sum of the per-sequence (or micro-batch, or rank) sums ÷ sum of their counts; 0 where nothing was counted."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for part, n in zip(sums, counts, strict=True):
        total, count = total + part, count + n
    return total / max(count, 1)
