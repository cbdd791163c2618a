"""T5's relative bias (Raffel et al., arXiv:1910.10683, section 2.1).

    A[i,j] = Q_i·K_j / √d + β[bucket(j − i), h]

i = query, j = key. β is `[32, heads]`, 16 buckets per direction; all layers share it unless `--relative-table
per-layer` is given. Row 16 is never used. Each distance up to 7 has its own bucket. Wider buckets follow up to
`--relative-distance` (128, as in the released code); all larger distances share the last bucket.

Departures: T5 omits the 1/√d and starts its weights smaller instead. T5 draws its table with a deviation of
hidden_size^(−1/2), ours uses `--init-method-std`, like every embedding.
"""

import torch
from torch import Tensor, nn

from megatron_ddrp.model.positions.contract import PositionEncoding, PositionTerms, Sizes
from megatron_ddrp.model.positions.tupe import NUM_BUCKETS, relative_bucket


class T5(PositionEncoding):
    """T5's encoding; `relative` is β."""

    any_length = True
    is_relative = True
    relative_distance = 128
    by_head = {"relative": 1}

    def __init__(self, config: Sizes) -> None:
        super().__init__(config)
        rows = torch.empty(NUM_BUCKETS, config.num_attention_heads)
        self.relative = nn.Parameter(rows.normal_(std=config.init_method_std))
        self.largest_distance = config.relative_distance

    def forward(self, position_ids: Tensor) -> tuple[Tensor, ...]:
        """Return (v `[heads, 2·reach + 1]`,): column c + reach serves the clipped offset c = i − j."""
        offset = torch.arange(-self.largest_distance, self.largest_distance + 1, device=self.relative.device)
        return (self.relative[relative_bucket(-offset, self.largest_distance)].T,)

    @staticmethod
    def terms(config: Sizes, tensors: tuple[Tensor, ...]) -> PositionTerms:
        reach = config.relative_distance
        return PositionTerms(config.head_dim**-0.5, lowest=-reach, highest=reach, offset_bias=tensors[0])
