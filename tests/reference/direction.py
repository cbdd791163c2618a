"""Slow twins of the probe of attention and of the cosines of tables, in Python numbers.

A sentence is the list of its layers' logits `[heads, n, n]`; token 0 is [CLS], token n − 1 is [SEP].
"""

import math

import numpy as np

RIDGE = 1e-8


def cosine(one, other):
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
    for a in range(size):
        for b in range(size):
            spread[a, b] = sum((d[a] - mean[a]) * (d[b] - mean[b]) for d in vectors) / count + ridge * (a == b)
    return np.linalg.inv(spread) @ mean


def right_answers(vectors, weights):
    """The number of d on the right-hand side; d in the middle counts half."""
    total = 0.0
    for d in vectors:
        value = sum(w * x for w, x in zip(weights, d, strict=True))
        total += 1.0 if value > 0 else 0.5 if value == 0 else 0.0
    return total


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
