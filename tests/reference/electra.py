"""Slow twin of ELECTRA's replaced-token detection (Clark et al., arXiv:2003.10555).

A token counts as replaced where the discriminator's input differs from the original. For a token with logit z,
p = 1 / (1 + exp(−z)) is the probability of "replaced", and the loss is −log p if it was, −log(1 − p) if it was not,
summed over every token that is not padding. Everything is torch.float64 and differentiable.
"""

import torch
from torch import Tensor


def replaced_token_detection(
    logits: Tensor, discriminator_ids: list[list[int]], original_ids: list[list[int]], valid: list[list[bool]]
) -> tuple[Tensor, int, int, int]:
    """(sum of the losses, tokens judged rightly, replaced tokens, replaced tokens found), logits `[batch, seq]`."""
    loss = torch.zeros((), dtype=torch.float64)
    right = replaced = found = 0
    for row, is_valid in enumerate(valid):
        for column, counts in enumerate(is_valid):
            if not counts:
                continue
            was_replaced = discriminator_ids[row][column] != original_ids[row][column]
            probability = 1 / (1 + torch.exp(-logits[row, column]))
            loss = loss - torch.log(probability if was_replaced else 1 - probability)
            says_replaced = probability.item() > 0.5
            right += says_replaced == was_replaced
            replaced += was_replaced
            found += was_replaced and says_replaced
    return loss, right, replaced, found
