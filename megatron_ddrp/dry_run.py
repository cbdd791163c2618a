"""`--dry-run`: what a run would be, from its flags alone; nothing is written, no process group is formed."""

from __future__ import annotations

import json
from typing import Any

from megatron_ddrp.config import Config, flag
from megatron_ddrp.corpus import Corpus
from megatron_ddrp.data.loader import count_micro_batches
from megatron_ddrp.data.tokenizer import build_tokenizer
from megatron_ddrp.engine.build import deepspeed_settings
from megatron_ddrp.launch import launched_rank, launched_world_size
from megatron_ddrp.model import count_parameters, on_meta_device

ADAM_MOMENTS = 2
FP32 = 4


def dry_run(config: Config) -> None:
    """Print the resolved configuration, parameters, memory and steps; the last line is one JSON object."""
    if launched_rank() != 0:
        return
    facts: dict[str, Any] = {}
    data_lines = ""
    data = config.data
    if any(path is not None for path in (data.data_path, data.train_data_path, data.valid_data_path)):
        corpus = Corpus.open(config, keep_indices=False)
        config = config.replace(model={"vocab_size": corpus.tokenizer.vocab_size})
        samples = corpus.samples("train")
        consumed = config.training.train_iters * config.training.global_batch_size
        facts["training_sequences"] = len(samples)
        facts["epochs"] = consumed / len(samples)
        data_lines = corpus.describe(samples, consumed)
    elif data.vocab_file or data.tokenizer_model:
        tokenizer = build_tokenizer(data.tokenizer_type, data.vocab_file, data.tokenizer_model)
        config = config.replace(model={"vocab_size": tokenizer.vocab_size})
    world_size = launched_world_size()
    training = config.training
    data_size = config.parallel.data_parallel_size(world_size)
    micro_batches = count_micro_batches(training.global_batch_size, training.micro_batch_size, data_size)
    deepspeed_settings(config, micro_batches, data_size)
    parameters, position_parameters = count_parameters(on_meta_device(config.model, config.objective))
    memory = memory_per_rank(config, parameters * data_size // world_size, data_size)
    facts = {
        "parameters": parameters,
        "position_parameters": position_parameters,
        "tokens_per_step": training.global_batch_size * config.model.seq_length,
        "memory_per_rank_bytes": sum(memory.values()),
        "memory_per_rank": memory,
        "world_size": world_size,
        "micro_batches_per_step": micro_batches,
        "train_iters": training.train_iters,
        **facts,
    }
    print(describe(config))
    print(summary(config, facts))
    if data_lines:
        print(f"data: {data_lines}")
    print(json.dumps(facts))


def memory_per_rank(config: Config, parameters: int, data_size: int) -> dict[str, int]:
    """Bytes a rank holds of weights, gradients, optimizer state and (roughly) activations.

    `parameters` are those that tensor and pipeline parallelism leave to a rank, about equal parts. ZeRO 1 shards the
    optimizer state over the `data_size` ranks that hold the same, 2 the gradients too, 3 the weights too. 16-bit
    training keeps fp32 master weights beside Adam's two moments.
    """
    stage = config.parallel.zero_stage
    half = config.training.precision != "fp32"
    width = FP32 // 2 if half else FP32
    weights, gradients = parameters * width, parameters * width
    optimizer = parameters * FP32 * (ADAM_MOMENTS + half)
    return {
        "weights": weights // (data_size if stage >= 3 else 1),
        "gradients": gradients // (data_size if stage >= 2 else 1),
        "optimizer": optimizer // (data_size if stage >= 1 else 1),
        "activations": activation_bytes(config, width),
    }


def activation_bytes(config: Config, width: int) -> int:
    """What a micro-batch keeps for the backward pass: about 16 hidden-sized tensors and two FFN-sized ones a layer,
    the predicted tokens' logits in fp32, and one layer's attention logits at a time."""
    model, tokens = config.model, config.training.micro_batch_size * config.model.seq_length
    layer = tokens * (16 * model.hidden_size + 2 * model.ffn_size) * width
    kept_layers = 1 if config.parallel.checkpoint_activations else model.num_layers
    boundaries = model.num_layers * tokens * model.hidden_size * width
    logits = int(tokens * config.objective.mask_prob) * model.padded_vocab_size * FP32 * 2
    attention = tokens * model.seq_length * model.num_attention_heads * width
    return layer * kept_layers + boundaries + logits + attention


def describe(config: Config) -> str:
    """The resolved configuration, one setting a line under its concern."""
    lines = []
    for concern, settings in config.to_dict().items():
        lines.append(f"{concern}:")
        for name, value in settings.items():
            lines.append(f"  {flag(name)} {' '.join(value) if isinstance(value, tuple) else value}")
    return "\n".join(lines)


def summary(config: Config, facts: dict[str, Any]) -> str:
    """The same as the JSON, for people."""
    memory = ", ".join(f"{name} {size / 2**20:,.0f}" for name, size in facts["memory_per_rank"].items())
    lines = [
        f"parameters: {facts['parameters']:,}, of which positions {facts['position_parameters']:,}",
        f"memory a rank, MiB: {memory}; together {facts['memory_per_rank_bytes'] / 2**20:,.0f}",
        f"steps: {facts['train_iters']:,} of {config.training.global_batch_size} sequences, up to "
        f"{facts['tokens_per_step']:,} tokens each; {facts['world_size']} rank(s) x {facts['micro_batches_per_step']} "
        f"micro-batch(es) of {config.training.micro_batch_size}",
    ]
    return "\n".join(lines)
