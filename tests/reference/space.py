"""Slow twins of the measures of hidden states: cosines pair by pair, and the published algorithms of two ranks.

A sentence is float64 `[n, D]`, the hidden states of its tokens. IsoScore is Rudman et al.'s algorithm 1
(arXiv:2108.07344), step by step; the effective rank is Roy and Vetterli's definition 1 (EUSIPCO 2007).
"""

import math

import torch
from torch import Tensor

from tests.reference.mth import cosine, mean_pairwise_cosine


def within(sentences: list[Tensor]) -> float:
    """The mean over sentences of two tokens or more of their mean pairwise cosine."""
    values = [mean_pairwise_cosine(list(states)).item() for states in sentences if len(states) > 1]
    return sum(values) / len(values)


def between(sentences: list[Tensor]) -> float:
    """The mean cosine over all pairs of tokens of different sentences."""
    values = [
        cosine(x, y).item()
        for number, first in enumerate(sentences)
        for second in sentences[number + 1 :]
        for x in first
        for y in second
    ]
    return sum(values) / len(values)


def centred(sentences: list[Tensor]) -> list[Tensor]:
    """The sentences without the mean of all their tokens."""
    tokens = [token for states in sentences for token in states]
    mean = sum(tokens) / len(tokens)
    return [torch.stack([token - mean for token in states]) for states in sentences]


def eigenvalues(sentences: list[Tensor]) -> list[float]:
    """Variances along the principal components of all tokens: squared singular values ÷ (N − 1)."""
    tokens = torch.cat(centred(sentences))
    values = [value.item() ** 2 / (len(tokens) - 1) for value in torch.linalg.svdvals(tokens)]
    return values + [0.0] * (tokens.shape[1] - len(values))


def isoscore(sentences: list[Tensor]) -> float:
    """Algorithm 1: normalise the variances to length √n, take their distance to (1, …, 1), rescale it twice."""
    variances = eigenvalues(sentences)
    n = len(variances)
    length = math.sqrt(sum(value**2 for value in variances))
    normalised = [math.sqrt(n) * value / length for value in variances]
    defect = math.sqrt(sum((value - 1) ** 2 for value in normalised)) / math.sqrt(2 * (n - math.sqrt(n)))
    share = (n - defect**2 * (n - math.sqrt(n))) ** 2 / n**2  # of the dimensions that are used
    return (n * share - 1) / (n - 1)


def effective_rank(sentences: list[Tensor]) -> float:
    """exp of the entropy of the normalised variances."""
    variances = eigenvalues(sentences)
    shares = [value / sum(variances) for value in variances]
    return math.exp(-sum(share * math.log(share) for share in shares if share > 0))


def first_component(sentences: list[Tensor]) -> tuple[float, float]:
    """The largest variance ÷ the sum of all, and the kurtosis of the tokens' places on its direction.

    The direction is found by power iteration with the sum of outer products, token by token.
    """
    tokens = [token for states in centred(sentences) for token in states]
    direction = torch.arange(1.0, len(tokens[0]) + 1, dtype=torch.float64)
    for _ in range(2000):
        direction = sum((token @ direction) * token for token in tokens)
        direction = direction / direction.norm()
    places = [(token @ direction).item() for token in tokens]
    second = sum(place**2 for place in places) / len(places)
    fourth = sum(place**4 for place in places) / len(places)
    return second / (sum((token @ token).item() for token in tokens) / len(tokens)), fourth / second**2
