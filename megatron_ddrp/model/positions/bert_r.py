"""BERT-R: relative positions on the keys (Shaw et al., arXiv:1803.02155), eq. 4–5 of the DDRP paper.

    A[i,j] = Q_i · (K_j + K^r[σ(i,j)]) / √d,    σ(i,j) = clip(i − j, −r_s, r_s − 1) + r_s

i = query, j = key. `K^r` is `[2·r_s, d]`; all heads share it, and all layers too unless `--relative-table per-layer` is
given.

Departures: Shaw et al. also add a table to the values, which the DDRP paper omits for every model. They index by j − i
and clip at ±k, which gives 2·k + 1 rows. With the DDRP paper's 2·r_s rows, offsets with the key to the left are clipped
one step earlier.
"""

from torch import Tensor

from megatron_ddrp.model.positions.contract import PositionEncoding, PositionTerms, Sizes, initialise_table


class BertR(PositionEncoding):
    """BERT-R's encoding; `relative` is K^r."""

    any_length = True
    is_relative = True

    def __init__(self, config: Sizes) -> None:
        super().__init__(config)
        self.relative = initialise_table(2 * config.relative_distance, config)

    def forward(self, position_ids: Tensor) -> tuple[Tensor, ...]:
        """Return (T^q `[1, 2·r_s, d]`,)."""
        return (self.relative.unsqueeze(0),)

    @staticmethod
    def terms(config: Sizes, tensors: tuple[Tensor, ...]) -> PositionTerms:
        reach = config.relative_distance
        return PositionTerms(config.head_dim**-0.5, query_table=tensors[0], lowest=-reach, highest=reach - 1)
