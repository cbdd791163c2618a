"""A rank that has no micro-batch in the first step."""

from dataclasses import replace

import numpy as np
import torch

from megatron_ddrp.config import ModelConfig
from megatron_ddrp.conversion.model_code import SEQUENCE
from megatron_ddrp.encoders.encoder import TrainedEncoder
from megatron_ddrp.encoders.rows import RowWriter
from megatron_ddrp.model import build_model
from megatron_ddrp.parallel.process_group import Ranks
from megatron_ddrp.tasks.finetune import training
from megatron_ddrp.tasks.finetune.runs import TuningRun
from megatron_ddrp.tasks.finetune.table_files import Task
from megatron_ddrp.tasks.finetune.training import TaskModel


def test_a_rank_without_a_micro_batch_steps_in_fp16(monkeypatch):
    monkeypatch.setattr(
        training, "sum_over_ranks", lambda summed: own.append(summed) or summed + 1
    )  # rank 0 has gradients
    own = []
    writer = RowWriter(0)
    for _ in range(8):
        writer.add([1, 2, 3, 4])
    rows = writer.rows(np.arange(8) % 2)
    config = ModelConfig(num_layers=1, hidden_size=32, num_attention_heads=2, seq_length=8, vocab_size=100)
    model = TaskModel(TrainedEncoder(build_model(config)), 32, SEQUENCE, 2)
    run = TuningRun(
        "t", batch_size=8, lr=1e-5, epochs=1, seed=1, max_seq_length=8, encoder="e", data="d", micro_batch_size=4
    )
    run = replace(run, precision="fp16")
    task = Task(name="t", kind="classification", labels=("a", "b"), metric="accuracy")
    ranks = Ranks(1, 2, torch.device("cpu"))
    tuning = training.FineTuning(run, task, model, rows, ranks)
    tuning.step(np.arange(4))  # one micro-batch, which is rank 0's
    assert tuning.steps == 1 and not own[0].any(), "this rank adds nothing"
