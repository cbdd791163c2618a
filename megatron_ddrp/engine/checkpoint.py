"""Saving and resuming through DeepSpeed: complete or not at all, and exact.

DeepSpeed keeps parameters and optimizer state in files of its own (pickles: load only what you trust). Everything else
a run needs is a pure function of the step, so resuming means reading the step.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ddrp import checkpoint as files
from megatron_ddrp.config import Config, flag
from megatron_ddrp.errors import UserError
from megatron_ddrp.parallel.process_group import Ranks, agree, barrier


@dataclass(frozen=True)
class Progress:
    """How far a run has come, over all ranks."""

    iteration: int = 0
    """Optimizer steps done."""
    consumed_samples: int = 0
    consumed_tokens: int = 0
    """Non-padding tokens."""


def save_checkpoint(engine: Any, folder: Path, progress: Progress, config: Config, ranks: Ranks) -> Path:
    """Write DIR/iter_N and point `latest` at it; a collective call."""
    name = files.tag(progress.iteration)
    temporary = folder / f"{name}.tmp"
    if ranks.rank == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    barrier()
    engine.save_checkpoint(str(folder), tag=temporary.name, save_latest=False)
    weights = whole_weights(engine, config)
    if ranks.rank == 0:
        files.save_weights(weights, temporary)
        state = {
            "iteration": progress.iteration,
            "consumed_samples": progress.consumed_samples,
            "consumed_tokens": progress.consumed_tokens,
            "world_size": ranks.world_size,
            "config": config.to_dict(),
        }
        (temporary / files.STATE).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
    barrier()
    if ranks.rank == 0:
        shutil.rmtree(folder / name, ignore_errors=True)
        temporary.rename(folder / name)
        files.mark_latest(folder, name)
        files.prune(folder, config.checkpoint.keep_last, name)
    barrier()
    return folder / name


def whole_weights(engine: Any, config: Config) -> dict[str, Any]:
    """Every parameter whole and in fp32 on the CPU, whatever ZeRO shards; a collective call."""
    from deepspeed.utils import safe_get_full_fp32_param

    if config.parallel.zero_stage == 0:
        return {name: p.detach().float().cpu() for name, p in engine.module.named_parameters()}
    return {name: safe_get_full_fp32_param(p).cpu() for name, p in engine.module.named_parameters()}


def load_imported_weights(model: Any, folder: Path, config: Config) -> Path | None:
    """Fill a model from an imported checkpoint, which has no optimizer state; None where the newest is no such one.

    A collective call, before the engine is built: what ZeRO copies and shards are then these weights.
    """
    path = agree(lambda: files.newest(folder))
    if path is None:
        return None

    def load() -> bool:
        state = files.read_state(path)
        if not state.get(files.WEIGHTS_ONLY):
            return False
        _check_architecture(path, state, config)
        files.load_weights(model, path)
        return True

    return path if agree(load) else None


def load_checkpoint(engine: Any, folder: Path, config: Config, ranks: Ranks) -> Progress | None:
    """Go on from the newest checkpoint of a folder; None where it holds none. A collective call."""
    path = agree(lambda: files.newest(folder))
    if path is None:
        return None
    state = agree(lambda: _checked_state(path, config, ranks))

    def load() -> None:
        try:
            loaded, _ = engine.load_checkpoint(str(folder), tag=path.name)
        except Exception as error:  # whatever unpickling a damaged file raises
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UserError(f"{path}: rank {ranks.rank} cannot load its part: {reason}") from error
        if loaded is None:
            raise UserError(f"{path}: rank {ranks.rank} finds no DeepSpeed files in it")

    agree(load)
    return Progress(state["iteration"], state["consumed_samples"], state["consumed_tokens"])


def _checked_state(path: Path, config: Config, ranks: Ranks) -> dict[str, Any]:
    """state.json, if its model is ours and its layout is this run's."""
    state = files.read_state(path)
    _check_architecture(path, state, config)
    ours, theirs = config.to_dict(), state["config"]
    layout = ("world_size", ranks.world_size, state["world_size"])
    stage = ("--zero-stage", config.parallel.zero_stage, theirs["parallel"]["zero_stage"])
    for what, here, there in (layout, stage):
        if here != there:
            raise UserError(
                f"--load {path}: written with {what} {there}, this run has {here}; start it with {what} {there}"
            )
    precision = {name for name in ("bf16", "fp16") if theirs["training"][name] != ours["training"][name]}
    if precision:
        raise UserError(f"--load {path}: written with another precision; give or leave out --{min(precision)} as there")
    return state


def _check_architecture(path: Path, state: dict[str, Any], config: Config) -> None:
    ours = config.to_dict()["model"]
    for name, value in state["config"]["model"].items():
        if name not in ("hidden_dropout", "attention_dropout", "attention_backend") and ours[name] != value:
            raise UserError(
                f"--load {path}: a checkpoint of another architecture: {flag(name)} is {value} there and "
                f"{ours[name]} here; give the same, or another --load and --save"
            )
