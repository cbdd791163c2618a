"""Errors of each layout's sums of bf16 gradients, in fp32 and in bf16: the table of docs/lab/agreement.md.

    python -m tests.endurance.gradient_sums

One step of 32 micro-batches on two ranks. A cell is the largest relative error over the ranks of the gradient that the
optimizer steps with, against the sum in float64 of the gradients that the backward passes gave.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from megatron_ddrp.pages.markdown import Table
from tests.endurance.layouts import make_corpus
from tests.integration.conftest import TINY, command_line
from tests.integration.inside_engines import error_of_first_step, of_each_run
from tests.integration.test_gradients import IN_BF16, RUN

RANKS = 2
LAYOUTS: dict[str, dict[str, Any]] = {
    "ZeRO 1": {"zero_stage": 1},
    "ZeRO 2": {"zero_stage": 2},
    "tensor 2, ZeRO 1": {"zero_stage": 1, "tensor_model_parallel_size": 2},
    "pipeline 2, ZeRO 1": {"zero_stage": 1, "pipeline_model_parallel_size": 2},
    "ZeRO 3": {"zero_stage": 3},
}
SUMS = {"in fp32": {}, "in fp32, reduced in bf16": {"communication_data_type": "bf16"}, "in bf16": IN_BF16}
"""Column → what a file of `--deepspeed_config` says."""


def main() -> None:
    """Print the table as Markdown."""
    cells: dict[tuple[str, str], str] = {}
    with tempfile.TemporaryDirectory() as folder:
        common = TINY | RUN | {"global_batch_size": 32} | make_corpus(Path(folder))
        wanted = [(layout, column) for layout in LAYOUTS for column in SUMS]
        command_lines = []
        for number, (layout, column) in enumerate(wanted):
            path = Path(folder) / f"{number}.json"
            path.write_text(json.dumps(SUMS[column]), encoding="utf-8")
            command_lines.append(command_line(common | LAYOUTS[layout] | {"deepspeed_config": path}))
        for key, errors in zip(wanted, of_each_run(RANKS, command_lines, error_of_first_step), strict=True):
            cells[key] = f"{max(errors):.1e}"
    print(Table(["layout", *SUMS], [[layout, *(cells[layout, column] for column in SUMS)] for layout in LAYOUTS]))


if __name__ == "__main__":
    main()
