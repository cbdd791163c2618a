"""Slow twin of Muon (Jordan et al., 2024) with the step size of Moonlight (Liu et al., arXiv:2502.16982), in float64.

Jordan's released code: the momentum B ← μB + (1 − μ)g, Nesterov's look ahead (1 − μ)g + μB, and five Newton-Schulz
steps on the matrix over its Frobenius norm plus 1e-7, X ← aX + b(XXᵀ)X + c(XXᵀ)²X with (a, b, c) = (3.4445, −4.7750,
2.0315). Moonlight: W ← W − lr(0.2·√max(rows, columns)·O + λW). Matrices are lists of rows; nothing here multiplies more
than two numbers at a time.
"""

import math

A, B, C = 3.4445, -4.7750, 2.0315
MOMENTUM, EPSILON = 0.95, 1e-7

Matrix = list[list[float]]


def product(left: Matrix, right: Matrix) -> Matrix:
    return [
        [sum(a * b for a, b in zip(row, column, strict=True)) for column in zip(*right, strict=True)] for row in left
    ]


def transposed(matrix: Matrix) -> Matrix:
    return [list(column) for column in zip(*matrix, strict=True)]


def mixed(*terms: tuple[float, Matrix]) -> Matrix:
    """The sum of factors times matrices."""
    rows, columns = len(terms[0][1]), len(terms[0][1][0])
    return [[sum(f * m[i][j] for f, m in terms) for j in range(columns)] for i in range(rows)]


def newton_schulz(matrix: Matrix, steps: int = 5) -> Matrix:
    """The matrix with its singular values near 1."""
    norm = math.sqrt(sum(x * x for row in matrix for x in row))
    x = mixed((1 / (norm + EPSILON), matrix))
    for _ in range(steps):
        gram = product(x, transposed(x))
        x = mixed((A, x), (B, product(gram, x)), (C, product(product(gram, gram), x)))
    return x


def steps(weight: Matrix, gradients: list[Matrix], lr: float, decay: float, nesterov: bool = True) -> Matrix:
    """The weight after one step for each gradient."""
    buffer = mixed((0.0, weight))
    factor = 0.2 * math.sqrt(max(len(weight), len(weight[0])))
    for gradient in gradients:
        buffer = mixed((MOMENTUM, buffer), (1 - MOMENTUM, gradient))
        update = newton_schulz(mixed((1 - MOMENTUM, gradient), (MOMENTUM, buffer)) if nesterov else buffer)
        weight = mixed((1 - lr * decay, weight), (-lr * factor, update))
    return weight
