"""Whole training steps in bf16 beside fp32 on CPUs: forward, backward and AdamW of a small model.

    OMP_NUM_THREADS=1 python benchmarks/cpu_precision.py

2 layers x 128, 4 heads, 16 full rows of 128 tokens, `--attention-backend auto`. Both precisions run interleaved in
random order. A ratio is the median over the rounds of bf16 ÷ fp32 in the same round, with a bootstrap 95 % interval.
"""

from __future__ import annotations

import torch
from arms import full_rows, our_step
from measure import benchmark_parser, median_interval, time_rounds

from megatron_ddrp.config import ModelConfig, ObjectiveConfig
from megatron_ddrp.pages.markdown import Table

SEQ = 128
ENCODINGS = ("absolute", "ddrp")


def main() -> None:
    """Print the table as Markdown."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    lines, rows = [], full_rows(16, SEQ)
    for encoding in ENCODINGS:
        config = ModelConfig(
            num_layers=2, hidden_size=128, num_attention_heads=4, seq_length=SEQ, position_encoding=encoding,
            hidden_dropout=0.0, attention_dropout=0.0,
        )  # fmt: skip
        dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
        steps = {
            name: our_step(config, ObjectiveConfig(objective="mlm"), rows, dtype) for name, dtype in dtypes.items()
        }
        seconds = time_rounds(steps, options.rounds, warm_up=1)
        milliseconds = [f"{1000 * float(median_interval(seconds[name]).median):.0f}" for name in dtypes]
        lines.append([encoding, *milliseconds, str(median_interval(seconds["bf16"] / seconds["fp32"]))])
    header = ["encoding", "fp32, ms", "bf16, ms", "bf16 ÷ fp32"]
    capability, threads = torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
    print(Table(header, lines, f"{capability}, {threads} thread(s), medians of {options.rounds} rounds"))


if __name__ == "__main__":
    main()
