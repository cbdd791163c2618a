"""Attention without terms in the logits on CPUs: blocked attention beside torch's fused attention (`sdpa`), one layer.

    OMP_NUM_THREADS=1 python benchmarks/cpu_attention.py

Both run interleaved in random order. A ratio is the median over the rounds of blocked ÷ sdpa in the same round, with a
bootstrap 95 % interval. Rows are full, padded (a quarter to the whole of their length) or packed (three documents).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from measure import benchmark_parser, median_interval, time_rounds

from megatron_ddrp.data.batches.batch import IGNORED_LABEL, Batch
from megatron_ddrp.model.attention.backends import backend_function
from megatron_ddrp.model.attention.logits import Attending
from megatron_ddrp.model.positions.contract import PositionTerms
from megatron_ddrp.model.stages import layout_of
from megatron_ddrp.pages.markdown import Table

SHAPES = ((16, 128, 4, 32), (16, 128, 12, 64), (4, 512, 12, 64), (8, 512, 4, 32))
"""Rows, row length, heads, head size."""
ROWS = ("full", "padded", "packed")


def documents(kind: str, rows: int, seq: int) -> np.ndarray:
    """Return document numbers `[rows, seq]`, 0 for padding."""
    rng, place = np.random.default_rng(0), np.arange(seq)
    if kind == "packed":
        ends = np.sort(rng.choice(np.arange(8, seq - 8), (rows, 2), replace=True), axis=1)  # [rows, 2]
        return 1 + (place >= ends[:, :1]) + (place >= ends[:, 1:])
    lengths = np.full(rows, seq) if kind == "full" else rng.integers(seq // 4, seq + 1, rows)
    return (place < lengths[:, None]).astype(np.int64)


def arms(numbers: np.ndarray, heads: int, size: int, dtype: torch.dtype, trains: bool) -> dict[str, Callable[[], None]]:
    """Return one call of either backend, forward and, if it trains, backward."""
    rows, seq = numbers.shape
    column = np.tile(np.arange(seq), (rows, 1))
    labels = np.where(column % 7 == 0, numbers, IGNORED_LABEL)
    valid = (numbers > 0).astype(np.int64)
    layout = layout_of(Batch(numbers, labels, valid, column, np.zeros_like(numbers), numbers))
    query, key, value = (torch.randn(rows, seq, heads, size, dtype=dtype).transpose(1, 2) for _ in range(3))
    gradient = torch.randn(rows, heads, seq, size, dtype=dtype)
    inputs = (query.requires_grad_(trains), key.requires_grad_(trains), value.requires_grad_(trains))
    terms, no_heads = PositionTerms(scale=size**-0.5), torch.empty(0, dtype=torch.long)
    attending = Attending(query, key, value, terms, torch.from_numpy(numbers), no_heads, 0.0, None, layout)

    def arm(name: str) -> Callable[[], None]:
        def run() -> None:
            context, _ = backend_function(name)(attending)
            if trains:
                context.backward(gradient)
                for tensor in inputs:
                    tensor.grad = None

        return run

    return {name: arm(name) for name in ("sdpa", "blocked")}


def main() -> None:
    """Print the table as Markdown."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    lines = []
    for rows, seq, heads, size in SHAPES:
        for kind in ROWS:
            cells = []
            for dtype in (torch.float32, torch.bfloat16):
                for trains in (True, False):
                    calls = arms(documents(kind, rows, seq), heads, size, dtype, trains)
                    seconds = time_rounds(calls, options.rounds)
                    cells.append(str(median_interval(seconds["blocked"] / seconds["sdpa"])))
            lines.append([f"{rows} × {seq}, {heads} heads of {size}, {kind}", *cells])
            print(" | ".join(lines[-1]), flush=True)
    header = ["rows", "fp32, training", "fp32, inference", "bf16, training", "bf16, inference"]
    print(Table(header, lines, f"blocked ÷ sdpa, {torch.get_num_threads()} threads, median of {options.rounds} rounds"))


if __name__ == "__main__":
    main()
