"""Compare the time that `megatron-ddrp plan` expects with a run of a shape that it did not measure, on this machine.

    python benchmarks/plan_hours.py --data-path corpus_text_document --measured 3 --steps 200 --cpu-seconds

The plan measures the first shapes of its ladder, three steps each, and computes the next one from their speed. Then the
recipe of that shape trains on the dataset. --cpu-seconds counts processor time, for a CPU that others use too; set
OMP_NUM_THREADS=1 then.
"""

from __future__ import annotations

import contextlib
import io
import time

from measure import benchmark_parser

from megatron_ddrp.commands.options import SHAPES, Fill, Shape, recipe
from megatron_ddrp.commands.planning import PresentDevice, StepTimes
from megatron_ddrp.config import Config
from megatron_ddrp.config.run import config_of
from megatron_ddrp.data.dataset.indexed_dataset import entry, read_manifest
from megatron_ddrp.run.launch import guest
from megatron_ddrp.run.log import duration
from megatron_ddrp.train import train


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--data-path", required=True, help="dataset of megatron-ddrp preprocess")
    parser.add_argument("--measured", type=int, default=3, help="number of shapes that the plan measures")
    parser.add_argument("--rows", type=int, default=16, help="rows of 128 tokens per step")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--cpu-seconds", action="store_true")
    options = parser.parse_args()
    pieces = entry(read_manifest(options.data_path), "tokenizer")["vocab_size"]
    clock = time.process_time if options.cpu_seconds else time.perf_counter
    device = PresentDevice(pieces, clock)

    def config_at(shape: Shape, micro_batch: int) -> Config:
        seen, full = options.steps * options.rows * 128, Fill(1, 128)
        return config_of(recipe(shape, seen, 128, options.rows, micro_batch, full)).with_vocabulary(pieces)

    for shape in SHAPES[: options.measured]:
        step = device.fastest(config_at(shape, 1), options.rows)
        print(f"{shape}: measured, {step.seconds:.3f} s per step with micro-batches of {step.micro_batch}", flush=True)
    device.patience = 0
    shape = SHAPES[options.measured]
    step = device.fastest(config_at(shape, 1), options.rows)
    assert step.gib is None
    print(f"{shape}: expected, {step.seconds:.3f} s per step with micro-batches of {step.micro_batch}", flush=True)
    times = StepTimes(clock)
    config = config_at(shape, step.micro_batch).replace(
        data={"data_path": (options.data_path,)}, logging={"log_interval": 1, "eval_interval": 0}
    )
    with guest(), contextlib.redirect_stdout(io.StringIO()):
        train(config, [times])
    expected, taken = step.seconds * len(times.seconds), sum(times.seconds)
    print(
        f"{shape}: {len(times.seconds)} steps took {duration(taken)}, expected {duration(expected)}, "
        f"{expected / taken:.2f} of it"
    )


if __name__ == "__main__":
    main()
