"""`--packing` changes where documents lie, not what is learned: same losses and gradients, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_ddrp.arguments import parse_arguments
from megatron_ddrp.config import ENCODINGS, Config
from megatron_ddrp.corpus import Corpus
from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.data.batches.loader import BatchLoader
from megatron_ddrp.model import build_model
from megatron_ddrp.model.attention.backends import BACKENDS
from megatron_ddrp.objectives.contract import count_sequences, make_objective
from tests.integration.launch import read_rows, start_ranks, training_rows

Flags = Callable[..., list[str]]
EXACT = ("iteration", "consumed_samples", "consumed_tokens", "lr")
STEPS = {"train_iters": 3, "global_batch_size": 16, "micro_batch_size": 8, "seq_length": 128}
"""Rows of 128 tokens, of which the corpus' documents fill about half."""


def assert_same_course(rows: list[dict[str, Any]], reference: list[dict[str, Any]]) -> None:
    """Equal counts, losses and norms to 1e-5 (relative; hcd_loss passes through 0, so 1e-6 beside it)."""
    assert len(rows) == len(reference) > 0
    for row, expected in zip(rows, reference, strict=True):
        assert row.keys() == expected.keys()
        for key, value in expected.items():
            close = value if key in EXACT else pytest.approx(value, rel=1e-5, abs=1e-6)
            assert row[key] == close, (row["iteration"], key)


def print_rows() -> None:
    """Print how many rows each step has. Runs in a rank, before the training program."""
    step = BatchLoader.step

    def counting(self: BatchLoader, *place: int) -> list[Batch]:
        batches = step(self, *place)
        print("rows:", sum(len(batch.input_ids) for batch in batches), flush=True)
        return batches

    BatchLoader.step = counting  # type: ignore[method-assign]


def printed_rows(stdout: str) -> list[int]:
    return [int(line.split()[1]) for line in stdout.splitlines() if line.startswith("rows:")]


def sums_and_gradients(config: Config, packing: bool, backend: str) -> tuple[Tensor, dict[str, Tensor]]:
    """The sums `[4]` of the first global batch in float64, and the gradients of their weighted total."""
    config = config.replace(data={"packing": packing}, model={"attention_backend": backend})
    corpus = Corpus.open(config)
    config = config.replace(model={"vocab_size": corpus.tokenizer.vocab_size})
    torch.manual_seed(0)
    model = build_model(config.model).double()
    total = torch.zeros(4, dtype=torch.float64)
    weights = torch.tensor([1.0, 20.0, 20.0, 0.0], dtype=torch.float64)
    for arrays in corpus.loader("train", 0, 1).step(0):
        draws = make_objective(config.objective).draw(arrays, config.model, config.training.seed, 1)
        sums = model(arrays.map(torch.from_numpy), draws).sums
        (sums * weights).sum().backward()
        total += sums.detach()
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("draws", [{}, {"tcd_tokens": 0, "hcd_heads": 0}], ids=["sampled", "all"])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_losses_and_gradients_of_a_global_batch(encoding: str, draws: dict[str, int], flags: Flags) -> None:
    """Packed, by each backend, as unpacked by the eager one."""
    arguments = STEPS | draws | {"position_encoding": encoding, "init_method_std": 0.2}
    config = parse_arguments(flags(**arguments)).config
    expected, expected_gradients = sums_and_gradients(config, False, "eager")
    assert expected[:3].abs().min() > 1e-3, "a term that is off would prove nothing"
    for backend in BACKENDS:
        sums, gradients = sums_and_gradients(config, True, backend)
        torch.testing.assert_close(sums, expected, rtol=1e-10, atol=1e-10, msg=lambda text, b=backend: f"{b}: {text}")
        assert gradients.keys() == expected_gradients.keys(), backend
        for name, gradient in expected_gradients.items():
            off = float((gradients[name] - gradient).abs().max())
            assert off <= 1e-9 * (1 + float(gradient.abs().max())), f"{backend}, {name}: {off} away"


def test_sequences_are_counted_by_document() -> None:
    document_ids = np.array([[1, 1, 2, 3, 3], [1, 2, 2, 0, 0], [1, 1, 1, 1, 1], [1, 2, 3, 4, 5], [0, 0, 0, 0, 0]])
    nothing = np.zeros_like(document_ids)
    assert count_sequences(Batch(nothing, nothing, document_ids, nothing, nothing, nothing)) == 2 + 1 + 1 + 0 + 0


@pytest.mark.parametrize(
    "encoding",
    [name if name == "ddrp" else pytest.param(name, marks=pytest.mark.slow) for name in ENCODINGS],
)
def test_packed_and_unpacked_runs_are_the_same(encoding: str, flags: Flags, tmp_path: Path) -> None:
    arguments = STEPS | {"position_encoding": encoding, "eval_interval": 3, "eval_iters": 1}
    unpacked = start_ranks(flags(**arguments, save=tmp_path / "unpacked"), before=print_rows).check()
    packed = start_ranks(flags(**arguments, save=tmp_path / "packed", packing=True), before=print_rows).check()
    assert printed_rows(unpacked.stdout[0]) == [16] * 4  # three steps and a validation
    assert len(printed_rows(packed.stdout[0])) == 4 and max(printed_rows(packed.stdout[0])) < 12
    assert_same_course(training_rows(tmp_path / "packed"), training_rows(tmp_path / "unpacked"))
    (ours,), (theirs,) = (
        [row["valid_lm_loss"] for row in read_rows(tmp_path / name) if "valid_lm_loss" in row]
        for name in ("packed", "unpacked")
    )
    assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.slow
def test_two_ranks_and_a_resume_follow_one_unpacked_process(flags: Flags, tmp_path: Path) -> None:
    start_ranks(flags(**STEPS, save=tmp_path / "one")).check()
    folder = tmp_path / "two"
    changes = STEPS | {"micro_batch_size": 2, "exit_interval": 2, "packing": True}
    for _ in range(2):  # the same command stops after two steps, then goes on
        start_ranks(flags(**changes, save=folder, load=folder), world_size=2).check()
    assert_same_course(training_rows(folder), training_rows(tmp_path / "one"))
