"""What engines of several layouts hold on each rank between backward pass and step, counted storage by storage."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_ddrp.arguments import parse_arguments
from megatron_ddrp.config import Config
from megatron_ddrp.corpus import Corpus
from megatron_ddrp.engine.build import build_engine
from megatron_ddrp.engine.step import train_step, training_inputs
from megatron_ddrp.model import build_model
from megatron_ddrp.parallel.process_group import place_in_grid
from tests.integration.launch import TIMEOUT
from tests.integration.training_runs import forget_layout, run_ranks

Held = dict[str, int]
"""Bytes by kind: weights, gradients, optimizer; `all` counts every tensor that came since before the model."""


def held_by(world_size: int, command_lines: list[list[str]]) -> list[list[Held]]:
    """For each `pretrain_bert.py ARGUMENTS`, what each of the ranks holds in its second step."""
    by_rank = run_ranks(world_size, _two_steps_each, command_lines, TIMEOUT)
    return [list(of_ranks) for of_ranks in zip(*by_rank, strict=True)]


def _two_steps_each(command_lines: list[list[str]], _: Path) -> list[Held]:
    return [two_steps(parse_arguments(words).config) for words in command_lines]


def two_steps(config: Config) -> Held:
    """Train two steps; in the second, the most that is held after any micro-batch's backward pass."""
    ranks = place_in_grid(torch.device("cpu"), config.parallel)
    corpus = Corpus.open(config)
    config = config.replace(model={"vocab_size": corpus.tokenizer.vocab_size})
    loader = corpus.loader("train", ranks.data_rank, ranks.data_size)
    gc.collect()
    before = size(all_tensors())
    model = build_model(config.model, config.parallel.checkpoint_activations, config.objective)
    engine = build_engine(model, config, ranks, loader.num_micro_batches)
    del model
    held: Held = {}

    def count_before(action: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*arguments: Any, **named: Any) -> Any:
            now = held_now(engine) | {"all": settled_size() - before}
            held.update({kind: max(held.get(kind, 0), now[kind]) for kind in now})
            return action(*arguments, **named)

        return counting

    for step in (1, 2):
        if step == 2:
            engine.step, engine._take_model_step = count_before(engine.step), count_before(engine._take_model_step)
        micro_batches = loader.step((step - 1) * config.training.global_batch_size)
        train_step(engine, training_inputs(micro_batches, config, step, ranks.device), config, ranks, step)
    engine.destroy()
    forget_layout()
    return held


def all_tensors() -> list[Tensor]:
    return [item for item in gc.get_objects() if issubclass(type(item), Tensor)]


def settled_size() -> int:
    """Return the bytes of all tensors, without those that a thread of gloo is about to let go after a collective."""
    sizes = []
    for _ in range(20):
        gc.collect()
        sizes.append(size(all_tensors()))
        time.sleep(0.01)
    return min(sizes)


def size(tensors: Iterable[Tensor]) -> int:
    """Bytes of their storages, each once."""
    there = [tensor.untyped_storage() for tensor in tensors if tensor.device.type == "cpu"]
    return sum({storage.data_ptr(): storage.nbytes() for storage in there}.values())


def held_now(engine: Any) -> Held:
    """By kind, from where DeepSpeed keeps each."""
    parameters = list(engine.module.parameters())
    weights = [p.data for p in parameters] + [p.ds_tensor for p in parameters if hasattr(p, "ds_tensor")]
    zero = engine.optimizer
    gradients = [grad for p in parameters for grad in (p.grad, getattr(p, "grad_accum", None)) if grad is not None]
    for kept in ("averaged_gradients", "all_grad_tensors"):
        gradients += [part for parts in getattr(zero, kept, {}).values() for part in parts or []]
    if getattr(zero, "grad_partitions_flat_buffer", None) is not None:
        gradients.append(zero.grad_partitions_flat_buffer)
    adam = getattr(zero, "optimizer", zero)
    state = [x for of_one in adam.state.values() for x in of_one.values() if isinstance(x, Tensor)]
    own = {id(p) for p in parameters}
    masters = [p for group in adam.param_groups for p in group["params"] if id(p) not in own]
    masters += list(getattr(zero, "fp32_partitioned_groups_flat", []))
    return {"weights": size(weights), "gradients": size(gradients), "optimizer": size(state + masters)}
