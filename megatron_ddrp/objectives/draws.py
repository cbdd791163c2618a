"""Random draws of the objectives: TCD's tokens, HCD's heads, the noise of ELECTRA's replacements.

Every draw is a pure function of (seed, step, layer | sequence, position), so every layout, rank and resumed run draws
the same. n′ = 0 or m′ = 0 means all.

Open reading: the paper draws TCD's tokens "uniformly in sequence order", which may mean evenly spaced tokens. Ours are
random, without replacement.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megatron_ddrp.data.randomness import hash_uint64


def sample_tokens(
    valid: np.ndarray, sequence_ids: np.ndarray, position_ids: np.ndarray, count: int, seed: int, step: int
) -> np.ndarray:
    """Return int64 `[batch, seq]`: 1 at `count` valid tokens of each row, drawn without replacement.

    A row with fewer valid tokens has all of them, as every row has if `count` is 0.
    """
    if count == 0:
        return valid.astype(np.int64)
    keys = hash_uint64(seed, "tcd", np.uint64(step), sequence_ids, position_ids)  # [batch, seq]
    keys[~valid] = np.iinfo(np.uint64).max
    rank = keys.argsort(axis=-1, kind="stable").argsort(axis=-1, kind="stable")  # place of each token in random order
    return ((rank < count) & valid).astype(np.int64)


def sample_heads(num_layers: int, num_heads: int, count: int, seed: int, step: int) -> np.ndarray:
    """Return int64 `[layers, count]`: a separate draw of heads for each layer, ascending; all heads if `count` is 0."""
    count = count or num_heads
    layer, head = np.meshgrid(np.arange(num_layers), np.arange(num_heads), indexing="ij")
    keys = hash_uint64(seed, "hcd", np.uint64(step), layer, head)  # [layers, heads]
    return np.sort(keys.argsort(axis=-1, kind="stable")[:, :count], axis=-1).astype(np.int64)


def sample_keys(sequence_ids: np.ndarray, position_ids: np.ndarray, seed: int, step: int) -> Tensor:
    """Return int64 `[batch, seq]` on the CPU: the key of each token's Gumbel noise."""
    keys = hash_uint64(seed, "replace", np.uint64(step), sequence_ids, position_ids)
    return torch.from_numpy((keys >> np.uint64(32)).astype(np.uint32).view(np.int32).astype(np.int64))
