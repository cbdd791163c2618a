"""MTH = MLM + α1·TCD + α2·HCD ("Better Pre-Training by Reducing Representation Confusion", eq. 17–19).

TCD is the mean cosine of the last hidden states of n′ sampled tokens, HCD that of the pre-softmax logits of m′ sampled
heads, averaged over layers. Means over pairs come from closed forms, exact and without a pairwise matrix:

    Σ_{i<j} cos(h_i, h_j) = (‖Σ_i ĥ_i‖² − n)/2,  ĥ the unit vectors;
    ⟨A¹,A²⟩ = ⟨Q¹ᵀQ², K¹ᵀK²⟩ for content-only heads, d×d matrices, padded rows zeroed.

A flattened head is the vector of its valid×valid entries; padding never enters. Sampling is a pure function of (seed,
step, layer | sequence, position), so every layout, rank and resumed run draws the same. n′ = 0 or m′ = 0 means all.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_ddrp.config import ModelConfig, ObjectiveConfig
from megatron_ddrp.data.randomness import hash_uint64

SMALLEST_NORM = 1e-12
"""Below this a vector counts as zero and its cosine with anything as 0."""


@dataclass(frozen=True)
class Draws:
    """What TCD and HCD look at in one step. Width 0 switches the term off."""

    token_mask: Tensor
    """int64 `[batch, seq]`, 1 at the sampled tokens; or `[batch, 0]`."""
    heads: Tensor
    """int64 `[layers, m′]` head numbers, ascending; or `[layers, 0]`."""

    @classmethod
    def none(cls, batch_size: int, num_layers: int, device: torch.device | None = None) -> Draws:
        """Neither term."""
        return cls(
            torch.empty(batch_size, 0, dtype=torch.long, device=device),
            torch.empty(num_layers, 0, dtype=torch.long, device=device),
        )


def draw(
    document_ids: np.ndarray,
    sequence_ids: np.ndarray,
    position_ids: np.ndarray,
    objective: ObjectiveConfig,
    model: ModelConfig,
    seed: int,
    step: int,
) -> Draws:
    """The draws of one micro-batch (arrays `[batch, seq]`) at one step, on the CPU."""
    draws = Draws.none(len(document_ids), model.num_layers)
    token_mask, heads = draws.token_mask, draws.heads
    if objective.tcd_weight:
        token_mask = torch.from_numpy(
            sample_tokens(document_ids, sequence_ids, position_ids, objective.tcd_tokens, seed, step)
        )
    if objective.hcd_weight:
        heads = torch.from_numpy(
            sample_heads(model.num_layers, model.num_attention_heads, objective.hcd_heads, seed, step)
        )
    return Draws(token_mask, heads)


def sample_tokens(
    document_ids: np.ndarray, sequence_ids: np.ndarray, position_ids: np.ndarray, count: int, seed: int, step: int
) -> np.ndarray:
    """int64 `[batch, seq]`: 1 at `count` valid tokens of each sequence, without replacement; all where fewer or 0."""
    valid = document_ids > 0
    if count == 0:
        return valid.astype(np.int64)
    keys = hash_uint64(seed, "tcd", np.uint64(step), sequence_ids, position_ids)  # [batch, seq]
    keys[~valid] = np.iinfo(np.uint64).max
    rank = keys.argsort(axis=-1, kind="stable").argsort(axis=-1, kind="stable")  # place of each token in random order
    return ((rank < count) & valid).astype(np.int64)


def sample_heads(num_layers: int, num_heads: int, count: int, seed: int, step: int) -> np.ndarray:
    """int64 `[layers, count]`: a fresh draw of heads for each layer, ascending; all of them where `count` is 0."""
    count = count or num_heads
    layer, head = np.meshgrid(np.arange(num_layers), np.arange(num_heads), indexing="ij")
    keys = hash_uint64(seed, "hcd", np.uint64(step), layer, head)  # [layers, heads]
    return np.sort(keys.argsort(axis=-1, kind="stable")[:, :count], axis=-1).astype(np.int64)


def token_cosine(hidden: Tensor, token_mask: Tensor) -> Tensor:
    """Mean pairwise cosine of the marked tokens, eq. 17; 0 for a sequence with fewer than two.

    `hidden` `[batch, seq, hidden]`, `token_mask` `[batch, seq]` → fp32 (or fp64) `[batch]`.
    """
    weights = token_mask.to(hidden.dtype)
    if hidden.dtype.itemsize < 4:
        hidden = hidden.float()
    # Σ_i ĥ_i as one matrix-vector product: unit vectors are never stored.
    inverse_norms = hidden.pow(2).sum(-1).clamp_min(SMALLEST_NORM**2).rsqrt() * weights  # [batch, seq]
    total = torch.bmm(inverse_norms.unsqueeze(1).to(hidden.dtype), hidden).squeeze(1)  # [batch, hidden]
    count = token_mask.sum(-1).to(hidden.dtype)  # [batch]
    pairs = count * (count - 1)
    return torch.where(pairs > 0, (total.pow(2).sum(-1) - count) / pairs.clamp_min(1), 0.0)


def cosine_of_gram(gram: Tensor) -> Tensor:
    """Mean pairwise cosine of m′ heads from their inner products: `[batch, m′, m′]` → `[batch]`."""
    norms = gram.diagonal(dim1=-2, dim2=-1).clamp_min(SMALLEST_NORM**2).sqrt()  # [batch, m′]
    cosines = gram / (norms.unsqueeze(-1) * norms.unsqueeze(-2))
    num_heads = gram.shape[-1]
    return (cosines.sum((-2, -1)) - cosines.diagonal(dim1=-2, dim2=-1).sum(-1)) / (num_heads * (num_heads - 1))


def content_gram(query: Tensor, key: Tensor, valid: Tensor, scale: float) -> Tensor:
    """Inner products of content-only heads, scale² · ⟨QᵃᵀQᵇ, KᵃᵀKᵇ⟩.

    `query`, `key` `[batch, m′, seq, head_dim]`, `valid` bool `[batch, seq]` → `[batch, m′, m′]`.
    """
    batch, num_heads, _, head_dim = query.shape

    def feature_products(x: Tensor) -> Tensor:
        flat = (x * valid[:, None, :, None]).transpose(1, 2).flatten(2)  # [batch, seq, m′·d]
        return (flat.transpose(1, 2) @ flat).view(batch, num_heads, head_dim, num_heads, head_dim)

    products = feature_products(query) * feature_products(key)
    return products.sum((2, 4)) * scale**2


def content_cosine_of_all(query: Tensor, key: Tensor, valid: Tensor) -> Tensor:
    """Mean pairwise cosine of *all* content-only heads by one S×S buffer, Σ_a A_a/‖A_a‖ → `[batch]`."""
    query, key = (x * valid[:, None, :, None] for x in (query, key))
    gram = ((query.transpose(-1, -2) @ query) * (key.transpose(-1, -2) @ key)).sum((-2, -1))  # [batch, heads] ‖A_a‖²
    unit = query * gram.clamp_min(SMALLEST_NORM**2).rsqrt()[..., None, None]
    total = unit.transpose(1, 2).flatten(2) @ key.transpose(1, 2).flatten(2).transpose(1, 2)  # [batch, seq, seq]
    num_heads = query.shape[1]
    return (total.pow(2).sum((-2, -1)) - num_heads) / (num_heads * (num_heads - 1))


def logits_cosine(logits: Tensor, allowed: Tensor) -> Tensor:
    """Mean pairwise cosine of heads whose logits are at hand, over the allowed pairs.

    `logits` `[batch, m′, seq, seq]`, `allowed` bool `[batch, 1, seq, seq]` → `[batch]`. One S×S buffer a sequence.
    """
    logits = logits.masked_fill(~allowed, 0.0)
    inverse_norms = logits.pow(2).sum((-2, -1)).clamp_min(SMALLEST_NORM**2).rsqrt()  # [batch, m′]
    total = torch.einsum("bhij,bh->bij", logits, inverse_norms)  # [batch, seq, seq]
    num_heads = logits.shape[1]
    return (total.pow(2).sum((-2, -1)) - num_heads) / (num_heads * (num_heads - 1))
