"""The contract between position encodings and the one attention: an encoding hands over data, not a code path.

    A[b,h,i,j] = ( Q_i·K_j + Q_i·T^q[h, r(i,j)] + K_j·T^k[h, r(i,j)] ) · scale + B[b,h,i,j] + v[h, r(i,j)]

i is the query and j the key. Every relative encoding uses `r(i,j) = clip(i − j, lowest, highest) − lowest`, so two
integers say which row of a table serves which pair. Bucketed distances fit as well: `table_row` says which offsets
share a row of the tables. Q and K may be rotated first (`LayerPositions.rotate`). Attention never asks which encoding
it serves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor, nn


class Sizes(Protocol):
    """The settings of a model that an encoding may read. `ModelConfig` has them, and so has an exported folder's."""

    @property
    def num_layers(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def seq_length(self) -> int: ...
    @property
    def hidden_dropout(self) -> float: ...
    @property
    def layernorm_epsilon(self) -> float: ...
    @property
    def init_method_std(self) -> float: ...
    @property
    def relative_distance(self) -> int: ...
    @property
    def direction_init(self) -> str: ...
    @property
    def rope_theta(self) -> float: ...
    @property
    def local_rope_theta(self) -> float | None: ...
    @property
    def head_dim(self) -> int: ...


HEAD_DIMENSIONS: Mapping[str, int] = MappingProxyType({"query_table": 0, "key_table": 0, "bias": 1, "offset_bias": 0})
"""Tensor fields of `PositionTerms` → the dimension along which their heads lie, of size 1 where heads share."""


@dataclass(frozen=True)
class PositionTerms:
    """The position part of the attention logits for one forward pass."""

    scale: float
    """Factor on the content and table terms."""
    query_table: Tensor | None = None
    """T^q `[1 or heads, num_relative, head_dim]`; 1 = shared by the heads. `[1 or heads, rows, head_dim]` with
    `table_row`."""
    key_table: Tensor | None = None
    """T^k, shaped as T^q."""
    bias: Tensor | None = None
    """B `[1 or batch, heads, seq, seq]`, added unscaled."""
    lowest: int = 0
    """Smallest i − j with a row of its own; this row also serves all smaller ones."""
    highest: int = 0
    """Largest i − j with a row of its own; this row also serves all larger ones."""
    offset_bias: Tensor | None = None
    """v `[1 or heads, num_relative]`, added unscaled."""
    biases_compared: bool = True
    """Whether HCD compares B and v with the rest of the logits. An encoding without parameters says no: its heads'
    biases are alike whatever the model learns."""
    table_row: Tensor | None = None
    """int64 `[num_relative]`, never falling: the row of T^q and T^k that serves each offset. None: each has its own."""

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
        """The tensor fields, in the order of `HEAD_DIMENSIONS`."""
        return tuple(getattr(self, name) for name in HEAD_DIMENSIONS)

    @property
    def content_only(self) -> bool:
        return all(tensor is None for tensor in self.tensors)

    @property
    def by_offset(self) -> PositionTerms:
        """The same terms with a row of the tables for each offset: these themselves, unless offsets share rows."""
        row = self.table_row
        if row is None:
            return self
        query_table, key_table = (None if x is None else x[:, row] for x in (self.query_table, self.key_table))
        return replace(self, query_table=query_table, key_table=key_table, table_row=None)

    @property
    def compared(self) -> PositionTerms:
        """The terms of the logits that HCD compares: these themselves, unless it leaves out the biases."""
        if self.biases_compared or (self.bias is None and self.offset_bias is None):
            return self
        return replace(self, bias=None, offset_bias=None)

    def within(self, window: int) -> PositionTerms:
        """Return the terms for attention over the offsets −window, …, window alone: other rows are left out."""
        lowest, highest = max(self.lowest, -window), min(self.highest, window)
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
        """Return the terms with other tensor fields, given in the order of `HEAD_DIMENSIONS`."""
        return replace(self, **dict(zip(HEAD_DIMENSIONS, tensors, strict=True)))  # type: ignore[arg-type]

    def map(self, function: Callable[[Tensor, int], Tensor]) -> PositionTerms:
        """Apply `function(tensor, dimension of its heads)` to every tensor field that is set."""
        pairs = zip(self.tensors, HEAD_DIMENSIONS.values(), strict=True)
        return self.with_tensors(None if x is None else function(x, dimension) for x, dimension in pairs)


Map = Callable[[Tensor], Tensor]
"""A linear map of hidden states onto the heads that are here, `[.., hidden]` → `[.., heads · head_dim]`."""

NOTHING_BY_HEAD: Mapping[str, int] = MappingProxyType({})

PROJECTIONS_BY_HEAD: Mapping[str, int] = MappingProxyType(
    {f"{projection}.{kind}": 0 for projection in ("query", "key") for kind in ("weight", "bias")}
)
"""The weights and biases of linear maps `query` and `key` onto all heads, for `by_head`."""


class LayerPositions(nn.Module):
    """Base of an encoding's part in every layer."""

    is_local = False
    """Whether the layer attends within `--local-attention` alone; each layer sets it on its own part."""

    by_head: Mapping[str, int] = NOTHING_BY_HEAD
    """Parameters and buffers that belong to single heads → the dimension along which the heads lie."""

    uses_maps = False
    """Whether `of_layer` applies the layer's maps: then every tensor of `terms` has its own part for each head."""

    def __init__(self, config: Sizes) -> None:
        super().__init__()

    def forward(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Map the shared tensors to this layer's tensors; by default they are the same."""
        return tensors

    def of_layer(self, tensors: tuple[Tensor, ...], query: Map, key: Map) -> tuple[Tensor, ...]:
        """Return what `forward` gives; a part that needs the layer's maps of queries and keys overrides it."""
        return self(tensors)

    def rotate(self, states: Tensor, position_ids: Tensor) -> Tensor:
        """Turn queries or keys `[batch, heads, seq, head_dim]` by their positions `[batch, seq]`; by default not."""
        return states


class PositionEncoding(nn.Module):
    """Base of the encodings that `config/registry.py` names.

    `forward` computes the tensors that depend on parameters, once a pass for a shared table or once a layer; `terms`
    names them. The two are apart because the tensors travel between pipeline stages and their names need not.
    """

    is_relative = False
    """Whether the logits depend on i − j; the analysis of the triangle effect takes such encodings."""

    relative_distance: int | None = 64
    """Default of `--relative-distance`; None for an encoding that refuses the flag."""

    in_logits = True
    """Whether the encoding adds anything to the attention logits."""

    adds_absolute_embedding = False
    """Whether, by default, a learned absolute position embedding joins the input (`--absolute-embedding`)."""

    decodes_absolute = False
    """Whether, by default, absolute positions join just before the masked-LM head (enhanced mask decoder)."""

    limits_length = False
    """Whether sequences longer than `seq_length` have no positions."""

    by_head: Mapping[str, int] = NOTHING_BY_HEAD
    """Parameters and buffers that belong to single heads → the dimension along which the heads lie.

    All other parameters serve all heads. Where some belong to single heads, here or in `layer_part`, every tensor of
    `terms` must have its own part for each head.
    """

    gains: frozenset[str] = frozenset()
    """Parameters on which weight decay does not act, since 0 is no small value of them: factors around 1, as a
    LayerNorm's weights are, and the arguments of a softplus."""

    layer_part: type[LayerPositions] = LayerPositions
    """What each layer does to the tensors before `terms` names them."""

    def __init__(self, config: Sizes) -> None:
        super().__init__()

    def forward(self, position_ids: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors of `terms` for `position_ids` int64 `[batch, seq]`; those of integers learn nothing."""
        return ()

    def of_rows(self, position_ids: Tensor, restarts: bool) -> tuple[Tensor, ...]:
        """Return what `forward` gives, where the caller knows whether any row counts anew after its first token.

        An encoding that needs to know overrides it, since reading `position_ids` means waiting for a GPU.
        """
        return self(position_ids)

    @staticmethod
    def refusal(config: Sizes) -> str | None:
        """Say in one line why the encoding cannot serve a model of these sizes; None where it can."""
        return None

    @staticmethod
    def terms(config: Sizes, tensors: tuple[Tensor, ...]) -> PositionTerms:
        """Name the tensors that `forward` gave."""
        return PositionTerms(scale=config.head_dim**-0.5)


def initialise_table(rows: int, config: Sizes) -> nn.Parameter:
    """Return a table of `rows` learned vectors of the head size, drawn from normal(0, `init_method_std`)."""
    return nn.Parameter(torch.empty(rows, config.head_dim).normal_(std=config.init_method_std))
