"""Embedding, cross entropy and sampling over a vocabulary of which each tensor-parallel rank holds some rows.

Logits are never gathered: the ranks exchange the largest logit of each predicted token, and two numbers a token more,
the sum of the exponentials and the label's logit. The padding of the vocabulary comes in as −∞ and takes no part.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_ddrp.model.replacing import gumbel_argmax
from megatron_ddrp.parallel.collectives import all_reduced, sum_of_ranks
from megatron_ddrp.parallel.process_group import Ranks


def _own_rows(ids: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """(row of each id here, 0 for an id that is not; bool, whether it is)."""
    rows = ids - first
    here = (rows >= 0) & (rows < count)
    return torch.where(here, rows, 0), here


class VocabularyParallelEmbedding(nn.Module):
    """Some rows of an embedding; a token's vector comes from the rank that has it."""

    def __init__(self, embedding: nn.Embedding, ranks: Ranks) -> None:
        super().__init__()
        self.ranks, self.weight = ranks, embedding.weight
        self.first_piece = ranks.tensor_rank * len(self.weight)

    def forward(self, input_ids: Tensor) -> Tensor:
        """int64 `[..]` → `[.., hidden]`, alike on all ranks."""
        rows, here = _own_rows(input_ids, self.first_piece, len(self.weight))
        return sum_of_ranks(F.embedding(rows, self.weight) * here.unsqueeze(-1), self.ranks)


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


def masked_lm_sum_of_ranks(logits: Tensor, labels: Tensor, first_piece: int, ranks: Ranks) -> Tensor:
    """Sum over predicted tokens of −log p(label), in nats, as `masked_lm_sum`, alike on all tensor-parallel ranks.

    `logits` `[num_predicted, rows]` of the pieces from `first_piece` on, `labels` int64 `[num_predicted]` →
    fp32 (or fp64) scalar.
    """
    return _CrossEntropyOfRanks.apply(logits, labels, first_piece, ranks)


def sample_of_ranks(logits: Tensor, keys: Tensor, first_piece: int, ranks: Ranks) -> Tensor:
    """A piece for each token from the softmax over all ranks' logits: the same as `electra.sample` on one device."""
    return _winner_of_ranks(*gumbel_argmax(logits, keys, first_piece), first_piece, ranks)


def best_of_ranks(logits: Tensor, first_piece: int, ranks: Ranks) -> Tensor:
    """The likeliest piece of each token over all ranks' logits."""
    return _winner_of_ranks(*logits.detach().max(-1), first_piece, ranks)


def _winner_of_ranks(scores: Tensor, columns: Tensor, first_piece: int, ranks: Ranks) -> Tensor:
    """int64 `[n]`: the piece of the largest score, of equal ones the first; `scores`, `columns` `[n]` are our best."""
    largest = all_reduced(scores, ranks, dist.ReduceOp.MAX)
    pieces = torch.where(scores == largest, columns + first_piece, torch.iinfo(torch.int64).max)
    return all_reduced(pieces, ranks, dist.ReduceOp.MIN)
