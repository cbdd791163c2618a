"""Encodings that change embeddings, queries and keys, or add products of positions: BERT's, none, RoPE and TUPE.

In the formulas i is the query and j the key.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from megatron_ddrp.model.positions.contract import (
    PROJECTIONS_BY_HEAD,
    LayerPositions,
    PositionEncoding,
    PositionTerms,
    Sizes,
    initialise_table,
)


class Absolute(PositionEncoding):
    """BERT's learned absolute positions (Devlin et al., arXiv:1810.04805; eq. 1–2 of the DDRP paper).

        A[i,j] = Q_i·K_j / √d,    where the position embedding of i is added to the input of the first layer.

    No departure from the paper.
    """

    in_logits = False
    adds_absolute_embedding = True
    limits_length = True


class Nope(PositionEncoding):
    """Encoding without positions.

        A[i,j] = Q_i·K_j / √d

    A control: without positions the encoder sees a bag of tokens, so their order changes no hidden state.
    `--relative-distance` is refused, and `--relative-table` changes nothing.
    """

    any_length = True
    in_logits = False
    relative_distance = None


class Rotation(LayerPositions):
    """Rotation of queries and keys in one layer.

    Attributes:
        theta: θ of layers that attend to whole documents. Training may change it; each call reads it.
        local_theta: θ of local layers; None means `theta`.
    """

    def __init__(self, config: Sizes) -> None:
        super().__init__(config)
        self.theta, self.local_theta = config.rope_theta, config.local_rope_theta

    @property
    def base(self) -> float:
        """θ of this layer."""
        return self.local_theta if self.is_local and self.local_theta is not None else self.theta

    @property
    def constants(self) -> tuple[float, ...]:
        return (self.base,)

    def rotate(self, states: Tensor, position_ids: Tensor) -> Tensor:
        wide = torch.promote_types(states.dtype, torch.float32)
        size = states.shape[-1]
        frequency = self.base ** (-torch.arange(0, size, 2, device=states.device, dtype=wide) / size)  # [d/2]
        angle = (position_ids.unsqueeze(-1) * frequency).unsqueeze(1)  # [batch, 1, seq, d/2]
        cos, sin = angle.cos(), angle.sin()
        first, second = states.to(wide).chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(states.dtype)


def set_theta(model: nn.Module, theta: float) -> None:
    """Set θ of every rotation in a model, from the next pass on. Local layers with a θ of their own keep it."""
    for module in model.modules():
        if isinstance(module, Rotation):
            module.theta = theta


class Rope(PositionEncoding):
    """Rotary positions (Su et al., RoFormer, arXiv:2104.09864, eq. 34).

        A[i,j] = (R_i Q_i)·(R_j K_j) / √d
        R_p rotates the pair (x_t, x_{t + d/2}) by the angle p · θ^(−2t/d),  t = 0, …, d/2 − 1

    The product of two rotated vectors depends on i − j alone. Values are not rotated. θ is `--rope-theta`, 10000 in the
    paper; layers with `--local-attention` use `--local-rope-theta`. Nothing is learned: `--relative-distance` is
    refused, and `--relative-table` changes nothing.

    Departure: the paper pairs neighbours, (x_{2t}, x_{2t+1}). We pair the two halves of a head, as ModernBERT and Llama
    do in transformers. Reordering the rows of W^Q and W^K to 0, 2, 4, …, 1, 3, 5, … per head turns one model into the
    other.
    """

    any_length = True
    is_relative = True
    in_logits = False
    relative_distance = None
    layer_part = Rotation

    @staticmethod
    def refusal(config: Sizes) -> str | None:
        if config.head_dim % 2 == 0:
            return None
        return f"turns pairs of numbers, got heads {config.head_dim} wide: choose an even hidden size per head"


NUM_BUCKETS = 32
FROM_CLS, TO_CLS = 16, 32
"""Bucket rows of pairs whose query is [CLS], and of pairs whose key is [CLS]."""


class TupeA(PositionEncoding):
    """TUPE-A: untied absolute positions (Ke et al., arXiv:2006.15595).

        A[i,j] = (x_i W^Q)(x_j W^K) / √(2d)  +  B[h, i, j]
        B[h,i,j] = (p_{i+1} U^Q)(p_{j+1} U^K) / √(2d),  then [CLS] untied:
        B[h,i,0] = θ2 = (p_1 U^Q)(p_1 U^K) / √(2d),  B[h,0,j] = θ1 = (p_0 U^Q)(p_0 U^K) / √(2d)

    i and j are counted from the [CLS] of their own document, so every packed document unties its own [CLS]. `p` is a
    learned table of `seq_length + 1` rows, followed by a LayerNorm: the token at position t uses row t + 1, and only θ1
    uses row 0. `U^Q`, `U^K` are D → D with bias. The first column (θ2) is written before the first row (θ1). B is
    computed once per forward pass and shared by all layers, unless `--relative-table per-layer` is given.

    The √(2d) follows the released code.
    """

    limits_length = True
    by_head = PROJECTIONS_BY_HEAD

    def __init__(self, config: Sizes) -> None:
        super().__init__(config)
        self.head_dim = config.head_dim
        self.table = initialise_table(config.seq_length + 1, config.hidden_size, config)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layernorm_epsilon)
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)

    def of_rows(self, position_ids: Tensor, restarts: bool) -> tuple[Tensor, ...]:
        return self(position_ids, restarts)

    def forward(self, position_ids: Tensor, restarts: bool | None = None) -> tuple[Tensor, ...]:
        """Return (B `[1 or batch, heads, seq, seq]`,); the first dimension is 1 unless a row holds several documents.

        `restarts` is true if a row does; None reads it from `position_ids`.
        """
        by_position = self.by_position(position_ids.shape[1])  # [heads, seq, seq]
        if not (starts_anew(position_ids) if restarts is None else restarts):
            return (by_position.unsqueeze(0),)
        rows, columns = position_ids.unsqueeze(-1), position_ids.unsqueeze(-2)
        return (by_position[:, rows, columns].transpose(0, 1),)

    def by_position(self, length: int) -> Tensor:
        """Return B by the positions of query and key, `[heads, length, length]`."""
        states = self.norm(self.table[: length + 1])  # [length + 1, hidden]
        query, key = (self._split(projection(states)) for projection in (self.query, self.key))
        scores = (query * (2 * self.head_dim) ** -0.5) @ key.transpose(-1, -2)  # [heads, length + 1, length + 1]
        to_cls, from_cls = scores[:, 1, 1], scores[:, 0, 0]  # θ2, θ1
        return untie_cls(scores[:, 1:, 1:], to_cls, from_cls)

    def _split(self, states: Tensor) -> Tensor:
        return states.unflatten(-1, (-1, self.head_dim)).transpose(0, 1)  # [heads, rows, head_dim]

    @staticmethod
    def terms(config: Sizes, tensors: tuple[Tensor, ...]) -> PositionTerms:
        return PositionTerms((2 * config.head_dim) ** -0.5, bias=tensors[0])


class TupeR(TupeA):
    """TUPE-R: TUPE-A and T5's bucketed relative bias; `relative` is T `[33, heads]`.

        B[h,i,j] = B of TUPE-A + T[bucket(j − i), h],  with T[32] where j = 0 and T[16] where i = 0

    Rows 16 and 32 follow the released code. T5's 32 bidirectional buckets never use them. T is added without the scale.
    All distances from `--relative-distance` on share one bucket per direction; the default is 128, as in the released
    code.

    Open reading: the DDRP paper's footnote 5 (r_s = 64 "for all") may also mean these buckets; `--relative-distance 64`
    reads it so.
    """

    by_head = {**PROJECTIONS_BY_HEAD, "relative": 1}
    is_relative = True
    relative_distance = 128

    def __init__(self, config: Sizes) -> None:
        super().__init__(config)
        self.relative = initialise_table(NUM_BUCKETS + 1, config.num_attention_heads, config)
        self.largest_distance = config.relative_distance

    def by_position(self, length: int) -> Tensor:
        position = torch.arange(length, device=self.relative.device)
        offset = position[None, :] - position[:, None]  # j − i
        buckets = relative_bucket(offset, self.largest_distance)  # [length, length]
        bias = self.relative[buckets].permute(2, 0, 1)  # [heads, length, length]
        bias = untie_cls(bias, self.relative[TO_CLS], self.relative[FROM_CLS])
        return super().by_position(length) + bias


def starts_anew(position_ids: Tensor) -> bool:
    """Return whether a row of `[batch, seq]` restarts its positions after its first token, apart from padding's zeros.

    A captured graph cannot read them. It returns True, which is correct for every row and only takes more memory.
    """
    if torch.compiler.is_compiling():
        return True
    place = torch.arange(position_ids.shape[1], device=position_ids.device)
    return bool(((position_ids != place) & (position_ids != 0)).any())


def untie_cls(bias: Tensor, to_cls: Tensor, from_cls: Tensor) -> Tensor:
    """Return `[heads, seq, seq]` with column 0 set to `to_cls` `[heads]`, then row 0 to `from_cls`."""
    place = torch.arange(bias.shape[-1], device=bias.device)
    bias = torch.where(place == 0, to_cls[:, None, None], bias)
    return torch.where((place == 0)[:, None], from_cls[:, None, None], bias)


def relative_bucket(offset: Tensor, largest_distance: int) -> Tensor:
    """Return T5's bucket of j − i (Raffel et al., arXiv:1910.10683); each direction has half of the buckets.

    Distances below 8 have a bucket each; larger ones share logarithmic buckets. All distances from `largest_distance`
    on have the last bucket, even if `largest_distance` is 8 or less.
    """
    half = NUM_BUCKETS // 2
    exact = half // 2
    distance = offset.abs()
    ratio = (distance.clamp_min(1).double() / exact).log() / math.log(max(largest_distance, exact + 1) / exact)
    far = (exact + (ratio * (half - exact)).long()).clamp_max(half - 1)
    near = torch.where(distance < exact, distance, far)
    return torch.where(offset > 0, half, 0) + torch.where(distance < largest_distance, near, half - 1)
