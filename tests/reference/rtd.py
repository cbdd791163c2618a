"""Slow twins of DeBERTaV3's replaced-token detection (He et al., arXiv:2111.09543, section 3, and its released code).

Token embeddings of the discriminator: E_D = sg(E_G) + E_Δ, here as the table it stands for. The
head: y_t = W₂ · gelu(W₁ · LN(h_[CLS] + h_t)), [CLS] being the first token of t's own document. Everything is
torch.float64 and differentiable.
"""

import torch
from torch import Tensor

from tests.reference.attention import gelu, layer_norm, linear


def discriminator_table(generators: Tensor, difference: Tensor) -> Tensor:
    """`[vocab, D]` each: row by row the constant that the generator's row is, plus the difference."""
    pairs = zip(generators, difference, strict=True)
    return torch.stack([torch.tensor(row.tolist(), dtype=torch.float64) + change for row, change in pairs])


def contextual_logits(hidden: Tensor, documents: list[int], params: dict[str, Tensor], eps: float = 1e-12) -> Tensor:
    """Last hidden states of a row `[S, D]` and its document numbers (0: padding) → `[S]`, 0 at padding.

    `params` are `norm.weight`, `norm.bias` `[D]`, `dense.weight` `[D, D]`, `dense.bias`, `output.weight` `[1, D]`,
    `output.bias` `[1]`.
    """
    logits = []
    for place, document in enumerate(documents):
        if document == 0:
            logits.append(torch.zeros((), dtype=torch.float64))
            continue
        summed = (hidden[documents.index(document)] + hidden[place]).unsqueeze(0)  # [1, D]
        normed = layer_norm(summed, params["norm.weight"], params["norm.bias"], eps)
        inner = gelu(linear(normed, params["dense.weight"], params["dense.bias"]))
        logits.append(linear(inner, params["output.weight"], params["output.bias"])[0, 0])
    return torch.stack(logits)
