"""DeBERTa's disentangled attention (He et al., arXiv:2006.03654), as in the released v1 code.

    A[i,j] = ( Q_i·K_j + Q_i·(P W^{K,r})[δ(i,j)] + K_j·(P W^{Q,r})[δ(i,j)] ) / √(3d)
    δ(i,j) = clip(i − j + k, 0, 2k − 1)

i = query, j = key. `P` is `[2k, D]`; all layers share it unless `--relative-table per-layer` is given. Each layer has
its own projections, `W^{K,r}` without a bias and `W^{Q,r}` with one. The keys K have no bias (`--key-bias`), because it
would meet the last term. k is `--relative-distance`, 64 in the DDRP paper's
comparison.

Departures: the paper indexes the last term (position to content) by δ(j,i). The released code and Hugging Face's port
use δ(i,j), and so do we. Absolute positions are added in the enhanced mask decoder (`model/heads.py`), not here. As in
the released code, dropout acts on P in every layer.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_ddrp.model.positions.contract import (
    PROJECTIONS_BY_HEAD,
    LayerPositions,
    PositionEncoding,
    PositionTerms,
    Sizes,
)


class RelativeProjections(LayerPositions):
    """Projections of one layer: W^{K,r} (`key`) and W^{Q,r} (`query`)."""

    by_head = PROJECTIONS_BY_HEAD

    def __init__(self, config: Sizes) -> None:
        super().__init__(config)
        self.head_dim, self.dropout = config.head_dim, config.hidden_dropout
        self.key = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.query = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Project (P `[2k, D]`,) to (T^q, T^k), each `[heads, 2k, d]`."""
        table = F.dropout(tensors[0], self.dropout, self.training)

        def split(projected: Tensor) -> Tensor:
            return projected.view(len(table), -1, self.head_dim).transpose(0, 1)

        return split(self.key(table)), split(self.query(table))


class Deberta(PositionEncoding):
    """DeBERTa's encoding; `relative` is P."""

    any_length = True
    is_relative = True
    key_bias = False
    layer_part = RelativeProjections
    decodes_absolute = True

    def __init__(self, config: Sizes) -> None:
        super().__init__(config)
        rows = torch.empty(2 * config.relative_distance, config.hidden_size)
        self.relative = nn.Parameter(rows.normal_(std=config.init_method_std))

    def forward(self, position_ids: Tensor) -> tuple[Tensor, ...]:
        """Return (P,)."""
        return (self.relative.view_as(self.relative),)  # ZeRO 3 frees a bare parameter once its module is done

    @staticmethod
    def terms(config: Sizes, tensors: tuple[Tensor, ...]) -> PositionTerms:
        query_table, key_table = tensors
        reach = config.relative_distance
        return PositionTerms(
            (3 * config.head_dim) ** -0.5,
            query_table=query_table,
            key_table=key_table,
            lowest=-reach,
            highest=reach - 1,
        )
