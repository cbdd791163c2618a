"""Saving and resuming: complete or not at all, exact, and from any layout into any other.

A checkpoint holds whole fp32 weights and Adam's moments by the whole model's names (`megatron_ddrp/checkpoint.py`), so
saving gathers what ranks hold, one parameter at a time, and resuming takes each rank's part. Everything else that a run
needs is a pure function of the step.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_ddrp import checkpoint as files
from megatron_ddrp.config import Config, flag
from megatron_ddrp.engine import optimizer_state as state_of
from megatron_ddrp.errors import UserError, refusals_as_user_errors
from megatron_ddrp.parallel.process_group import Ranks, agree
from megatron_ddrp.tensor_files import Form, write_tensors


@dataclass(frozen=True)
class Progress:
    """How far a run has come, over all ranks."""

    iteration: int = 0
    """Optimizer steps done, skipped ones included."""
    consumed_samples: int = 0
    consumed_tokens: int = 0
    """Non-padding tokens."""


@dataclass(frozen=True)
class Resumed:
    """From where a run goes on."""

    progress: Progress
    path: Path
    notes: tuple[str, ...]
    """What a user should know: damaged checkpoints passed over, another layout."""
    weights_only: bool = False


def layout(config: Config, ranks: Ranks) -> dict[str, Any]:
    """What a checkpoint says of the ranks that wrote it; nothing in it depends on them."""
    return {
        "ranks": ranks.world_size,
        "zero_stage": config.parallel.zero_stage,
        "precision": config.training.precision,
    }


def save_checkpoint(engine: Any, folder: Path, progress: Progress, config: Config, ranks: Ranks) -> Path:
    """Write DIR/iter_N and point `latest` at it; a collective call.

    Raises `UserError` on every rank where the system refuses, such as a full disk; checkpoints before stay as they are.
    """
    temporary = folder / f"{files.tag(progress.iteration)}.tmp"
    try:
        return _save(engine, temporary, progress, config, ranks)
    except UserError:
        if ranks.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _save(engine: Any, temporary: Path, progress: Progress, config: Config, ranks: Ranks) -> Path:
    def begin() -> None:
        if ranks.rank == 0:
            with refusals_as_user_errors(temporary):
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir(parents=True)

    agree(begin)
    state_of.create_moments(engine)
    written: dict[str, Any] = {}

    def write(name: str, moments: tuple[str | None, ...]) -> None:
        tensors = _whole_tensors(engine, moments)
        if ranks.rank:
            for _ in tensors:
                pass
            return
        with refusals_as_user_errors(temporary):
            written[name] = write_tensors(temporary / name, _forms(engine, moments), tensors)

    agree(lambda: write("weights-00-of-01.safetensors", (None,)))
    agree(lambda: write(f"{files.OPTIMIZER}-00-of-01.safetensors", state_of.MOMENTS))

    def finish() -> Path:
        if ranks.rank == 0:
            state = {
                "iteration": progress.iteration,
                "consumed_samples": progress.consumed_samples,
                "consumed_tokens": progress.consumed_tokens,
                "optimizer_step": state_of.get_step(engine),
                "loss_scaler": state_of.get_loss_scaler(engine),
                "layout": layout(config, ranks),
                "files": written,
                "config": config.to_dict(),
            }
            with refusals_as_user_errors(temporary):
                files.complete(temporary, state)
            settings = config.checkpoint
            files.prune(temporary.parent, settings.keep_last, temporary.stem, settings.milestone_interval)
        return temporary.with_suffix("")

    return agree(finish)


def _own_tensors(engine: Any, moment: str | None) -> Iterator[tuple[str, Tensor]]:
    """(name in a checkpoint, tensor of the model); of the moments, trained parameters alone."""
    for name, tensor in files.model_tensors(engine.module).items():
        if moment is None:
            yield name, tensor
        elif tensor.requires_grad:
            yield f"{moment}/{name}", tensor


def _forms(engine: Any, moments: tuple[str | None, ...]) -> dict[str, Form]:
    forms = {}
    for moment in moments:
        for name, tensor in _own_tensors(engine, moment):
            shape = state_of.whole_shape(tensor)
            forms[name] = Form("float32", shape, 4) if tensor.requires_grad else Form.of(tensor, shape)
    return forms


def _whole_tensors(engine: Any, moments: tuple[str | None, ...]) -> Iterator[tuple[str, Tensor]]:
    for moment in moments:
        for name, tensor in _own_tensors(engine, moment):
            yield name, state_of.read_whole(engine, tensor, moment) if tensor.requires_grad else tensor


def load_checkpoint(engine: Any, folder: Path, config: Config, ranks: Ranks) -> Resumed | None:
    """Go on from the newest whole checkpoint of a folder; None where it holds none. A collective call."""
    path, notes = _newest_undamaged(folder, ranks)
    if path is None:
        return None

    def read() -> tuple[dict[str, Any], files.StoredTensors, files.StoredTensors]:
        state = files.read_state(path)
        _check_architecture(path, state, config)
        weights, moments = files.StoredTensors(path), files.StoredTensors(path, of_optimizer=True)
        weights.check({name: form.shape for name, form in _forms(engine, (None,)).items()})
        if not state.get(files.WEIGHTS_ONLY):
            if not moments.names:
                raise UserError(f"--load {path}: it holds weights and no optimizer state: an older version wrote it")
            moments.check({name: form.shape for name, form in _forms(engine, state_of.MOMENTS).items()})
        return state, weights, moments

    state, weights, moments = agree(read)
    _fill(engine, weights, None)
    if state.get(files.WEIGHTS_ONLY):
        state_of.refresh_weights(engine)
        return Resumed(Progress(), path, notes, weights_only=True)
    state_of.create_moments(engine)
    for moment in state_of.MOMENTS:
        _fill(engine, moments, moment)
    state_of.refresh_weights(engine)
    state_of.set_step(engine, state["optimizer_step"])
    state_of.set_loss_scaler(engine, state["loss_scaler"])
    progress = Progress(state["iteration"], state["consumed_samples"], state["consumed_tokens"])
    return Resumed(progress, path, (*notes, *_change_of_layout(state["layout"], layout(config, ranks))))


def _fill(engine: Any, stored: files.StoredTensors, moment: str | None) -> None:
    for name, tensor in _own_tensors(engine, moment):
        if tensor.requires_grad:
            state_of.write_whole(engine, tensor, stored[name].to(tensor.device), moment)
        else:
            tensor.data.copy_(stored[name])


def _newest_undamaged(folder: Path, ranks: Ranks) -> tuple[Path | None, tuple[str, ...]]:
    """The newest checkpoint whose files have the sums they were written with, and what was passed over."""
    found = agree(lambda: files.checkpoints(folder))
    reasons = []
    for path in found:
        reason = _fault_for_all(path, ranks)
        if reason is None:
            return path, tuple(f"passed over {path.parent / r}" for r in reasons)
        reasons.append(f"{path.name}: {reason}")
    if found:
        error = files.none_complete(folder, reasons)
        error.agreed = True
        raise error
    return None, ()


def _fault_for_all(path: Path, ranks: Ranks) -> str | None:
    """What is wrong with a checkpoint, found by all ranks together: each sums up some of its files."""

    def check() -> None:
        names = sorted(files.read_state(path).get("files", {})) if files.fault(path) is None else []
        reason = files.fault(path, names[ranks.rank :: ranks.world_size])
        if reason:
            raise UserError(reason)

    try:
        agree(check)
    except UserError as error:
        return str(error)
    return None


def _change_of_layout(theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """One line where the checkpoint comes from another layout than ours."""
    return [] if theirs == ours else [f"checkpoint of {describe(theirs)} → {describe(ours)}"]


def describe(layout: dict[str, Any]) -> str:
    """`4 ranks (ZeRO 1, bf16)`."""
    count = layout["ranks"]
    return f"{count} rank{'s' * (count > 1)} (ZeRO {layout['zero_stage']}, {layout['precision']})"


def _check_architecture(path: Path, state: dict[str, Any], config: Config) -> None:
    ours = config.to_dict()["model"]
    for name, value in state["config"]["model"].items():
        if name not in ("hidden_dropout", "attention_dropout", "attention_backend") and ours.get(name) != value:
            raise UserError(
                f"--load {path}: a checkpoint of another architecture: {flag(name)} is {value} there and "
                f"{ours.get(name)} here; give the same, or another --load and --save"
            )
