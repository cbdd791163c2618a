"""BERT's learned absolute positions (Devlin et al., arXiv:1810.04805; eq. 1–2 of the DDRP paper).

    A[i,j] = Q_i·K_j / √d,    where the position embedding of i is added to the input of the first layer.

No departure from the paper.
"""

from megatron_ddrp.model.positions.contract import PositionEncoding


class Absolute(PositionEncoding):
    """Encoding without terms in the logits; the embedding stage adds one learned vector per position."""

    in_logits = False
    adds_absolute_embedding = True
    limits_length = True
