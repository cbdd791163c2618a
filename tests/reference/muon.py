"""Slow twin of Muon (Jordan et al., 2024) with the step size of Moonlight (Liu et al., arXiv:2502.16982), in float64.

Jordan's released code: the momentum B ← μB + (1 − μ)g, Nesterov's look ahead (1 − μ)g + μB, and five Newton-Schulz
steps on the matrix over its Frobenius norm plus 1e-7, X ← aX + b(XXᵀ)X + c(XXᵀ)²X with (a, b, c) = (3.4445, −4.7750,
2.0315). Moonlight: W ← W − lr(0.2·√max(rows, columns)·O + λW). Matrices come and go as lists of rows.
"""

import math

import torch

A, B, C = 3.4445, -4.7750, 2.0315
MOMENTUM, EPSILON = 0.95, 1e-7

Matrix = list[list[float]]


def newton_schulz(matrix: Matrix, steps: int = 5) -> Matrix:
    """The matrix with its singular values near 1."""
    x = torch.tensor(matrix, dtype=torch.float64)
    x = x / (x.square().sum().sqrt() + EPSILON)
    for _ in range(steps):
        gram = x @ x.T
        x = A * x + B * (gram @ x) + C * (gram @ (gram @ x))
    return x.tolist()


def steps(weight: Matrix, gradients: list[Matrix], lr: float, decay: float, nesterov: bool = True) -> Matrix:
    """The weight after one step for each gradient."""
    w = torch.tensor(weight, dtype=torch.float64)
    factor, buffer = 0.2 * math.sqrt(max(w.shape)), torch.zeros_like(w)
    for gradient in torch.tensor(gradients, dtype=torch.float64):
        buffer = MOMENTUM * buffer + (1 - MOMENTUM) * gradient
        ahead = (1 - MOMENTUM) * gradient + MOMENTUM * buffer
        update = torch.tensor(newton_schulz((ahead if nesterov else buffer).tolist()), dtype=torch.float64)
        w = (1 - lr * decay) * w - lr * factor * update
    return w.tolist()
