"""Whole runs for the GPU report: through the loop of the command, and fine-tuning twice."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from gpu_device import precision, release_memory
from gpu_groups import Bench, Row, noted
from gpu_training import FLAGSHIP, SEED, arm
from measure import DEVICE

from megatron_ddrp.config import ModelConfig
from megatron_ddrp.conversion.task_heads import SEQUENCE
from megatron_ddrp.encoders.encoder import TrainedEncoder
from megatron_ddrp.encoders.rows import RowWriter
from megatron_ddrp.model import build_model
from megatron_ddrp.tasks.finetune.determinism import fix_workspace
from megatron_ddrp.tasks.finetune.heads import TaskModel
from megatron_ddrp.tasks.finetune.runs import Run
from megatron_ddrp.tasks.finetune.training import finetune
from megatron_ddrp.tasks.glue.tasks import TASKS
from megatron_ddrp.train import train

STEPS, STOP = 6, 3


def whole_runs(bench: Bench) -> None:
    """Train by the command's loop: a run that saves and resumes beside one that does not, and ZeRO 1 to 3."""
    expected = losses_of(bench, "whole", 1)
    row: Row = {"name": f"saved and resumed at step {STOP} of {STEPS}, beside a run that never stopped"}
    with noted([row]):
        losses_of(bench, "resumed", 1, STOP)
        row["value"] = difference(expected, losses_of(bench, "resumed", 1))
    bench.write(row)
    for stage in (2, 3):
        row = {"name": f"--zero-stage {stage} beside 1"}
        with noted([row]):
            row["value"] = difference(expected, losses_of(bench, f"zero{stage}", stage))
        bench.write(row)


def losses_of(bench: Bench, name: str, stage: int, stop: int | None = None) -> np.ndarray:
    """Return loss and gradient norm `[steps, 2]` of a run of the flagship in its folder, which it resumes from."""
    folder = bench.folder / name
    config = arm(bench.sizes.usual_length, *FLAGSHIP, "packed").config(bench, bench.sizes.tokens)
    files: dict[str, Any] = {"save": str(folder), "load": str(folder) if folder.exists() else None}
    train(
        config.replace(
            training={"train_iters": STEPS, "global_batch_size": config.training.micro_batch_size},
            parallel={"zero_stage": stage},
            logging={"log_interval": 1, "eval_interval": 0},
            checkpoint={**files, "exit_interval": stop},
        )
    )
    release_memory()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return np.array([(row["loss"], row["grad_norm"]) for row in rows])


def difference(expected: np.ndarray, got: np.ndarray) -> str:
    """Return in words how far losses and gradient norms of two runs differ."""
    if np.array_equal(expected, got):
        return f"losses and gradient norms of all {len(got)} steps equal bit for bit"
    if expected.shape != got.shape:
        return f"{len(got)} steps instead of {len(expected)}"
    loss, norm = np.abs(got / expected - 1).max(axis=0)
    return f"losses differ by up to {loss:.1e} of themselves, gradient norms by up to {norm:.1e}"


def finetuning_twice(bench: Bench) -> None:
    """Fine-tune an encoder of the flagship's kind twice from one seed."""
    fix_workspace()
    row: Row = {"name": f"fine-tuning twice from one seed, {precision()}"}
    with noted([row]):
        first, second = (tuned_weights(bench) for _ in range(2))
        differing = [name for name, weight in first.items() if not torch.equal(weight, second[name])]
        row["value"] = f"{len(differing)} of {len(first)} tensors differ" if differing else "equal bit for bit"
    bench.write(row)


def tuned_weights(bench: Bench) -> dict[str, torch.Tensor]:
    """Return the weights after one epoch on random rows."""
    sizes, random, writer = bench.sizes, np.random.default_rng(SEED), RowWriter(0)
    for length in random.integers(8, min(128, sizes.usual_length), 4 * 32):
        writer.add(random.integers(5, sizes.vocabulary, length).tolist())
    rows = writer.rows(random.integers(0, 2, 4 * 32))
    shape: dict[str, Any] = {"num_layers": sizes.layers, "hidden_size": sizes.hidden}
    config = ModelConfig(
        **shape, num_attention_heads=sizes.heads, seq_length=sizes.usual_length, vocab_size=sizes.vocabulary
    )
    torch.manual_seed(SEED)
    model = TaskModel(TrainedEncoder(build_model(config)), sizes.hidden, SEQUENCE, 2).to(DEVICE)
    run = Run("CoLA", 32, 3e-5, 1, 1, 128, encoder="", data="", micro_batch_size=32, precision=precision())
    result = finetune(run, TASKS["CoLA"], model, rows, {"dev": rows})
    return {name: weight.cpu() for name, weight in result.model.state_dict().items()}
