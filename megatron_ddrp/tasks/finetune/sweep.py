"""Sweep of one or more encoders over tasks, a grid and seeds: its list of runs, and the execution of one run."""

from __future__ import annotations

import itertools
import sys
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from megatron_ddrp.encoders.encoder import Encoder, load_encoder
from megatron_ddrp.encoders.rows import Encoded
from megatron_ddrp.engine.device import instead_of_fp16
from megatron_ddrp.errors import UserError, allocations_as_user_errors
from megatron_ddrp.parallel.process_group import Ranks
from megatron_ddrp.run.host_memory import bound_kernel_caches, keep_freed_memory
from megatron_ddrp.tasks.finetune.determinism import fix_workspace
from megatron_ddrp.tasks.finetune.heads import build_model
from megatron_ddrp.tasks.finetune.kinds import KINDS
from megatron_ddrp.tasks.finetune.options import SweepOptions
from megatron_ddrp.tasks.finetune.predictions import predictions_file, write_predictions
from megatron_ddrp.tasks.finetune.runs import Point, Run, count_undefined
from megatron_ddrp.tasks.finetune.saving import keep_if_best
from megatron_ddrp.tasks.finetune.task import Examples, TaskData
from megatron_ddrp.tasks.finetune.training import RunResult, finetune

_SUBSET_SEED = 0
"""Seed of the rows that --max-train-examples keeps, the same for all runs and encoders."""


class Sweep:
    """Runs of one command line, with their encoders and data."""

    def __init__(
        self, options: SweepOptions, data: dict[str, TaskData], device: torch.device, ranks: Ranks | None = None
    ):
        """Load the encoders and list the runs. `ranks` is None unless several ranks share each run.

        Its own options name the checkpoints that were loaded: the run of an encoder may save more of them meanwhile.
        """
        self.device, self.ranks = device, ranks
        if device.type == "cuda":
            fix_workspace()
        else:
            if options.training.fp16:
                raise UserError(f"--fp16 needs a GPU; {instead_of_fp16()}", exit_code=2)
            keep_freed_memory()
            bound_kernel_caches()
        self.data = {name: _subset(task, options.search.max_train_examples) for name, task in data.items()}
        loaded = [
            replace(encoder, name=options.names.get(folder, encoder.name))
            for folder in dict.fromkeys(options.load)
            for encoder in [load_encoder(folder, options.random_init)]
        ]
        names = {encoder.folder: encoder.name for encoder in loaded}
        self.options = replace(options, load=tuple(names), names=names)
        self.encoders = {encoder.fingerprint: encoder for encoder in loaded}
        self.twins = [encoder for encoder in loaded if encoder is not self.encoders[encoder.fingerprint]]
        self.runs = [
            self._run(encoder, task, point, seed)
            for encoder, task, point, seed in itertools.product(
                self.encoders.values(), data, options.search.points, range(1, options.search.seeds + 1)
            )
        ]
        self._encoded: tuple[tuple[str, str], Encoded, dict[str, Encoded]] | None = None

    @property
    def speaks(self) -> bool:
        """True if this rank prints and writes, as one rank does."""
        return self.ranks is None or self.ranks.rank == 0

    def perform(self, run: Run) -> dict[str, Any]:
        """Do a run, write its predictions and maybe its model (on rank 0), and return its row of runs.jsonl."""
        task, (train, dev) = self.data[run.task].task, self.encoded(run)
        result = self.finetune(run, train, dev)
        path = predictions_file(self.options.output_dir, run)
        if self.speaks:
            scored = {name: (encoded.answers, result.predictions[name]) for name, encoded in dev.items()}
            write_predictions(path, task, scored)
        scoring, *others = dev
        kind = KINDS[task.kind]
        answers, predicted = dev[scoring].answers, result.predictions[scoring]
        row = asdict(run) | {
            "load": self.encoders[run.encoder].name,
            "checkpoint": str(self.encoders[run.encoder].folder),
            "metric": task.metric,
            "score": result.scores[scoring][-1],
            "epoch_scores": result.scores[scoring],
            "train_examples": len(self.data[run.task].train),
            "dev_examples": len(self.data[run.task].dev[scoring]),
            "predictions": str(path.relative_to(self.options.output_dir)),
            "steps": result.steps,
            "seconds": round(result.seconds, 3),
        }
        row |= self.options.suite.row_facts(self.data[run.task])
        if beside := kind.beside(task):
            row["beside"] = {metric: kind.score(metric, answers, predicted) for metric in beside}
        if others:
            row["other_scores"] = {file: result.scores[file][-1] for file in others}
        row = count_undefined(row, kind.metrics[task.metric].undefined)
        if self.options.suite.keeps_model(run.task) and self.speaks:
            keep_if_best(
                self.options.output_dir, self.encoders[run.encoder], self.data[run.task], run, result.model, row
            )
        return row

    def finetune(
        self, run: Run, train: Encoded, dev: dict[str, Encoded], test: dict[str, Encoded] | None = None
    ) -> RunResult:
        """Fine-tune a fresh copy of the run's encoder."""
        task = self.data[run.task].task
        with allocations_as_user_errors(need_less_memory(run)):
            return finetune(run, task, self.model(run), train, dev, self.ranks, test)

    def model(self, run: Run) -> nn.Module:
        """Return a fresh copy of a run's encoder with a new head, on the device."""
        return build_model(self.encoders[run.encoder], self.data[run.task].task, run, self.device)

    def encoded(self, run: Run) -> tuple[Encoded, dict[str, Encoded]]:
        """Return the training rows and the development files of a run; cache those of the last encoder and task."""
        key = (run.encoder, run.task)
        if self._encoded is None or self._encoded[0] != key:
            data = self.data[run.task]
            dev = {file: self.encode(run, examples, file) for file, examples in data.dev.items()}
            self._encoded = key, self.encode(run, data.train, "train"), dev
        return self._encoded[1:]

    def encode(self, run: Run, examples: Examples, file: str) -> Encoded:
        """Return the examples as rows for a run's encoder; print a warning with `file` for examples that do not fit."""
        encoder, task = self.encoders[run.encoder], self.data[run.task].task
        kind = KINDS[task.kind]
        encoded = kind.encode(task, examples, encoder.tokenizer, run.max_seq_length)
        if encoded.warning and self.speaks:
            print(f"{self.options.suite.program}: warning: {task.name}, {file}: {encoded.warning}", file=sys.stderr)
        return encoded

    def _run(self, encoder: Encoder, task: str, point: Point, seed: int) -> Run:
        options, training = self.options, self.options.training
        world_size = self.ranks.world_size if self.ranks else 1
        parts = world_size if self.device.type == "cuda" else max(2, world_size)
        return Run(
            task,
            **asdict(point),
            seed=seed,
            max_seq_length=min(training.max_seq_length, encoder.max_length),
            encoder=encoder.fingerprint,
            data=self.data[task].fingerprint,
            micro_batch_size=min(point.batch_size, training.micro_batch_size or -(-point.batch_size // parts)),
            layerwise_lr_decay=training.layerwise_lr_decay,
            precision=training.precision,
            max_train_examples=options.search.max_train_examples,
            head=options.suite.head if encoder.family_model else "common",
            scales_labels=options.suite.scales_labels and KINDS[self.data[task].task.kind].predicts_numbers,
        )


def need_less_memory(run: Run) -> str:
    """Return advice about flags that lower the memory of a run."""
    size = run.micro_batch_size
    smaller = f"--micro-batch-size {size // 2} instead of {size}, " if size > 1 else ""
    return f"use {smaller}--max-seq-length below {run.max_seq_length} or fewer --workers"


def _subset(data: TaskData, size: int | None) -> TaskData:
    if size is None or size >= len(data.train):
        return data
    rows = np.sort(np.random.default_rng(_SUBSET_SEED).permutation(len(data.train))[:size])
    return data._replace(train=data.train.only(rows))
