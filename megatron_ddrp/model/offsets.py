"""A start at which each head attends to one place beside its own: `--attention-init offsets` (ours).

From random weights, absolute positions need tens of millions of tokens before attention uses them
(docs/lab/plateau.md). A shift of sinusoids is a linear map (Vaswani et al., arXiv:1706.03762, section 3.5), so
projections can begin with it:

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
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from megatron_ddrp.config import ModelConfig
from megatron_ddrp.model.encoder import EncoderLayer

GAIN = 1.5
"""g. Half of it is too little: random terms then hide the maximum."""


def offsets() -> Iterator[int]:
    """Yield the offset of each head: −1, 1, −2, 2, …"""
    for distance in itertools.count(1):
        yield from (-distance, distance)


@torch.no_grad()
def start_at_offsets(positions: nn.Embedding, layers: Iterable[EncoderLayer], config: ModelConfig) -> None:
    """Set the table of positions, and add the maps that read it to the queries and keys of every layer."""
    places, width = positions.weight.shape
    number = torch.arange(width // 2, device=positions.weight.device)
    frequencies = math.pi * 10 ** (-(number + 0.5) / (width // 2))  # [width/2]
    angles = torch.arange(places, device=number.device).unsqueeze(1) * frequencies + number  # [places, width/2]
    waves = torch.stack((angles.sin(), angles.cos()), -1).flatten(1)  # [places, width], but for an odd last column
    positions.weight[:, : waves.shape[1]] = math.sqrt(2) * config.init_method_std * waves
    shifts = list(itertools.islice(offsets(), config.num_attention_heads))
    key, query = (GAIN * shifted_pairs(frequencies, some, config) for some in ([0] * len(shifts), shifts))
    for layer in layers:
        layer.attention.key.weight += key
        layer.attention.query.weight += query


def shifted_pairs(frequencies: Tensor, shifts: Sequence[int], config: ModelConfig) -> Tensor:
    """Return the map from p_i to the pairs of every head h in p_{i + shifts[h]}: `[hidden, hidden]`."""
    result = torch.zeros(config.hidden_size, config.hidden_size, device=frequencies.device)
    for head, shift in enumerate(shifts):
        pair = torch.arange(len(frequencies), device=result.device)[head :: len(shifts)][: config.head_dim // 2]
        sine, cosine = 2 * pair, 2 * pair + 1
        row = head * config.head_dim + 2 * torch.arange(len(pair), device=result.device)
        turn = frequencies[pair] * shift
        result[row, sine], result[row, cosine] = turn.cos(), turn.sin()
        result[row + 1, sine], result[row + 1, cosine] = -turn.sin(), turn.cos()
    return result
