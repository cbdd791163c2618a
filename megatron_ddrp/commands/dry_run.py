"""Report of `--dry-run`: the run that the flags describe. It writes nothing and forms no process group."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from itertools import pairwise
from typing import Any

import torch

from megatron_ddrp.checkpoint import refuse_folders
from megatron_ddrp.config import Config, ModelConfig, ParallelConfig, concerns, flag
from megatron_ddrp.config.reading import options_of
from megatron_ddrp.config.registry import plugin_files
from megatron_ddrp.corpus import Corpus, tokenizer_flags, verify_data, with_tokenizer
from megatron_ddrp.engine.build import precision_fault
from megatron_ddrp.engine.checkpoint import check_start
from megatron_ddrp.engine.layout import Setup
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError
from megatron_ddrp.memory import GIB, Memory, neediest_by_zero_stage
from megatron_ddrp.model import count_parameters, on_meta_device
from megatron_ddrp.model.fused import missing_code
from megatron_ddrp.objectives.electra import NoteDictionary
from megatron_ddrp.run.devices import DEVICES, LISTED, SHARE, Device, why_not, with_chosen_backend
from megatron_ddrp.run.flops import step_seconds
from megatron_ddrp.run.launch import launched_rank, launched_world_size
from megatron_ddrp.run.log import duration

NOT_GIVEN = {
    "absolute_embedding": "decided by --position-encoding",
    "deberta_emd": "decided by --position-encoding",
    "lr_wsd_decay_iters": "the last tenth",
    "lr_decay_iters": "all of --train-iters",
    "lr_warmup_iters": "decided by --lr-warmup-fraction",
    "num_threads": "torch chooses",
    "new_head_iters": "decided by the folder of --load",
    "index_cache_dir": "beside the data",
    "split": "none: training and validation data are given apart",
    "save": "none: nothing is saved",
    "load": "none: starts afresh",
    "exit_interval": "none: runs to the end",
    "exit_duration_in_mins": "none: runs to the end",
}
"""Setting → words that are printed if it is not given; "none" for all others."""


def dry_run(config: Config, world_size: int | None = None, device_memory: float | None = None) -> None:
    """Print the resolved configuration, parameters, memory and steps; the last line is one JSON object.

    `world_size` is by default the number of ranks that the launcher announced. Refuses every setting that a run would
    refuse, and a layout that needs more than `device_memory` GiB on some rank. A precision that this machine lacks
    gives only a warning: the plan may be for another machine.
    """
    if launched_rank() != 0:
        return
    world_size = world_size or launched_world_size()
    refuse_folders(*config.checkpoint.folders)
    config, of_data, about_data, dictionary_bytes = open_data(config)
    training, parallel = config.training, config.parallel
    setup = Setup.planned(config, world_size, "cuda")
    model = on_meta_device(config.model, config.objective)
    parameters, position_parameters = count_parameters(model)

    def needs_of(config: Config) -> dict[int, Memory]:
        """Return the memory of the rank that needs the most, by ZeRO stage; bf16 implies Triton attention."""
        if training.bf16:
            config = with_chosen_backend(config, DEVICES["a100"])
        return neediest_by_zero_stage(model, replace(setup, config=config), dictionary_bytes)

    needs = needs_of(config)
    memory = needs[parallel.zero_stage]
    facts = {
        "parameters": parameters,
        "position_parameters": position_parameters,
        "tokens_per_step": training.global_batch_size * config.last_phase.seq_length,
        "memory_per_rank_bytes": memory.total,
        "memory_per_rank": asdict(memory),
        "memory_by_zero_stage": {str(stage): of_stage.total for stage, of_stage in needs.items()},
        "world_size": world_size,
        "tensor_parallel": parallel.tensor_model_parallel_size,
        "pipeline_parallel": parallel.pipeline_model_parallel_size,
        "data_parallel": setup.ranks.data_size,
        "zero_stage": parallel.zero_stage,
        "micro_batches_per_step": setup.num_micro_batches,
        "train_iters": training.train_iters,
        "estimates": estimates(config, world_size, needs_of),
        **of_data,
    }
    if device_memory is not None:
        refuse_too_large(needs, parallel, device_memory)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    faults = {"": missing_code(device), f"--{training.precision}: ": precision_fault(training.precision, device)}
    for line in [cause + fault for cause, fault in faults.items() if fault]:
        print(f"warning: a run on this machine would be refused: {line}")
    needed = memory_table(needs, parallel.zero_stage)
    remarks = config.optimizer.chosen.remarks(model)
    lines = (*settings(config), *summary(config, facts), *remarks, *needed, *estimate_table(facts), *about_data)
    print("\n".join(lines))
    print(json.dumps(facts))


def estimates(
    config: Config, world_size: int, needs_of: Callable[[Config], dict[int, Memory]]
) -> dict[str, dict[str, float]]:
    """Return the estimated step on each device of `megatron_ddrp/run/devices.py` that can run it; nothing was measured.

    `needs_of` returns the memory of the rank that needs the most, by ZeRO stage.
    """
    found = {}
    for name, device in LISTED.items():
        if why_not(config, device) is None:
            needed = needs_of(with_chosen_backend(config, device))[config.parallel.zero_stage].total / GIB
            seconds, hours = step_seconds(config, world_size, device), hours_of(config, world_size, device)
            found[name] = {"step_seconds": seconds, "hours": hours, "needed_gib": needed, "memory_gib": device.memory}
    return found


def hours_of(config: Config, world_size: int, device: Device) -> float:
    """Return the estimated hours of all steps, phase by phase."""
    steps = pairwise([0, *(phase.last_step(config.training.train_iters) for phase in config.phases)])
    seconds = (step_seconds(config.of_phase(phase), world_size, device) for phase in config.phases)
    return sum((end - begin) * of_step for (begin, end), of_step in zip(steps, seconds, strict=True)) / 3600


def estimate_table(facts: dict[str, Any]) -> list[str]:
    """Return the estimates as lines, one row per kind of GPU."""
    rows = [["GPU", "s per step", "time", "GiB needed", "GiB available"]]
    for name, estimate in facts["estimates"].items():
        row = [name.upper(), digits(estimate["step_seconds"]), duration(max(1.0, 3600 * estimate["hours"]))]
        rows.append([*row, digits(estimate["needed_gib"]), f"{estimate['memory_gib']:g}"])
    how = f"FLOP at {SHARE:.0%} of the peak, docs/plan.md; with Triton attention no logits are kept"
    return [f"estimated, not measured ({how}):", *columns(rows)]


def digits(number: float) -> str:
    """Return a number with three digits, so that a small one is not shown as 0."""
    return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"


def columns(rows: list[list[str]]) -> list[str]:
    """Return rows of cells as indented lines, right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(map(str.rjust, row, widths)) for row in rows]


def open_data(config: Config) -> tuple[Config, dict[str, Any], list[str], int]:
    """Return the configuration with the tokenizer's vocabulary size, and facts about the data, if they are named.

    The facts are entries for the JSON object, lines, and the size of the note dictionary in bytes.
    """
    data = config.data
    if not data.names_data:
        if data.vocab_file or data.tokenizer_model:
            config = with_tokenizer(config, ())
            config = config.with_vocabulary(tokenizer_flags(config).build().vocab_size)
        return config, {}, [], 0
    verified = verify_data(config)
    corpus = Corpus.open(config, keep_counts=False)
    config = corpus.config.with_vocabulary(corpus.tokenizer.vocab_size)
    check_start(config.checkpoint.folders[1], config, corpus.tokenizer)
    samples = corpus.samples("train")
    consumed = config.training.train_iters * config.training.global_batch_size
    lines = [*verified, *corpus.remarks, *corpus.split_remarks(), f"data: {corpus.summary(samples, consumed)}"]
    epochs = corpus.epochs(consumed)[0] if samples.counts is None else consumed / len(samples)
    facts: dict[str, Any] = {"training_sequences": len(samples), "epochs": epochs}
    size = 0
    if config.objective.notes:
        words, line = corpus.rare_words
        with torch.device("meta"):  # only for its size, without the memory
            size = NoteDictionary(words, config.model.hidden_size, config.objective).size_bytes
        facts["notes"] = len(words)
        lines.append(f"notes: {line}; dictionary {size / 2**20:,.1f} MiB of host memory per rank")
    return config, facts, lines, size


def refuse_too_large(needs: dict[int, Memory], parallel: ParallelConfig, device_memory: float) -> None:
    """Raise `UserError` for a layout in which a rank needs more than `device_memory` GiB."""
    stage = parallel.zero_stage
    if needs[stage].total <= device_memory * GIB:
        return
    fitting = [f"--zero-stage {other}" for other in needs if needs[other].total <= device_memory * GIB]
    without_graphs = needs[stage].total - needs[stage].graphs <= device_memory * GIB
    ways = [*fitting[:1], *["--cuda-graphs off"] * without_graphs, "a smaller --micro-batch-size"]
    ways += ["--checkpoint-activations"] * (not parallel.checkpoint_activations)
    raise UserError(
        f"a rank needs about {needs[stage].total / GIB:.1f} GiB, --device-memory is {device_memory:g} (activations: "
        f"about {needs[stage].activations_estimate / GIB:.1f}): use {', '.join(ways)}, or cut the model by "
        "--tensor-model-parallel-size and --pipeline-model-parallel-size",
        WRONG_ARGUMENTS,
    )


def settings(config: Config) -> list[str]:
    """Return the resolved configuration as lines, one setting per line under its concern."""
    lines = []
    for concern, values in config.to_dict().items():
        lines.append(f"{concern}:")
        flags = options_of(concerns()[concern])
        by_file = dict.fromkeys(config.parallel.decided_by_deepspeed_config, "   (by --deepspeed-config)")
        lines += [
            f"  {flag(name)} {setting(name, value, config.model)}{by_file.get(name, '')}"
            for name, value in values.items()
            if name in flags
        ]
    return [*lines, *(f"--plugin {path}" for path in plugin_files())]


def setting(name: str, value: Any, model: ModelConfig) -> str:
    """Return a setting's value as typed on a command line; for a missing one its resolved value."""
    if isinstance(value, tuple):
        return " ".join(value) or "(none)"
    if value is not None:
        return str(value)
    resolved = {"ffn_hidden_size": model.ffn_size, "deberta_emd": model.decodes_masks}
    return str(resolved.get(name, f"({NOT_GIVEN.get(name, 'none')})"))


def summary(config: Config, facts: dict[str, Any]) -> list[str]:
    """Return parameters, layout and steps of the JSON object as lines for people."""
    training, ranks = config.training, facts["world_size"]
    micro_batches = facts["micro_batches_per_step"]
    return [
        f"parameters: {facts['parameters']:,}, of which positions {facts['position_parameters']:,}",
        f"layout: {count(ranks, 'rank')} = {facts['tensor_parallel']} tensor x {facts['pipeline_parallel']} "
        f"pipeline x {facts['data_parallel']} data, ZeRO {facts['zero_stage']}, {training.precision}"
        f"{config.parallel.sequence_note}",
        f"steps: {facts['train_iters']:,} of {training.global_batch_size:,} sequences, up to "
        f"{facts['tokens_per_step']:,} tokens each; a rank and step: {count(micro_batches, 'micro-batch', 'es')} "
        f"of {training.micro_batch_size}",
    ]


def count(number: int, noun: str, plural: str = "s") -> str:
    """Return a number with its noun, such as `1 rank` or `2 ranks`."""
    return f"{number:,} {noun}{plural if number != 1 else ''}"


def memory_table(needs: dict[int, Memory], chosen: int) -> list[str]:
    """Return a table of the memory of the rank that needs the most, in MiB by ZeRO stage; marks the run's stage."""
    names = [f.name for f in fields(Memory) if f.name != "on_host"]
    rows = [["ZeRO", *(name.replace("_", " ") for name in names), "together"]]
    for stage, memory in needs.items():
        sizes = [*(getattr(memory, name) for name in names), memory.total]
        rows.append([f"{stage} *" if stage == chosen else f"{stage}  ", *(f"{size / 2**20:,.0f}" for size in sizes)])
    on_host = needs[chosen].on_host
    host = f"; in host memory {on_host / 2**20:,.0f}" if on_host else ""
    return [f"memory of the rank that needs the most, MiB (* this run{host}):", *columns(rows)]
