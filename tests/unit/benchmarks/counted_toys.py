"""Small programs on the fake GPU; prints what was counted as one JSON object.

    python tests/unit/benchmarks/counted_toys.py

A process of its own, since the device has to be registered before the first backward pass.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

from counting import Counting
from fake_gpu import fake_device, fake_tensors, gpu_kernels, on_device
from gpu_cost import configurations, cost


def counted(run: Callable[[Counting], object]) -> dict[str, Any]:
    """Return the launches and waits of `run`; what it makes with the counting paused is not counted."""
    with fake_tensors(), Counting(rows=2, predicted=3) as counting, gpu_kernels():
        run(counting)
    return {"launches": counting.launches, "waits": [wait.operation for wait in counting.waits]}


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device=fake_device(), requires_grad=grad)


def two_layers(counting: Counting) -> None:
    with counting.paused():
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        on_device(model, fake_device())
        x = tensor(4, 8)
    model(x).sum().backward()


def views_and_strides(counting: Counting) -> None:
    with counting.paused():
        wide, row, table, ids = tensor(4, 8), tensor(8), tensor(100, 8), tensor(5, dtype=torch.long)
    total = wide.view(8, 4).t() + row.expand(4, 8)  # the row counts once
    total.add_(row)  # reads and writes `total`
    F.embedding(ids, table)  # 5 rows of 100


def waits(counting: Counting) -> None:
    with counting.paused():
        mask, numbers = tensor(4, 8, dtype=torch.bool), tensor(4, 8)
    assert int(numbers.long().max()) == 3
    assert not bool(mask.any())
    assert mask.nonzero().shape == (6, 2)
    assert numbers[mask].shape == (6,)
    numbers.cpu()


def compiled(counting: Counting) -> None:
    with counting.paused():
        x, weight = tensor(4, 8, grad=True), tensor(8, grad=True)
    joined = torch.compile(lambda x, weight: F.gelu(x * weight).relu() + 1)
    result = joined(x, weight)
    result.backward(result.detach())
    assert x.grad is not None and x.grad.shape == x.shape and weight.grad is not None


def attention(counting: Counting) -> None:
    with counting.paused():
        query, key, value = (tensor(2, 3, 16, 8, grad=True) for _ in range(3))
    F.scaled_dot_product_attention(query, key, value, dropout_p=0.1).sum().backward()


def layers() -> dict[str, Any]:
    """Return the counts of a layer of `ddrp` in Triton by objective, base at 32 x 512."""
    words = {"encodings": ["ddrp"], "objectives": ["mlm", "mth"], "backends": ["triton"], "dropout": 0.1}
    shape = {"layers": 12, "hidden": 768, "heads": 12, "seq": 512, "rows": 32}
    rows = [cost(config).summary() for config in configurations(argparse.Namespace(**words, **shape))]
    return {row["objective"]: row for row in rows}


if __name__ == "__main__":
    toys = (two_layers, views_and_strides, waits, compiled, attention)
    print(json.dumps({run.__name__: counted(run) for run in toys} | {"layers": layers()}))
    sys.stdout.flush()
    os._exit(0)  # autograd's threads for the fake device can abort a process that takes itself apart
