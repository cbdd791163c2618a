"""Embedding, cross entropy and sampling over a vocabulary of which each tensor-parallel rank holds some rows.

Logits are never gathered. The ranks exchange the largest logit of each predicted token, and two numbers more per token:
the sum of the exponentials and the label's logit. The padding of the vocabulary has logits of −∞ and takes no part.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_ddrp.model.heads import MaskedLMHead
from megatron_ddrp.parallel.collectives import all_reduced, sum_of_ranks
from megatron_ddrp.parallel.process_group import Ranks


def _own_rows(ids: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Return the local row of each id, 0 for an id of another rank, and true for each id of this rank."""
    rows = ids - first
    here = (rows >= 0) & (rows < count)
    return torch.where(here, rows, 0), here


class VocabularyParallelEmbedding(nn.Embedding):
    """Some rows of an embedding; each token's vector comes from the rank that holds its row."""

    ranks: Ranks

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return int64 `[..]` → `[.., hidden]`, equal on all ranks."""
        rows, here = _own_rows(input_ids, self.ranks.tensor_rank * len(self.weight), len(self.weight))
        return sum_of_ranks(F.embedding(rows, self.weight) * here.unsqueeze(-1), self.ranks)


class MaskedLMHeadOfRanks(MaskedLMHead):
    """A masked-LM head with the logits of some pieces; its results are equal on all ranks."""

    ranks: Ranks

    @property
    def first_piece(self) -> int:  # type: ignore[override]
        return self.ranks.tensor_rank * len(self.decoder.weight)

    def lm_sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        return _CrossEntropyOfRanks.apply(logits, labels, self.first_piece, self.ranks)

    def winner(self, scores: Tensor, columns: Tensor) -> Tensor:
        """Return the piece of the largest score, the first of equal ones; `scores` and `columns` `[n]` are local."""
        largest = all_reduced(scores, self.ranks, dist.ReduceOp.MAX)
        pieces = torch.where(scores == largest, columns + self.first_piece, torch.iinfo(torch.int64).max)
        return all_reduced(pieces, self.ranks, dist.ReduceOp.MIN)


class _CrossEntropyOfRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, labels: Tensor, first_piece: int, ranks: Ranks) -> Tensor:  # type: ignore[override]
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        largest = all_reduced(wide.amax(-1), ranks, dist.ReduceOp.MAX)  # [n]
        exponentials = (wide - largest.unsqueeze(-1)).exp_()  # [n, rows], 0 at the padding
        rows, here = _own_rows(labels, first_piece, wide.shape[1])
        own_label = torch.where(here, wide.gather(1, rows.unsqueeze(1)).squeeze(1) - largest, 0.0)
        total, label = all_reduced(torch.stack((exponentials.sum(-1), own_label)), ranks)  # [n] each
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(-1)), rows, here)
        ctx.dtype = logits.dtype
        return (total.log() - label).sum()

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[override]
        probabilities, rows, here = ctx.saved_tensors
        d_logits = probabilities.scatter_add(1, rows.unsqueeze(1), -here.to(probabilities.dtype).unsqueeze(1))
        return (d_logits * gradient).to(ctx.dtype), None, None, None
