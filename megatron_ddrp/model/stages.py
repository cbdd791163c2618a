"""The tuple that travels from stage to stage: floats first, then integers, tensors only.

One process hands it on in memory; a pipeline sends it between ranks, where every float must require a gradient and must
come before the integers. Auxiliary losses travel in it as one small tensor to which each stage adds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

LM, TCD, HCD = 0, 1, 2
"""Places in the tensor of loss sums."""

NUM_LOSSES = 3

RTD, GENERATOR_CORRECT, RTD_CORRECT, REPLACED, REPLACED_FOUND = 3, 4, 5, 6, 7
"""Further places under ELECTRA: replaced-token detection, and four counts that only ride along."""

NUM_ELECTRA_SUMS = 8


@dataclass(frozen=True)
class Draws:
    """What TCD and HCD look at in one step. Their shapes say, without waiting for a device, what there is to do."""

    token_mask: Tensor
    """int64 `[batch, documents, seq]`: 1 at the tokens of TCD, by the documents of a row; `[batch, documents, 0]`
    switches TCD off."""
    heads: Tensor
    """int64 `[layers, m′]` head numbers, ascending; `[layers, 0]` switches HCD off."""
    sample_keys: Tensor | None = None
    """int64 `[batch, seq]`: what ELECTRA samples its replacements by; None under other objectives."""

    @classmethod
    def none(cls, batch_size: int, num_layers: int, device: torch.device | None = None) -> Draws:
        """Neither term."""
        return cls(
            torch.empty(batch_size, 1, 0, dtype=torch.long, device=device),
            torch.empty(num_layers, 0, dtype=torch.long, device=device),
        )


class StageState(NamedTuple):
    """What every encoder layer reads and writes."""

    hidden: Tensor
    """`[batch, seq, hidden]`."""
    losses: Tensor
    """fp32 `[3]`: sums so far of the LM, TCD and HCD terms; `[8]` under ELECTRA."""
    position: tuple[Tensor, ...]
    """The position encoding's tensors, where one set serves all layers."""
    document_ids: Tensor
    """`[batch, seq]`, see `Batch`."""
    position_ids: Tensor
    """`[batch, seq]`, see `Batch`."""
    labels: Tensor
    """`[batch, seq]`, or `[batch, 0]` where nothing is predicted."""
    token_mask: Tensor
    """`[batch, documents, seq]` tokens of TCD, or `[batch, documents, 0]`; see `Draws`."""
    heads: Tensor
    """`[layers, m′]` heads of HCD, or `[layers, 0]`."""
    carried: tuple[Tensor, ...] = ()
    """Integers that the layers hand on unread: what a later stage needs of the batch."""

    @property
    def num_documents(self) -> int:
        """The most documents that a row holds."""
        return self.token_mask.shape[1]

    def pack(self) -> tuple[Tensor, ...]:
        """As a flat tuple of tensors."""
        integers = (self.document_ids, self.position_ids, self.labels, self.token_mask, self.heads)
        return (self.hidden, self.losses, *self.position, *integers, *self.carried)

    @classmethod
    def unpack(cls, tensors: tuple[Tensor, ...]) -> StageState:
        """The inverse of `pack`."""
        hidden, losses, *position = (tensor for tensor in tensors if tensor.is_floating_point())
        integers = [tensor for tensor in tensors if not tensor.is_floating_point()]
        document_ids, position_ids, labels, token_mask, heads, *carried = integers
        own = (document_ids, position_ids, labels, token_mask, heads)
        return cls(hidden, losses, tuple(position), *own, tuple(carried))
