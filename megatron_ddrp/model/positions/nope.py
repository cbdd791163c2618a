"""No positions at all.

    A[i,j] = Q_i·K_j / √d

A control: an encoder without positions sees a bag of tokens, whose order changes no hidden state.
`--relative-distance` is refused, and `--relative-table` changes nothing.
"""

from megatron_ddrp.model.positions.contract import PositionEncoding


class Nope(PositionEncoding):
    """Encoding that adds nothing anywhere."""

    in_logits = False
    relative_distance = None
