"""Decoupled directional relative position encoding ("Better Pre-Training by Reducing Representation Confusion").

    A[i,j]  = Q_i · (K_j + D[ρ(i,j)] ⊙ K^rd[δ(i,j)]) / √d                                     (eq. 9, 10)
    ρ(i,j)  = 0 for i = j, 1 for i < j (the key is to the right), 2 for i > j                  (eq. 11)
    δ(i,j)  = |clip(i − j, −(r_s−1), r_s−1)|                                                   (eq. 12)

i = query, j = key. `D` is `[3, d]` and `K^rd` is `[r_s, d]`; all heads share both, and all layers too unless
`--relative-table per-layer` is given. That is 3·d + r_s·d parameters, 4,288 for a base model, as in section 5.4.

Closed gaps: eq. 12 leaves the clip's bounds open; with r_s − 1, δ uses exactly the r_s rows that the paper counts. The
paper gives no initialisation. Departures: `D` is drawn around 1 with a deviation of 0.5 (`--direction-init spread`),
and weight decay, which pulls towards 0, does not act on it; `K^rd` is drawn like every embedding. If both start around
0 (`embedding`), their product is too small to learn from, and stays so for thousands of steps. If `D` starts close to 1
(`ones`), the rows for +k and −k start equal and stay equal. docs/lab/measurements.md has the measurements.

Open reading: the paper does not say whether BERT's absolute embedding stays in the input. Its parameter count "compared
with BERT" holds literally only if it stays. Ours omits it; `--absolute-embedding` adds it.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from megatron_ddrp.model.positions.contract import PositionEncoding, PositionTerms, Sizes, initialise_table

SPREAD = 0.5
"""Standard deviation of D under `spread`."""

DIRECTION_INITS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "spread": lambda noise, std: 1 + SPREAD * noise,
    "ones": lambda noise, std: 1 + std * noise,
    "free": lambda noise, std: noise,
    "embedding": lambda noise, std: std * noise,
}
"""Value of `--direction-init` → initial D from standard normal `noise` `[3, head_dim]` and `init_method_std`."""


class Ddrp(PositionEncoding):
    """DDRP's encoding; `direction` is D, `distance` is K^rd."""

    any_length = True
    is_relative = True
    gains = frozenset({"direction"})

    def __init__(self, config: Sizes) -> None:
        super().__init__(config)
        noise = torch.empty(3, config.head_dim).normal_()
        self.direction = nn.Parameter(DIRECTION_INITS[config.direction_init](noise, config.init_method_std))
        self.distance = initialise_table(config.relative_distance, config)

    def forward(self, position_ids: Tensor) -> tuple[Tensor, ...]:
        """Return (T^q `[1, 2·reach + 1, d]`,): row c + reach serves the clipped offset c = i − j."""
        reach = _reach(len(self.distance))
        offset = torch.arange(-reach, reach + 1, device=self.distance.device)
        direction = torch.where(offset < 0, 1, torch.where(offset > 0, 2, 0))  # ρ
        table = self.direction[direction] * self.distance[offset.abs().clamp_max(len(self.distance) - 1)]
        return (table.unsqueeze(0),)

    @staticmethod
    def terms(config: Sizes, tensors: tuple[Tensor, ...]) -> PositionTerms:
        reach = _reach(config.relative_distance)
        return PositionTerms(config.head_dim**-0.5, query_table=tensors[0], lowest=-reach, highest=reach)


def _reach(relative_distance: int) -> int:
    """Return the largest |i − j| with a row of its own: r_s − 1, or 1 if r_s = 1, because ρ still has three values."""
    return max(relative_distance - 1, 1)
