"""ELECTRA's pure functions (Clark et al., arXiv:2003.10555): sampled replacements and replaced-token detection.

    x̂_t ~ softmax(generator logits_t) at the selected tokens t,  x_t elsewhere; no gradient through the sampling
    RTD = − Σ_t [x̂_t ≠ x_t] log p_t + [x̂_t = x_t] log(1 − p_t)   over all tokens that are not padding

A sampled token equal to the original counts as original. Sampling takes Gumbel's argmax, argmax_v logits_v + g_v. The
noise g_v is a counter-based hash of (the token's key, v), so every layout, also one that splits the vocabulary, draws
the same replacements from the same keys.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ddrp.data.batches.batch import IGNORED_LABEL

_CHUNK, _GPU_CHUNK = 1 << 19, 1 << 28
"""Logits per chunk: on a CPU a chunk's noise fits in a core's cache; on a GPU it needs few launches and 2 GiB."""

_GOLDEN, _FIRST, _SECOND = -1640531527, 0x21F0AAAD, -749094293
"""Odd constant that spreads the pieces, and the two factors of a 32-bit finaliser like SplitMix's."""


def gumbel_argmax(logits: Tensor, keys: Tensor, first_piece: int = 0) -> tuple[Tensor, Tensor]:
    """Sample a piece for each row from softmax(logits), temperature 1.

    `logits` `[tokens, pieces]` has one column per piece, starting with `first_piece`; `keys` int64 `[tokens]` comes
    from `sample_keys`. Return (winning score, winning column), both `[tokens]`. If several calls share the vocabulary,
    the largest score wins.
    """
    tokens, pieces = logits.shape
    scores = logits.new_empty(tokens, dtype=torch.float32)
    winners = keys.new_empty(tokens)
    numbers = torch.arange(first_piece, first_piece + pieces, dtype=torch.int32, device=logits.device)
    spread = numbers.add_(1).mul_(_GOLDEN)  # [pieces]
    rows = max(1, (_CHUNK if logits.device.type == "cpu" else _GPU_CHUNK) // max(1, pieces))
    for begin in range(0, tokens, rows):
        part = slice(begin, begin + rows)
        noise = _gumbel(keys[part].to(torch.int32).unsqueeze(1) ^ spread)
        noise += logits[part].detach()
        scores[part], winners[part] = noise.max(-1)
    return scores, winners


def _gumbel(bits: Tensor) -> Tensor:
    """Return standard Gumbel noise −log(−log u), fp32, from int32 counters, which are overwritten.

    u = 1 − (n + ½)/2³¹ for the hash n in 0 … 2³¹ − 1: large values, which win, come
    from small n, which fp32 holds exactly.
    """
    for factor, shift in ((_FIRST, 16), (_SECOND, 15)):
        bits ^= (bits >> shift).bitwise_and_(0xFFFFFFFF >> shift)
        bits *= factor
    bits ^= (bits >> 15).bitwise_and_(0xFFFFFFFF >> 15)
    complement = bits.bitwise_and_(0x7FFFFFFF).to(torch.float32).add_(0.5).mul_(-(2.0**-31))  # −(1 − u)
    return complement.log1p_().neg_().log_().neg_()


def first_of_run(hidden: Tensor, runs: Tensor) -> Tensor:
    """Return for each token the hidden state of its run's first token; this is [CLS] if the run is a document.

    `hidden` `[batch, seq, hidden]`, `runs` int32 `[runs + 1]` as in `Layout` → `[batch, seq, hidden]`.
    """
    flat = hidden.flatten(0, 1)
    places = torch.arange(len(flat), dtype=runs.dtype, device=runs.device)
    first = runs.index_select(0, torch.searchsorted(runs, places, right=True) - 1)  # [batch · seq]
    return F.embedding(first, flat).view_as(hidden)  # unlike indexing, its gradient sums rows without atomic additions


def replace(originals: Tensor, predicted: Tensor, sampled: Tensor) -> Tensor:
    """Return `originals` int64 `[batch, seq]` with `sampled` `[num_predicted]` at the flat places `predicted`."""
    return originals.flatten().index_copy(0, predicted, sampled).view_as(originals)


def rtd_targets(replaced: Tensor, originals: Tensor, document_ids: Tensor) -> Tensor:
    """Return int64 `[batch, seq]`: 1 for replaced tokens, 0 for original ones, `IGNORED_LABEL` at padding."""
    return (replaced != originals).long().masked_fill(document_ids == 0, IGNORED_LABEL)


def rtd_sums(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (loss, correct decisions, replaced tokens, replaced tokens found), summed over the tokens with a target.

    `logits` of "replaced" and `targets` `[batch, seq]`, see `rtd_targets` → fp32 (or fp64) scalars.
    """
    logits = logits if logits.dtype.itemsize >= 4 else logits.float()
    valid, is_replaced = targets != IGNORED_LABEL, targets == 1
    losses = F.binary_cross_entropy_with_logits(logits, is_replaced.to(logits.dtype), reduction="none")
    judged_replaced = logits.detach() > 0
    correct = ((judged_replaced == is_replaced) & valid).sum()
    found = (judged_replaced & is_replaced).sum()
    counts = (count.to(losses.dtype) for count in (correct, is_replaced.sum(), found))
    return (losses * valid).sum(), *counts  # type: ignore[return-value]
