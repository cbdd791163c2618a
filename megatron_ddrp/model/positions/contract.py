"""The contract between position encodings and attention: an encoding returns data and adds no code path.

    A[b,h,i,j] = ( Q_i·K_j + Q_i·T^q[h, r(i,j)] + K_j·T^k[h, r(i,j)] ) · scale + B[b,h,i,j] + v[h, r(i,j)]

i is the query and j the key. Every relative encoding uses `r(i,j) = clip(i − j, lowest, highest) − lowest`, so two
integers decide which row of a table serves which pair. Bucketed distances fit as well: `table_row` names the offsets
that share a row of the tables. Q and K may be rotated first (`LayerPositions.rotate`). Attention never asks which
encoding it serves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

Sizes: TypeAlias = Any
"""Settings of a model that an encoding may read. `ModelConfig` and an exported folder's configuration have them:
`num_layers`, `hidden_size`, `num_attention_heads`, `seq_length`, `hidden_dropout`, `layernorm_epsilon`,
`init_method_std`, `relative_distance`, `direction_init`, `rope_theta`, `local_rope_theta` and `head_dim`."""


HEAD_DIMENSIONS: Mapping[str, int] = MappingProxyType({"query_table": 0, "key_table": 0, "bias": 1, "offset_bias": 0})
"""Tensor field of `PositionTerms` → dimension of its heads, which has size 1 if all heads share the tensor."""


@dataclass(frozen=True)
class PositionTerms:
    """Position part of the attention logits for one forward pass."""

    scale: float
    """Factor of the content and table terms."""
    query_table: Tensor | None = None
    """T^q `[1 or heads, num_relative, head_dim]`; 1 = shared by the heads. With `table_row`, `[1 or heads, rows,
    head_dim]`."""
    key_table: Tensor | None = None
    """T^k, of the same shape as T^q."""
    bias: Tensor | None = None
    """B `[1 or batch, 1 or heads, seq, seq]`, added without the scale."""
    lowest: int = 0
    """Smallest i − j with a row of its own; this row also serves all smaller ones."""
    highest: int = 0
    """Largest i − j with a row of its own; this row also serves all larger ones."""
    offset_bias: Tensor | None = None
    """v `[1 or heads, num_relative]`, added without the scale."""
    biases_compared: bool = True
    """True if HCD compares B and v with the rest of the logits. False suits encodings without parameters: their heads'
    biases are alike for every model."""
    table_row: Tensor | None = None
    """int64 `[num_relative]`, in any order: row of T^q and T^k for each offset. None: each offset has its own row."""

    def __post_init__(self) -> None:
        assert self.lowest <= 0 <= self.highest, f"offset 0 needs a row, got {self.lowest} … {self.highest}"
        rows = self.highest - self.lowest + 1
        tables = (self.query_table, self.key_table) if self.table_row is None else (self.table_row.unsqueeze(0),)
        for table in (*tables, self.offset_bias):
            if table is not None and table.shape[1] != rows:
                offsets = f"{rows} offsets lowest = {self.lowest} … highest = {self.highest}"
                raise ValueError(f"a table of {table.shape[1]} rows for the {offsets}")

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Tensor fields, in the order of `HEAD_DIMENSIONS`."""
        return tuple(getattr(self, name) for name in HEAD_DIMENSIONS)

    @property
    def content_only(self) -> bool:
        return all(tensor is None for tensor in self.tensors)

    @property
    def by_offset(self) -> PositionTerms:
        """These terms with one table row per offset, or themselves if no offsets share a row."""
        row = self.table_row
        if row is None:
            return self
        query_table, key_table = (None if x is None else x[:, row] for x in (self.query_table, self.key_table))
        return replace(self, query_table=query_table, key_table=key_table, table_row=None)

    @property
    def compared(self) -> PositionTerms:
        """Terms of the logits that HCD compares: these, without the biases unless `biases_compared`."""
        if self.biases_compared or (self.bias is None and self.offset_bias is None):
            return self
        return replace(self, bias=None, offset_bias=None)

    def within(self, window: int | None, causal: bool = False) -> PositionTerms:
        """Return the terms for attention over `reached_offsets`, without the rows of other offsets."""
        reached = reached_offsets(window, causal)
        lowest, highest = max(self.lowest, reached[0]), min(self.highest, reached[1])
        if (lowest, highest) == (self.lowest, self.highest):
            return self
        kept, row = slice(lowest - self.lowest, highest - self.lowest + 1), self.table_row
        query_table, key_table = (
            x if x is None or row is not None else x[:, kept] for x in (self.query_table, self.key_table)
        )
        offset_bias = None if self.offset_bias is None else self.offset_bias[:, kept]
        row = None if row is None else row[kept]
        fields = (query_table, key_table, self.bias, lowest, highest, offset_bias, self.biases_compared, row)
        return PositionTerms(self.scale, *fields)

    def with_tensors(self, tensors: Iterable[Tensor | None]) -> PositionTerms:
        """Return these terms with other tensor fields, in the order of `HEAD_DIMENSIONS`."""
        return replace(self, **dict(zip(HEAD_DIMENSIONS, tensors, strict=True)))  # type: ignore[arg-type]

    def map(self, function: Callable[[Tensor, int], Tensor]) -> PositionTerms:
        """Apply `function(tensor, dimension of its heads)` to every tensor field that is set, and return the terms."""
        pairs = zip(self.tensors, HEAD_DIMENSIONS.values(), strict=True)
        return self.with_tensors(None if x is None else function(x, dimension) for x, dimension in pairs)


UNBOUNDED = 2**31 - 1
"""Offset beyond those of any row."""


def reached_offsets(window: int | None, causal: bool) -> tuple[int, int]:
    """Return the smallest and the largest i − j over which a query attends, as `Attending` has `window`, `causal`."""
    farthest = UNBOUNDED if window is None else window
    return 0 if causal else -farthest, farthest


Map = Callable[[Tensor], Tensor]
"""Linear map of hidden states to this module's heads, `[.., hidden]` → `[.., heads · head_dim]`."""

NOTHING_BY_HEAD: Mapping[str, int] = MappingProxyType({})

PROJECTIONS_BY_HEAD: Mapping[str, int] = MappingProxyType(
    {f"{projection}.{kind}": 0 for projection in ("query", "key") for kind in ("weight", "bias")}
)
"""Weights and biases of linear maps `query` and `key` to all heads, for `by_head`."""


class LayerPositions(nn.Module):
    """Base of the part of an encoding that each layer has of its own."""

    is_local = False
    """True if the layer attends within `--local-attention` only; each layer sets it on its own part."""

    by_head: Mapping[str, int] = NOTHING_BY_HEAD
    """Parameters and buffers that belong to single heads → dimension of the heads."""

    gains: frozenset[str] = frozenset()
    """Parameters without weight decay, as in `PositionEncoding`."""

    uses_maps = False
    """True if `of_layer` applies the layer's maps; then every tensor of `terms` has a separate part per head."""

    def __init__(self, config: Sizes) -> None:
        super().__init__()

    @property
    def constants(self) -> tuple[float, ...]:
        """Numbers of this part that training may change; CUDA graphs, which contain them, are then captured anew."""
        return ()

    def forward(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return this layer's tensors for the tensors that layers share; by default they are the same."""
        return tensors

    def of_layer(self, tensors: tuple[Tensor, ...], query: Map, key: Map) -> tuple[Tensor, ...]:
        """Return `forward`'s result. A part that needs the layer's maps of queries and keys overrides this."""
        return self(tensors)

    def rotate(self, states: Tensor, position_ids: Tensor) -> Tensor:
        """Rotate queries or keys `[batch, heads, seq, head_dim]` by positions `[batch, seq]`; default: no rotation."""
        return states


class PositionEncoding(nn.Module):
    """Base of the encodings that `config/registry.py` names.

    `forward` computes the tensors that depend on parameters, once per pass for a shared table or once per layer;
    `terms` gives them their roles in the formula. Only the tensors are sent from one pipeline stage to the next.
    """

    is_relative = False
    """True if the logits depend on i − j; the analysis of the triangle effect accepts such encodings."""

    relative_distance: int | None = 64
    """Default of `--relative-distance`; None for an encoding that refuses the flag."""

    in_logits = True
    """True if the encoding adds anything to the attention logits."""

    key_bias = True
    """Default of `--key-bias`: whether the linear map of the keys has a bias."""

    adds_absolute_embedding = False
    """True if, by default, a learned absolute position embedding is added to the input (`--absolute-embedding`)."""

    decodes_absolute = False
    """True if, by default, absolute positions are added just before the masked-LM head (enhanced mask decoder)."""

    limits_length = False
    """True if tokens beyond `seq_length` have no position."""

    any_length = False
    """True if neither weights nor terms depend on `seq_length`, so that a run may go on with rows of another length."""

    by_head: Mapping[str, int] = NOTHING_BY_HEAD
    """Parameters and buffers that belong to single heads → dimension of the heads.

    All heads share the other parameters. If any parameter belongs to single heads, here or in `layer_part`, every
    tensor of `terms` must have a separate part per head.
    """

    gains: frozenset[str] = frozenset()
    """Parameters without weight decay, because 0 is not a small value for them: factors around 1, like a LayerNorm's
    weights, and arguments of a softplus."""

    layer_part: type[LayerPositions] = LayerPositions
    """Class of the part that each layer has of its own; it maps the tensors before `terms` names them."""

    def __init__(self, config: Sizes) -> None:
        super().__init__()

    def forward(self, position_ids: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors of `terms` for `position_ids` int64 `[batch, seq]`; integer tensors get no gradient."""
        return ()

    def of_rows(self, position_ids: Tensor, restarts: bool) -> tuple[Tensor, ...]:
        """Return `forward`'s result; `restarts` is true if a row restarts its positions after its first token.

        An encoding that depends on `restarts` overrides this, since reading `position_ids` means waiting for a GPU.
        """
        return self(position_ids)

    @staticmethod
    def refusal(config: Sizes) -> str | None:
        """Return the reason why the encoding cannot serve a model of these sizes, in one line, or None if it can."""
        return None

    @staticmethod
    def terms(config: Sizes, tensors: tuple[Tensor, ...]) -> PositionTerms:
        """Return the terms made of the tensors from `forward`."""
        return PositionTerms(scale=config.head_dim**-0.5)


def initialise_table(rows: int, width: int, config: Sizes) -> nn.Parameter:
    """Return a learned table `[rows, width]`, drawn from normal(0, `init_method_std`)."""
    return nn.Parameter(torch.empty(rows, width).normal_(std=config.init_method_std))
