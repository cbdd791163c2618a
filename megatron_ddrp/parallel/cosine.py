"""HCD over heads of all tensor-parallel ranks (eq. 18): exact, with the same draw of heads in every layout.

If HCD samples heads, they are exchanged: each rank contributes the queries and keys of its own, `[2, b, m′, s, d]` in
total, and their part of the tables or of the bias if these are per head; then every rank computes the same cosine. If
HCD compares all heads, Σ_a A_a/‖A_a‖ is exchanged instead, one `[b, s, s]` sum for any number of heads.

Gradients need no communication: the result is replicated, so each rank's part of its gradient is the slice of its own
heads. Tables that all heads share are replicated already. `tensor_parallel` sums their gradient over the ranks, so only
one rank may count the cosine's share of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ddrp.model import similarity
from megatron_ddrp.model.attention.attending import Attending
from megatron_ddrp.model.attention.logits import allowed_pairs, attention_logits, sum_of_counted
from megatron_ddrp.model.positions import PositionTerms
from megatron_ddrp.parallel.collectives import sum_of_ranks
from megatron_ddrp.parallel.process_group import Ranks


class CosineOfAllRanks:
    """Mean pairwise cosine of some heads' logits, for heads on any rank."""

    def __init__(self, ranks: Ranks, terms_by_head: bool) -> None:
        """Keep `terms_by_head`: true if the position terms have a part per head, false if all heads share one."""
        self.ranks, self.terms_by_head = ranks, terms_by_head

    def __call__(self, attending: Attending) -> Tensor:
        """Return the cosine summed over the counted documents.

        `attending` has this rank's queries and keys; its `heads` are global numbers.
        """
        return sum_of_counted(self._by_document(attending), attending)

    def _by_document(self, attending: Attending) -> Tensor:
        query, key, heads, terms = attending.query, attending.key, attending.heads, attending.terms.compared
        documents = similarity.document_mask(attending.document_ids, attending.num_documents)
        num_heads = query.shape[1] * self.ranks.tensor_size
        if len(heads) == num_heads:
            total = sum_of_ranks(self._total(attending, documents), self.ranks)
            return similarity.cosine_of_total(total, documents, num_heads)
        own = torch.stack([self._own(x, heads, 1) for x in (query, key)])  # [2, b, m′, s, d]
        query, key = _wide(sum_of_ranks(own, self.ranks))
        if attending.compares_content:
            return similarity.cosine_of_gram(similarity.content_gram(query, key, documents, terms.scale))
        terms = self._terms_of(heads, terms, query.dtype)
        return similarity.logits_cosine(attention_logits(query, key, terms), _pairs_allowed(attending), documents)

    @staticmethod
    def _total(attending: Attending, documents: Tensor) -> Tensor:
        """Return Σ_a A_a/‖A_a‖ over this rank's heads, `[b, s, s]`."""
        query, key = _wide(attending.query), _wide(attending.key)
        if attending.compares_content:
            return similarity.content_total(query, key, documents)
        terms = attending.terms.compared.map(lambda x, _: x.to(query.dtype))
        return similarity.logits_total(attention_logits(query, key, terms), _pairs_allowed(attending), documents)

    def _terms_of(self, heads: Tensor, terms: PositionTerms, dtype: torch.dtype) -> PositionTerms:
        """Return the terms of `heads`: exchanged if they are per head, else shared, with a gradient on rank 0 only."""

        def choose(tensor: Tensor, dimension: int) -> Tensor:
            if self.terms_by_head:
                tensor = sum_of_ranks(self._own(tensor, heads, dimension), self.ranks)
            elif self.ranks.tensor_rank:
                tensor = tensor.detach()
            return tensor.to(dtype)

        return terms.map(choose)

    def _own(self, tensor: Tensor, heads: Tensor, dimension: int) -> Tensor:
        """Return `heads` along `dimension`, with zeros in place of the heads of other ranks."""
        own = heads - self.ranks.tensor_rank * tensor.shape[dimension]
        here = (own >= 0) & (own < tensor.shape[dimension])
        chosen = tensor.index_select(dimension, torch.where(here, own, 0))
        return chosen * here.view([-1 if d == dimension else 1 for d in range(chosen.dim())])


def _pairs_allowed(attending: Attending) -> Tensor:
    """Return `allowed_pairs` of a call of attention, bool `[b, 1, s, s]`."""
    return allowed_pairs(attending.document_ids, attending.window)


def _wide(x: Tensor) -> Tensor:
    """Return `x` in fp32 or wider."""
    return x.float() if x.dtype.itemsize < 4 else x
