"""Random draws of the objectives: the tokens of TCD, the heads of HCD, the noise of ELECTRA's replacements.

Every draw is a pure function of (seed, step, layer | sequence, position), so that every layout, rank and resumed run
draws the same. n′ = 0 or m′ = 0 means all.

Open reading: the paper draws TCD's tokens "uniformly in sequence order", which may mean evenly spaced tokens; ours are
random without replacement.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megatron_ddrp.config import ModelConfig, ObjectiveConfig
from megatron_ddrp.data.randomness import hash_uint64
from megatron_ddrp.model.stages import Draws


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
    num_documents = max(1, int(document_ids.max()))
    draws = Draws.none(len(document_ids), model.num_layers)
    token_mask, heads = draws.token_mask.expand(-1, num_documents, -1), draws.heads
    if objective.tcd_weight:
        token_mask = torch.from_numpy(
            np.stack(
                [
                    sample_tokens(document_ids == number, sequence_ids, position_ids, objective.tcd_tokens, seed, step)
                    for number in range(1, num_documents + 1)
                ],
                axis=1,
            )
        )
    if objective.hcd_weight:
        heads = torch.from_numpy(
            sample_heads(model.num_layers, model.num_attention_heads, objective.hcd_heads, seed, step)
        )
    keys = sample_keys(sequence_ids, position_ids, seed, step) if objective.generates else None
    return Draws(token_mask, heads, keys)


def sample_tokens(
    valid: np.ndarray, sequence_ids: np.ndarray, position_ids: np.ndarray, count: int, seed: int, step: int
) -> np.ndarray:
    """int64 `[batch, seq]`: 1 at `count` valid tokens of each row, without replacement; all where fewer or 0."""
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


def sample_keys(sequence_ids: np.ndarray, position_ids: np.ndarray, seed: int, step: int) -> Tensor:
    """int64 `[batch, seq]`: what each token's Gumbel noise grows from, on the CPU."""
    keys = hash_uint64(seed, "replace", np.uint64(step), sequence_ids, position_ids)
    return torch.from_numpy((keys >> np.uint64(32)).astype(np.uint32).view(np.int32).astype(np.int64))
