"""Training through the real engine in half precision, against the same runs in fp32 on the CPU, and with CUDA graphs
against the same runs without; two ranks; a kill.

All runs of a GPU share one process, which starts once.
"""

import functools
import signal
from typing import Any

import pytest
import torch

from megatron_ddrp.arguments import parse_arguments
from tests.gpu.conftest import GPU, ON_BOTH, context_of, half_precision, need_devices, on_devices
from tests.integration.conftest import Flags
from tests.integration.inside_engines import allow_fp16_on_the_cpu, train_emulated
from tests.integration.launch import armed, start_ranks
from tests.integration.training_runs import Rows, forget_layout, of_each_run, run_ranks, train_run

LOSS, NORM = 0.005, 0.03
"""Relative tolerances of losses and gradient norms in half precision. A CPU's are off by 0.001 and 0.004 at most."""
TIMEOUT = 240.0

SIZES: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 4, "seq_length": 64, "train_iters": 3}
RUNS: dict[str, dict[str, Any]] = {
    "zero 1": {"zero_stage": 1},
    "zero 2": {"zero_stage": 2},
    "zero 3": {"zero_stage": 3},
    "electra": {"objective": "electra"},
    "notes": {"notes": True, "notes_min_count": 5, "packing": True},
}
FP16 = "fp16 with a loss scale"
GRAPHS = [("absolute", "mlm"), ("ddrp", "mth"), ("deberta", "electra")]
"""Encodings and objectives of the runs with CUDA graphs."""


def rows_or_errors(command_lines: list[list[str]]) -> list[Any]:
    """Train every run; return its rows, or its error in a line."""
    if not torch.cuda.is_available():
        allow_fp16_on_the_cpu()
    outcomes: list[Any] = []
    for words in command_lines:
        try:
            outcomes.append(train_run(parse_arguments(words).config))
        except Exception as failure:
            forget_layout()
            outcomes.append(f"{type(failure).__name__}: {failure}")
    return outcomes


@functools.cache
def runs_on(device: str, world_size: int, lines: tuple[tuple[str, ...], ...]) -> list[Any]:
    """Return what each run gives on ranks of a device, in one process per rank."""
    command_lines = [list(line) for line in lines]
    return run_ranks(world_size, rows_or_errors, command_lines, TIMEOUT, context_of(device))[0]


def names_on(device: str) -> list[str]:
    """Return the names of the runs on a device."""
    return [*RUNS, FP16] if device == GPU else ["zero 1", "notes", FP16]


def in_half_precision(device: str, flags: Flags) -> dict[str, Any]:
    """Return the outcome of each run on a device, in bf16 where the device has it, `FP16` in fp16."""
    lines = []
    for name in names_on(device):
        precision = "fp16" if name == FP16 else half_precision(device)
        lines.append(tuple(flags(**SIZES, **RUNS.get(name, {}), **{precision: True})))
    return dict(zip(names_on(device), runs_on(device, 1, tuple(lines)), strict=True))


def in_fp32_on_the_cpu(device: str, flags: Flags) -> dict[str, Any]:
    """Return the outcomes of the runs that a device makes, made on the CPU in fp32."""
    names = [name for name in names_on(device) if name != FP16]
    outcomes = runs_on("cpu", 1, tuple(tuple(flags(**SIZES, **RUNS[name])) for name in names))
    return dict(zip(names, outcomes, strict=True)) | {FP16: outcomes[0]}


def assert_rows_close(rows: Any, expected: Rows, loss: float, norm: float) -> None:
    """Compare each step's loss and gradient norm."""
    assert isinstance(rows, list), rows
    for step, (row, wanted) in enumerate(zip(rows, expected, strict=True), start=1):
        assert row["loss"] == pytest.approx(wanted["loss"], rel=loss), step
        assert row["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=norm), step


@pytest.mark.parametrize("device, name", on_devices(*([(name,) for name in names_on(each)] for each in (GPU, "cpu"))))
def test_a_run_in_half_precision_follows_fp32_on_the_cpu(device: str, name: str, flags: Flags) -> None:
    assert_rows_close(in_half_precision(device, flags)[name], in_fp32_on_the_cpu(device, flags)[name], LOSS, NORM)


@pytest.mark.parametrize(("device", "encoding", "objective"), on_devices(GRAPHS, GRAPHS[:1]))
def test_a_run_with_cuda_graphs_repeats_one_without(device: str, encoding: str, objective: str, flags: Flags) -> None:
    def words(graphs: str) -> tuple[str, ...]:
        settings = {"hidden_dropout": 0.1, "attention_dropout": 0.1, "packing": True, "train_iters": 6}
        settings |= {half_precision(device): True} if device == GPU else {"attention_backend": "sdpa"}
        return tuple(flags(**SIZES | settings, position_encoding=encoding, objective=objective, cuda_graphs=graphs))

    lines = words("off"), words("on")
    if device == GPU:
        without, with_graphs = runs_on(device, 1, lines)
    else:
        [(without, *_)], [(with_graphs, used, *_)] = of_each_run(1, [list(line) for line in lines], train_emulated)
        assert min(used[0]) >= 1, "no shape was captured"
    assert isinstance(without, list) and len(without) == 6, without
    assert without == with_graphs


@pytest.mark.slow
@pytest.mark.parametrize("device", ON_BOTH)
def test_two_ranks_have_the_losses_of_one(device: str, flags: Flags) -> None:
    need_devices(device, 2)
    (rows,) = runs_on(device, 2, (tuple(flags(**SIZES, **RUNS["zero 1"])),))
    assert_rows_close(rows, in_fp32_on_the_cpu(device, flags)["zero 1"], 1e-3, 1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("device", ON_BOTH)
def test_a_killed_rank_ends_the_other(device: str, flags: Flags) -> None:
    need_devices(device, 2)
    words = flags(**SIZES, distributed_timeout_minutes=0.5)
    result = start_ranks(words, 2, armed("step.logged=SIGKILL@2", 1), context=context_of(device))
    assert result.exit_codes[1] == -signal.SIGKILL
    assert result.exit_codes[0] not in (0, None), "the other rank ended well, or was still waiting"
