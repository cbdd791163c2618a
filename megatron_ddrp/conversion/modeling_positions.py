"""The position encodings of an exported model; one of the files that travel inside its folder, see modeling_ddrp.py.

    A[h,i,j] = ( Q_i·K_j + Q_i·T^q[h, r(i,j)] + K_j·T^k[h, r(i,j)] ) · scale + B[h,i,j]        i = query, j = key
    r(i,j)   = clip(i − j, lowest, highest) − lowest

Each encoding gives its own T^q, T^k, B, scale and bounds; attention never asks which one it serves.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron_ddrp.conversion.configuration_ddrp import DdrpConfig


def layer_norm(config: DdrpConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)


def split_heads(states: Tensor, head_dim: int) -> Tensor:
    """`[.., seq, hidden]` → `[.., heads, seq, head_dim]`."""
    return states.unflatten(-1, (-1, head_dim)).transpose(-2, -3)


class PositionTerms(NamedTuple):
    """The position part of one layer's logits."""

    scale: float
    query_table: Tensor | None = None
    """T^q `[1 or heads, rows, head_dim]`."""
    key_table: Tensor | None = None
    """T^k, shaped as T^q."""
    bias: Tensor | None = None
    """B `[heads, seq, seq]`, added unscaled."""
    lowest: int = 0
    highest: int = 0


class Positions(nn.Module):
    """Base of the encodings: content alone."""

    limits_length = False
    """Whether there are `max_position_embeddings` positions and no more."""

    def __init__(self, config: DdrpConfig) -> None:
        super().__init__()
        self.head_dim, self.distances = config.head_dim, config.relative_distance

    def forward(self, seq: int) -> PositionTerms:
        return PositionTerms(self.head_dim**-0.5)


class Absolute(Positions):
    """Nothing in the logits: learned vectors are added to the input instead."""

    limits_length = True


class BertR(Positions):
    """T^q[c + r_s] = K^r[c + r_s], −r_s ≤ c < r_s."""

    def __init__(self, config: DdrpConfig) -> None:
        super().__init__(config)
        self.relative = nn.Parameter(torch.zeros(2 * self.distances, self.head_dim))

    def forward(self, seq: int) -> PositionTerms:
        table = self.relative.unsqueeze(0)
        return PositionTerms(self.head_dim**-0.5, table, lowest=-self.distances, highest=self.distances - 1)


class Ddrp(Positions):
    """T^q[c + reach] = D[ρ] ⊙ K^rd[|c|], ρ = 0, 1, 2 for c = 0, c < 0, c > 0; `direction` is D, `distance` K^rd."""

    def __init__(self, config: DdrpConfig) -> None:
        super().__init__(config)
        self.direction = nn.Parameter(torch.zeros(3, self.head_dim))
        self.distance = nn.Parameter(torch.zeros(self.distances, self.head_dim))

    def forward(self, seq: int) -> PositionTerms:
        reach = max(self.distances - 1, 1)
        offset = torch.arange(-reach, reach + 1, device=self.distance.device)
        direction = torch.where(offset < 0, 1, torch.where(offset > 0, 2, 0))
        table = self.direction[direction] * self.distance[offset.abs().clamp_max(self.distances - 1)]
        return PositionTerms(self.head_dim**-0.5, table.unsqueeze(0), lowest=-reach, highest=reach)


class TupeA(Positions):
    """B[i,j] = (p_{i+1} U^Q)·(p_{j+1} U^K) / √(2d), [CLS] untied by rows 1 (as a key) and 0 (as a query) of p."""

    limits_length = True

    def __init__(self, config: DdrpConfig) -> None:
        super().__init__(config)
        self.table = nn.Parameter(torch.zeros(config.max_position_embeddings + 1, config.hidden_size))
        self.norm = layer_norm(config)
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, seq: int) -> PositionTerms:
        return PositionTerms((2 * self.head_dim) ** -0.5, bias=self.bias(seq))

    def bias(self, seq: int) -> Tensor:
        """B `[heads, seq, seq]`."""
        states = self.norm(self.table[: seq + 1])
        query, key = (split_heads(projection(states), self.head_dim) for projection in (self.query, self.key))
        scores = (query * (2 * self.head_dim) ** -0.5) @ key.transpose(-1, -2)  # [heads, seq + 1, seq + 1]
        return untie_cls(scores[:, 1:, 1:], scores[:, 1, 1], scores[:, 0, 0])


class TupeR(TupeA):
    """TUPE-A + T[bucket(j − i)], with T[32] where the key is [CLS] and T[16] where the query is."""

    def __init__(self, config: DdrpConfig) -> None:
        super().__init__(config)
        self.relative = nn.Parameter(torch.zeros(33, config.num_attention_heads))

    def bias(self, seq: int) -> Tensor:
        position = torch.arange(seq, device=self.relative.device)
        buckets = relative_bucket(position[None, :] - position[:, None], self.distances)  # [seq, seq]
        by_bucket = self.relative[buckets].permute(2, 0, 1)  # [heads, seq, seq]
        return super().bias(seq) + untie_cls(by_bucket, self.relative[32], self.relative[16])


class Deberta(Positions):
    """`relative` is P `[2k, hidden]`, which each layer projects to T^q and T^k; −k ≤ c < k."""

    def __init__(self, config: DdrpConfig) -> None:
        super().__init__(config)
        self.relative = nn.Parameter(torch.zeros(2 * self.distances, config.hidden_size))

    def forward(self, seq: int) -> PositionTerms:
        scale, reach = (3 * self.head_dim) ** -0.5, self.distances
        return PositionTerms(scale, self.relative, self.relative, lowest=-reach, highest=reach - 1)


class RelativeProjections(nn.Module):
    """One layer's T^q = P W^{K,r} and T^k = P W^{Q,r} of DeBERTa."""

    def __init__(self, config: DdrpConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.key = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.query = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, terms: PositionTerms) -> PositionTerms:
        table = self.dropout(terms.query_table)
        keys, queries = (split_heads(projection(table), self.head_dim) for projection in (self.key, self.query))
        return terms._replace(query_table=keys, key_table=queries)


def untie_cls(bias: Tensor, to_cls: Tensor, from_cls: Tensor) -> Tensor:
    """`[heads, seq, seq]` with column 0 set to `to_cls` `[heads]`, then row 0 to `from_cls`."""
    is_cls = torch.arange(bias.shape[-1], device=bias.device) == 0
    bias = torch.where(is_cls, to_cls[:, None, None], bias)
    return torch.where(is_cls[:, None], from_cls[:, None, None], bias)


def relative_bucket(offset: Tensor, largest: int) -> Tensor:
    """T5's bucket of j − i: 16 a direction, exact below 8, then logarithmic, one bucket from `largest` on."""
    distance = offset.abs()
    far = 8 + ((distance.clamp_min(1).double() / 8).log() / math.log(max(largest, 9) / 8) * 8).long()
    near = torch.where(distance < 8, distance, far.clamp_max(15))
    return torch.where(offset > 0, 16, 0) + torch.where(distance < largest, near, 15)


ENCODINGS: dict[str, type[Positions]] = {
    "absolute": Absolute,
    "bert-r": BertR,
    "ddrp": Ddrp,
    "tupe-a": TupeA,
    "tupe-r": TupeR,
    "deberta": Deberta,
}


def position_logits(content: Tensor, query: Tensor, key: Tensor, terms: PositionTerms) -> Tensor:
    """A `[batch, heads, seq, seq]` from `content` = Q·K; `query`, `key` are `[batch, heads, seq, head_dim]`."""
    position = torch.arange(key.shape[2], device=key.device)
    row = (position[:, None] - position[None, :]).clamp(terms.lowest, terms.highest) - terms.lowest  # [seq, seq]
    logits, row = content, row.expand_as(content)
    if terms.query_table is not None:
        logits = logits + (query @ terms.query_table.transpose(-1, -2)).gather(-1, row)
    if terms.key_table is not None:
        logits = logits + (terms.key_table @ key.transpose(-1, -2)).gather(-2, row)
    return logits * terms.scale if terms.bias is None else logits * terms.scale + terms.bias
