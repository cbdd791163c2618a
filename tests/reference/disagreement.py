"""Slow twins of head disagreement (Li et al., arXiv:1810.10183), of one layer and one document.

    D_subspace = −1/h² Σ_a Σ_b cos(V^a, V^b)
    D_output   = −1/h² Σ_a Σ_b cos(O^a, O^b)
    D_position = −1/h² Σ_a Σ_b |P^a ⊙ P^b|

with the h heads' values V, outputs O = P V and attention probabilities P; |·| sums all entries, of non-negative
matrices. A cosine is the mean over the document's tokens of the cosine of their two vectors. Pairs of a head with
itself are in the sums. Everything is torch.float64 and differentiable.
"""

import torch
from torch import Tensor

from tests.reference.mth import cosine


def of_vectors(heads: Tensor, tokens: list[int]) -> Tensor:
    """D of values or outputs `[heads, S, d]` over the tokens of a document."""
    num_heads, total = len(heads), torch.zeros((), dtype=torch.float64)
    for a in range(num_heads):
        for b in range(num_heads):
            for token in tokens:
                total = total + cosine(heads[a, token], heads[b, token]) / len(tokens)
    return -total / num_heads**2


def of_maps(probabilities: Tensor, tokens: list[int]) -> Tensor:
    """D of attention maps `[heads, S, S]` over the pairs of a document's tokens."""
    num_heads, total = len(probabilities), torch.zeros((), dtype=torch.float64)
    for a in range(num_heads):
        for b in range(num_heads):
            for i in tokens:
                for j in tokens:
                    total = total + probabilities[a, i, j] * probabilities[b, i, j]
    return -total / num_heads**2


def probabilities(logits: Tensor, tokens: list[int], window: int | None = None) -> Tensor:
    """softmax over a document's keys, with a window those at most so far away: `[heads, S, S]` to the same.

    0 outside of the document.
    """
    rows, zero = [], torch.zeros((), dtype=torch.float64)
    for head in logits:
        for i in range(len(head)):
            keys = [j for j in tokens if i in tokens and (window is None or abs(i - j) <= window)]
            weights = [torch.exp(head[i, j]) if j in keys else zero for j in range(len(head))]
            rows.append(torch.stack(weights) / (sum(weights) if keys else 1))
    return torch.stack(rows).view_as(logits)
