"""Masked language modelling (Devlin et al., arXiv:1810.04805): cross entropy on the predicted positions only."""

import torch.nn.functional as F
from torch import Tensor

from megatron_ddrp.data.batches.batch import IGNORED_LABEL


def masked_lm_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum over predicted tokens of −log p(label), in nats.

    `logits` `[num_predicted, vocab]` in any precision, `labels` int64 `[num_predicted]` → fp32 (or fp64) scalar.
    """
    logits = logits if logits.dtype.itemsize >= 4 else logits.float()
    return F.cross_entropy(logits, labels, ignore_index=IGNORED_LABEL, reduction="sum")
