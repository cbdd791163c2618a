"""Slow twins of the analyses: similarities and attention maps, measures of hidden states, and the probe of directions.

Eq. 15 and 16, the mean attention maps of figure 4, and Algorithm 1 (appendix C). A map is the list of a sentence's
attention probabilities of all heads, `[heads, n, n]`, without padding. Algorithm 1 is closed where the paper leaves it
open: strict triangles, divided by the sentence's own n, the half of the heads with the largest (up − down) is group 1,
the half with the smallest group 2, and a sentence that does not match is a miss.

Measures of hidden states: cosines pair by pair, and the published algorithms of two ranks. A sentence is float64
`[n, D]`, the hidden states of its tokens. IsoScore is Rudman et al.'s algorithm 1 (arXiv:2108.07344), step by step; the
effective rank is Roy and Vetterli's definition 1 (EUSIPCO 2007).

The probe of attention and the cosines of tables, in Python numbers: a sentence is the list of its layers' logits
`[heads, n, n]`; token 0 is [CLS], token n − 1 is [SEP].
"""

import itertools
import math

import numpy as np
import torch
from torch import Tensor

from tests.reference.objectives import cosine, hcd, probabilities, tcd


def token_similarity(hidden: list[Tensor]) -> float:
    """f(S), eq. 15: the mean over sentences of two tokens or more of the mean cosine of their tokens `[n, D]`."""
    return mean(tcd(states, list(range(len(states)))).item() for states in hidden if len(states) > 1)


within = token_similarity


def head_similarity(logits: list[list[Tensor]]) -> list[float]:
    """The inner part of f(H), eq. 16, by layer: for each sentence its L logits `[heads, n, n]`."""
    by_layer = []
    for layer in zip(*logits, strict=True):
        by_layer.append(mean(hcd([x], [list(range(len(x)))], [True] * x.shape[-1]).item() for x in layer))
    return by_layer


def softmax(logits: Tensor) -> Tensor:
    """Over the last dimension of `[heads, n, n]`."""
    return probabilities(logits, list(range(logits.shape[-1])))


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
    return sum(maps[head] for head in heads) / len(heads)


def matches(maps: Tensor, threshold: float) -> bool:
    """Lines 3 to 10 of Algorithm 1 for one sentence."""
    (amp1_up, _), (_, amp2_down) = (up_and_down(mean_map(maps, group)) for group in groups(maps))
    return amp1_up >= threshold and amp2_down >= threshold


def triangle_share(sentences: list[Tensor], threshold: float = 0.7) -> float:
    """Algorithm 1: the share of sentences that match."""
    return sum(matches(maps, threshold) for maps in sentences) / len(sentences)


def between(sentences: list[Tensor]) -> float:
    """The mean cosine over all pairs of tokens of different sentences."""
    pairs = itertools.combinations(sentences, 2)
    return mean(cosine(x, y).item() for first, second in pairs for x in first for y in second)


def centred(sentences: list[Tensor]) -> list[Tensor]:
    """The sentences without the mean of all their tokens."""
    middle = mean(token for states in sentences for token in states)
    return [torch.stack([token - middle for token in states]) for states in sentences]


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


RIDGE = 1e-8


def cosine_of_numbers(one, other):
    """Return the cosine of two vectors."""
    dot = sum(a * b for a, b in zip(one, other, strict=True))
    return dot / math.sqrt(sum(a * a for a in one)) / math.sqrt(sum(b * b for b in other))


def differences(sentence, layers, windows, k):
    """d of every token with text k places to its right and to its left: one list of heads per token."""
    heads = [(layer, h) for layer in layers for h in range(len(sentence[layer]))]
    heads = [(layer, h) for layer, h in heads if windows[layer] is None or k <= windows[layer]]
    last = sentence[0].shape[-1] - 2
    found = []
    for i in range(1, last + 1):
        if i - k >= 1 and i + k <= last and heads:
            scores = [sentence[layer][h] for layer, h in heads]
            found.append([score[i, i + k].item() - score[i, i - k].item() for score in scores])
    return found


def discriminant(vectors):
    """w = (S + ridge)⁻¹ m, S the covariance around the mean m."""
    size, count = len(vectors[0]), len(vectors)
    mean = [sum(d[a] for d in vectors) / count for a in range(size)]
    ridge = RIDGE * sum(d[a] ** 2 for d in vectors for a in range(size)) / count
    spread = np.zeros((size, size))
    for a, b in itertools.product(range(size), repeat=2):
        spread[a, b] = sum((d[a] - mean[a]) * (d[b] - mean[b]) for d in vectors) / count + ridge * (a == b)
    return np.linalg.inv(spread) @ mean


def right_answers(vectors, weights):
    """The number of d on the right-hand side; d in the middle counts half."""
    values = [sum(w * x for w, x in zip(weights, d, strict=True)) for d in vectors]
    return sum(1.0 if value > 0 else 0.5 if value == 0 else 0.0 for value in values)


def answers(sentences, layers, windows, k):
    """[(right answers, pairs)] of every second sentence, by the weights of the others; None without pairs."""
    learnt = [d for sentence in sentences[0::2] for d in differences(sentence, layers, windows, k)]
    asked = [differences(sentence, layers, windows, k) for sentence in sentences[1::2]]
    if not learnt or not any(asked):
        return None
    weights = discriminant(learnt)
    return [(right_answers(vectors, weights), len(vectors)) for vectors in asked]


def accuracy(counts):
    """The share of right answers, or None."""
    return None if counts is None else sum(right for right, _ in counts) / sum(pairs for _, pairs in counts)


def mean(values):
    """The mean of the values that are not None, or None."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def probe(sentences, windows, reach=8):
    """(accuracy, standard error, by layer, by distance)."""
    every = range(len(windows))
    by_layer = [mean(accuracy(answers(sentences, [n], windows, k)) for k in range(1, reach + 1)) for n in every]
    counts = [answers(sentences, every, windows, k) for k in range(1, reach + 1)]
    by_distance = [accuracy(one) for one in counts]
    known = [one for one in counts if one is not None]
    number, variance = len(known[0]), 0.0
    for s in range(number):
        parts = [(one[s][0] - accuracy(one) * one[s][1]) / sum(pairs for _, pairs in one) for one in known]
        variance += (sum(parts) / len(parts)) ** 2
    return mean(by_distance), math.sqrt(variance * number / (number - 1)), by_layer, by_distance
