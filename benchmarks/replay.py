"""Cost of `--replay-interval`: a step with a replay beside a step without, through the engine.

One CPU thread, 2 layers × 128, 2 heads, vocabulary 4,096, micro-batches of 4 full rows of 128 tokens, by the process's
CPU time. Every round runs a step of each arm in random order; the A/A row repeats the step without a replay. At an
interval of N a run costs 1 + (ratio − 1) ÷ N.

    python benchmarks/replay.py              # 100 rounds with 1 and with 4 micro-batches per step
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from arms import full_rows
from measure import benchmark_parser, print_ratio, time_rounds

from megatron_ddrp.config import Config, ParallelConfig
from megatron_ddrp.data.batches.batch import IGNORED_LABEL
from megatron_ddrp.engine.build import build_engine
from megatron_ddrp.engine.layout import Setup
from megatron_ddrp.engine.nonfinite import FiniteSteps
from megatron_ddrp.engine.step import training_inputs
from megatron_ddrp.model import build_model
from megatron_ddrp.parallel import process_group

ROWS, SEQ, VOCABULARY = 4, 128, 4096
MODEL = {"num_layers": 2, "hidden_size": 128, "num_attention_heads": 2, "seq_length": SEQ, "vocab_size": VOCABULARY}
ARMS = {"off": None, "A/A": None, "replay": 1}
"""Name → `--replay-interval`."""


def arms(num_micro_batches: int, ranks: process_group.Ranks) -> dict[str, Callable[[], object]]:
    """Return a step of each arm; all arms train one engine."""
    batch = {"micro_batch_size": ROWS, "global_batch_size": ROWS * num_micro_batches}
    setup = Setup.of(Config().replace(model=MODEL, training={**batch, "train_iters": 100}), ranks)
    engine = build_engine(build_model(setup.config.model, objective=setup.config.objective), setup)
    arrays = full_rows(ROWS, SEQ)
    labels = np.where(arrays.labels == IGNORED_LABEL, IGNORED_LABEL, arrays.labels % VOCABULARY)
    arrays = arrays._replace(input_ids=arrays.input_ids % VOCABULARY, labels=labels)
    inputs = training_inputs([arrays] * num_micro_batches, setup, 1)

    def step(interval: int | None) -> Callable[[], object]:
        steps = FiniteSteps(engine, setup.replace(training={"replay_interval": interval}), print)
        return lambda: steps.finish(steps.launch(inputs, 1))

    return {name: step(interval) for name, interval in ARMS.items()}


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    ranks = process_group.start(ParallelConfig())
    for num_micro_batches in (1, 4):
        seconds = time_rounds(arms(num_micro_batches, ranks), rounds, clock=time.process_time)
        step = 1e3 * float(np.median(seconds["off"]))
        print(f"micro-batches per step: {num_micro_batches}, {step:.0f} ms; CPU time ÷ that without a replay [95 %]:")
        for name in ("A/A", "replay"):
            print_ratio(name, seconds[name] / seconds["off"])


if __name__ == "__main__":
    main()
