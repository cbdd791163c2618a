"""An encoder without positions.

    A[i,j] = Q_i·K_j / √d

A control: without positions the encoder sees a bag of tokens, so their order changes no hidden state.
`--relative-distance` is refused, and `--relative-table` changes nothing.
"""

from megatron_ddrp.model.positions.contract import PositionEncoding


class Nope(PositionEncoding):
    """Encoding without any position information."""

    any_length = True
    in_logits = False
    relative_distance = None
