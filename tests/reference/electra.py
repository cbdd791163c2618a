"""Slow twins of ELECTRA's replaced-token detection and generator's input (Clark et al., arXiv:2003.10555).

The generator's input, as in the authors' code: word + segment + absolute position embedding of the discriminator, where
it has the last; its LayerNorm; then a linear map to the generator's width.

A token counts as replaced where the discriminator's input differs from the original. For a token with logit z, p = 1 /
(1 + exp(−z)) is the probability of "replaced", and the loss is −log p if it was, −log(1 − p) if it was not, summed over
every token that is not padding. Everything is torch.float64 and differentiable.
"""

import torch
from torch import Tensor

from tests.reference.attention import layer_norm, linear


def generator_input(
    params: dict[str, Tensor], tokens: list[int], segments: list[int], places: list[int], eps: float = 1e-12
) -> Tensor:
    """`[S, generator's width]` from `token` `[vocab, D]`, `segment` `[2, D]`, `norm.weight`, `norm.bias` `[D]`.

    `absolute` `[max length, D]` may be there; `projection.weight` is `[out, in]`, `projection.bias` `[out]`.
    """
    rows = []
    for token, segment, place in zip(tokens, segments, places, strict=True):
        vector = params["token"][token] + params["segment"][segment]
        rows.append(vector + params["absolute"][place] if "absolute" in params else vector)
    normalised = layer_norm(torch.stack(rows), params["norm.weight"], params["norm.bias"], eps)
    return linear(normalised, params["projection.weight"], params["projection.bias"])


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
