"""Slow twins of the analyses: eq. 15 and 16, the mean attention maps of figure 4, and Algorithm 1 (appendix C).

A map is the list of a sentence's attention probabilities of all heads, `[heads, n, n]`, without padding. Algorithm 1
is closed where the paper leaves it open: strict triangles, divided by the sentence's own n, the half of the heads with
the largest (up − down) is group 1, the half with the smallest group 2, and a sentence that does not match is a miss.
"""

import torch
from torch import Tensor

from tests.reference import mth


def token_similarity(hidden: list[Tensor]) -> float:
    """f(S), eq. 15: the mean over sentences of the mean cosine of all tokens; hidden `[n, D]` each."""
    values = [mth.tcd(states, list(range(len(states)))).item() for states in hidden]
    return sum(values) / len(values)


def head_similarity(logits: list[list[Tensor]]) -> list[float]:
    """The inner part of f(H), eq. 16, by layer: for each sentence its L logits `[heads, n, n]`."""
    by_layer = []
    for number in range(len(logits[0])):
        values = []
        for layers in logits:
            scores = layers[number]
            valid = [True] * scores.shape[-1]
            values.append(mth.hcd([scores], [list(range(len(scores)))], valid).item())
        by_layer.append(sum(values) / len(values))
    return by_layer


def softmax(logits: Tensor) -> Tensor:
    """Over the last dimension of `[heads, n, n]`, entry by entry."""
    maps = torch.zeros_like(logits)
    for head in range(logits.shape[0]):
        for i in range(logits.shape[1]):
            total = sum(torch.exp(logits[head, i, j]) for j in range(logits.shape[2]))
            for j in range(logits.shape[2]):
                maps[head, i, j] = torch.exp(logits[head, i, j]) / total
    return maps


def up_and_down(one_map: Tensor) -> tuple[float, float]:
    """Sums of the strict triangles of `[n, n]`, ÷ n."""
    n = len(one_map)
    up = sum(one_map[i, j].item() for i in range(n) for j in range(n) if j > i)
    down = sum(one_map[i, j].item() for i in range(n) for j in range(n) if j < i)
    return up / n, down / n


def groups(maps: Tensor) -> tuple[list[int], list[int]]:
    """The heads of group 1 (looking right) and of group 2 (looking left)."""
    lean = {head: up - down for head, (up, down) in enumerate(map(up_and_down, maps))}
    from_right = sorted(lean, key=lambda head: -lean[head])
    half = len(maps) // 2
    return from_right[:half], from_right[len(maps) - half :]


def mean_map(maps: Tensor, heads: list[int]) -> Tensor:
    """amp of a group: `[n, n]`."""
    total = torch.zeros_like(maps[0])
    for head in heads:
        total = total + maps[head]
    return total / len(heads)


def matches(maps: Tensor, threshold: float) -> bool:
    """Lines 3 to 10 of Algorithm 1 for one sentence."""
    right, left = groups(maps)
    amp1_up, _ = up_and_down(mean_map(maps, right))
    _, amp2_down = up_and_down(mean_map(maps, left))
    return amp1_up >= threshold and amp2_down >= threshold


def triangle_share(sentences: list[Tensor], threshold: float = 0.7) -> float:
    """Algorithm 1: the share of sentences that match."""
    return sum(matches(maps, threshold) for maps in sentences) / len(sentences)
