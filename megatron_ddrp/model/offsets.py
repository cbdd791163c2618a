"""A start at which each head attends to one place beside its own: `--attention-init offsets` (ours).

From random weights, absolute positions need tens of millions of tokens before attention uses them (docs/plateau.md). A
shift of sinusoids is a linear map (Vaswani et al., arXiv:1706.03762, section 3.5), so projections can begin with it:

    p_i[2k], p_i[2k+1] = √2·σ·sin(ω_k i + k), √2·σ·cos(ω_k i + k),    ω_k = π/10^((k + ½)/(D/2)),  0 ≤ k < D/2
    W^K ← W^K + g·P_h        W^Q ← W^Q + g·R_h P_h        so Q_i·K_j ∝ Σ_k cos(ω_k (i + o_h − j)) + random terms

P_h picks the pairs k = h, h + H, h + 2H, … for head h of H, and R_h turns each by ω_k·o_h, so that the head attends to
j = i + o_h, with o = −1, 1, −2, 2, −3, … Wavelengths from 2 to 20 places make this maximum one place wide. W^K and W^Q
on the right are the random ones, σ is `init_method_std`; the phase k keeps the LayerNorm of the sums even. Everything
is trained as usual. Other starts with a structure set the mean of W^Q(W^K)ᵀ (mimetic initialisation, Trockman and
Kolter, arXiv:2305.09828).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from megatron_ddrp.model.encoder import EncoderLayer

GAIN = 1.5
"""g. Half of it is too little: random terms then hide the maximum."""


def offsets() -> Iterator[int]:
    """Yield the offset of each head: −1, 1, −2, 2, …"""
    for distance in itertools.count(1):
        yield from (-distance, distance)


@torch.no_grad()
def start_at_offsets(positions: nn.Embedding, layers: Iterable[EncoderLayer], std: float) -> None:
    """Set the table of positions, and add the maps that read it to the queries and keys of every head."""
    places, width = positions.weight.shape
    number = torch.arange(width // 2, device=positions.weight.device)
    frequencies = math.pi * 10 ** (-(number + 0.5) / (width // 2))  # [width/2]
    angles = torch.arange(places, device=number.device).unsqueeze(1) * frequencies + number  # [places, width/2]
    waves = torch.stack((angles.sin(), angles.cos()), -1).flatten(1)  # [places, width], but for an odd last column
    positions.weight[:, : waves.shape[1]] = math.sqrt(2) * std * waves
    for layer in layers:
        query, key, size = layer.attention.query.weight, layer.attention.key.weight, layer.attention.head_dim
        heads = width // size
        for head, offset in zip(range(heads), offsets(), strict=False):
            pairs = number[head::heads][: size // 2]
            rows = slice(head * size, head * size + 2 * len(pairs))
            key[rows] += GAIN * shifted_pairs(pairs, frequencies, 0, width)
            query[rows] += GAIN * shifted_pairs(pairs, frequencies, offset, width)


def shifted_pairs(pairs: Tensor, frequencies: Tensor, offset: int, width: int) -> Tensor:
    """Return the map from p_i to these pairs of p_{i + offset}: `[2·pairs, width]`."""
    angles = frequencies[pairs] * offset
    turn = torch.stack((angles.cos(), angles.sin(), -angles.sin(), angles.cos()), -1).view(-1, 2, 2)
    picked = torch.eye(width, device=frequencies.device)[: 2 * len(frequencies)].view(-1, 2, width)[pairs]
    return (turn @ picked).flatten(0, 1)
