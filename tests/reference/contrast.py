"""Slow twin of SimCTG's contrastive loss (arXiv:2202.06417, eq. 2), over the tokens of each sequence.

For the n tokens of a sequence with hidden states h:
    1/(n (n − 1)) Σ_i Σ_{j≠i} max(0, margin − cos(h_i, h_i) + cos(h_i, h_j))
0 for a sequence of fewer than two tokens. Everything is torch.float64 and differentiable.
"""

import torch
from torch import Tensor


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """a·b ÷ (‖a‖ ‖b‖), `[d]` each, to a scalar."""
    dot = aa = bb = torch.zeros((), dtype=torch.float64)
    for x, y in zip(a, b, strict=True):
        dot, aa, bb = dot + x * y, aa + x * x, bb + y * y
    return dot / (torch.sqrt(aa) * torch.sqrt(bb))


def contrast(hidden: Tensor, tokens: list[int], margin: float) -> Tensor:
    """The mean hinge of one sequence: hidden `[S, d]`, of which `tokens` are its own."""
    total = torch.zeros((), dtype=torch.float64)
    for i in tokens:
        for j in tokens:
            if i != j:
                hinge = margin - cosine(hidden[i], hidden[i]) + cosine(hidden[i], hidden[j])
                if hinge.item() > 0:
                    total = total + hinge
    return total / max(1, len(tokens) * (len(tokens) - 1))
