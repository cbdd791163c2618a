"""Saving and resuming: complete or not at all, exact, and from any layout into any other.

A checkpoint holds whole fp32 weights and Adam's moments by the whole model's names (`megatron_ddrp/checkpoint/`), so
saving gathers what ranks hold, one parameter at a time, and resuming takes each rank's part. Everything else that a run
needs is a pure function of the step.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

from megatron_ddrp import checkpoint as files
from megatron_ddrp.checkpoint.tensor_files import Form, write_tensors
from megatron_ddrp.config import Config, changed_settings, flag
from megatron_ddrp.engine import optimizer_state as state_of
from megatron_ddrp.errors import UserError, agreed_by_all, refusals_as_user_errors
from megatron_ddrp.parallel.process_group import Ranks, agree, gather_objects
from megatron_ddrp.parallel.sharding import gather_whole, local_buffers, local_parameters, own_part, split_dimension

Moments = tuple[str | None, ...]
"""What is stored of a parameter: Adam's moments by name; None is its weight."""
WEIGHT: Moments = (None,)


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
    """Lines for the user: checkpoints passed over, a damaged `latest`, another layout, changed settings."""
    weights_only: bool = False


def layout(config: Config, ranks: Ranks) -> dict[str, Any]:
    """What a checkpoint says of the ranks that wrote it; nothing in it depends on them."""
    return {
        "ranks": ranks.world_size,
        "tensor": ranks.tensor_size,
        "pipeline": ranks.pipeline_size,
        "zero_stage": config.parallel.zero_stage,
        "precision": config.training.precision,
    }


class HeldState:
    """What this rank holds of the model, by the whole model's names. Its methods are collective calls."""

    def __init__(self, engine: Any, config: Config, ranks: Ranks) -> None:
        self.engine, self.config, self.ranks = engine, config.model, ranks
        self.tensors: dict[str, Tensor] = {**local_parameters(engine.module), **local_buffers(engine.module)}
        by_rank = gather_objects((ranks.pipeline_rank, sorted(self.tensors)))
        self.all_names = {name for _, names in by_rank for name in names}
        """Of the whole model."""
        earlier = {name for stage, names in by_rank if stage < ranks.pipeline_rank for name in names}
        self.written = [name for name in self.tensors if name not in earlier]
        """What our pipeline stage writes: a tied weight belongs to the first stage that holds it."""

    def forms(self, moments: Moments) -> dict[str, Form]:
        """Names in a checkpoint and shapes there of what our stage writes."""
        forms = {}
        for moment, name in self._stored(self.written, moments):
            tensor = self.tensors[name]
            shape = list(state_of.whole_shape(tensor))
            dimension = split_dimension(name, self.config)
            if dimension is not None:
                shape[dimension] *= self.ranks.tensor_size
            key = _key(name, moment)
            forms[key] = Form("float32", tuple(shape), 4) if tensor.requires_grad else Form.of(tensor, shape)
        return forms

    def whole(self, moments: Moments) -> Iterator[tuple[str, Tensor]]:
        """The tensors of `forms`, whole."""
        for moment, name in self._stored(self.written, moments):
            tensor = self.tensors[name]
            if tensor.requires_grad:
                whole = state_of.read_whole(self.engine, tensor, moment)  # type: ignore[arg-type]
            else:
                whole = state_of.read_frozen(tensor)
            yield _key(name, moment), gather_whole(name, whole.to(self.ranks.device), self.config, self.ranks)

    def check(self, stored: files.StoredTensors, moments: Moments) -> None:
        """Raise `UserError` unless a checkpoint holds the whole model, in its shapes."""
        expected = {_key(name, moment) for moment, name in self._stored(sorted(self.all_names), moments)}
        stored.check(expected, {name: form.shape for name, form in self.forms(moments).items()})

    def fill(self, stored: files.StoredTensors, moments: Moments) -> None:
        """Take this rank's part of everything it holds."""
        for moment, name in self._stored(list(self.tensors), moments):
            tensor = self.tensors[name]
            part = own_part(name, stored[_key(name, moment)], self.config, self.ranks).to(tensor.device)
            if tensor.requires_grad:
                state_of.write_whole(self.engine, tensor, part, moment)  # type: ignore[arg-type]
            else:
                state_of.write_frozen(tensor, part)

    def _stored(self, names: list[str], moments: Moments) -> Iterator[tuple[str | None, str]]:
        """(moment, name) of all that is stored; of the moments, trained parameters alone."""
        for moment in moments:
            for name in names:
                if moment is None or name not in self.tensors or self.tensors[name].requires_grad:
                    yield moment, name


def _key(name: str, moment: str | None) -> str:
    return name if moment is None else f"{moment}/{name}"


def save_checkpoint(
    engine: Any,
    folder: Path,
    progress: Progress,
    config: Config,
    ranks: Ranks,
    beside: Mapping[str, Tensor] = MappingProxyType({}),
) -> Path:
    """Write DIR/iter_N and point `latest` at it; a collective call. `beside` is kept as it is, equal on all ranks.

    Raises `UserError` on every rank where the system refuses, such as a full disk; checkpoints before stay as they are.
    """
    temporary = folder / f"{files.tag(progress.iteration)}.tmp"
    try:
        return _save(engine, temporary, progress, config, ranks, beside)
    except UserError:
        if ranks.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _save(
    engine: Any, temporary: Path, progress: Progress, config: Config, ranks: Ranks, beside: Mapping[str, Tensor]
) -> Path:
    def begin() -> None:
        if ranks.rank == 0:
            with refusals_as_user_errors(temporary):
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir(parents=True)

    agree(begin)
    state_of.create_moments(engine)
    held = HeldState(engine, config, ranks)
    own_files: dict[str, Any] = {}

    def write(kind: str, forms: dict[str, Form], tensors: Iterable[tuple[str, Tensor]]) -> None:
        if ranks.data_rank or ranks.tensor_rank:
            for _ in tensors:
                pass
            return
        name = f"{kind}-{ranks.pipeline_rank:02d}-of-{ranks.pipeline_size:02d}.safetensors"
        with refusals_as_user_errors(temporary):
            own_files[name] = write_tensors(temporary / name, forms, tensors)

    agree(lambda: write(files.MODEL, held.forms(WEIGHT), held.whole(WEIGHT)))
    agree(lambda: write(files.OPTIMIZER, held.forms(state_of.MOMENTS), held.whole(state_of.MOMENTS)))
    if beside:
        forms = {name: Form.of(tensor) for name, tensor in beside.items()}
        agree(lambda: write(files.BESIDE, forms, beside.items()) if ranks.pipeline_rank == 0 else None)
    written = {name: facts for part in gather_objects(own_files) for name, facts in part.items()}

    def finish() -> Path:
        if ranks.rank == 0:
            state = {
                **asdict(progress),
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


def load_checkpoint(
    engine: Any, folder: Path, config: Config, ranks: Ranks, beside: Mapping[str, Tensor] = MappingProxyType({})
) -> Resumed | None:
    """Go on from the newest whole checkpoint of a folder; None where it holds none. A collective call.

    The tensors of `beside` are filled where the checkpoint has them.
    """
    path, notes = _newest_undamaged(folder, ranks)
    if path is None:
        return None
    held = HeldState(engine, config, ranks)

    def read() -> tuple[dict[str, Any], files.StoredTensors, files.StoredTensors]:
        state = files.read_state(path)
        _check_architecture(path, state, config)
        weights, moments = files.StoredTensors(path), files.StoredTensors(path, files.OPTIMIZER)
        held.check(weights, WEIGHT)
        if not state.get(files.WEIGHTS_ONLY):
            if not moments.names:
                raise UserError(f"--load {path}: it holds weights and no optimizer state: an older version wrote it")
            held.check(moments, state_of.MOMENTS)
        return state, weights, moments

    state, weights, moments = agree(read)
    held.fill(weights, WEIGHT)
    if state.get(files.WEIGHTS_ONLY):
        state_of.refresh_weights(engine)
        return Resumed(Progress(), path, notes, weights_only=True)
    kept = files.StoredTensors(path, files.BESIDE)
    for name in beside.keys() & kept.names:
        beside[name].copy_(kept[name])
    state_of.create_moments(engine)
    held.fill(moments, state_of.MOMENTS)
    state_of.refresh_weights(engine)
    state_of.set_step(engine, state["optimizer_step"])
    state_of.set_loss_scaler(engine, state["loss_scaler"])
    progress = Progress(state["iteration"], state["consumed_samples"], state["consumed_tokens"])
    changes = (*_change_of_layout(state["layout"], layout(config, ranks)), *changed_settings(state["config"], config))
    return Resumed(progress, path, (*notes, *changes))


def _newest_undamaged(folder: Path, ranks: Ranks) -> tuple[Path | None, tuple[str, ...]]:
    """Return the newest checkpoint whose files have the sums they were written with, and lines on what was not taken.

    Rank 0's listing counts for all, should the ranks see the folder differently.
    """
    found, notes = gather_objects(agree(lambda: files.candidates(folder)))[0]
    reasons: list[str] = []
    for path in found:
        reason = _fault_for_all(path, ranks)
        if reason is None:
            return path, (*notes, *(f"passed over {folder / r}" for r in reasons))
        reasons.append(f"{path.name}: {reason}")
    if found:
        raise agreed_by_all(str(files.none_complete(folder, reasons)))
    return None, ()


def _fault_for_all(path: Path, ranks: Ranks) -> str | None:
    """Return what is wrong with a checkpoint, or None. Each rank reads some of its files, and all of them agree."""
    kinds = (files.MODEL, files.OPTIMIZER, files.BESIDE)

    def check() -> None:
        reason = files.fault(path, kinds, ranks.rank, ranks.world_size)
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
    """`4 ranks (TP 2, ZeRO 1, bf16)`."""
    sizes = [(name, layout[axis]) for name, axis in (("TP", "tensor"), ("PP", "pipeline"))]
    axes = "".join(f"{name} {size}, " for name, size in sizes if size > 1)
    count = layout["ranks"]
    return f"{count} rank{'s' * (count > 1)} ({axes}ZeRO {layout['zero_stage']}, {layout['precision']})"


CHANGEABLE = ("hidden_dropout", "attention_dropout", "attention_backend", "init_method_std", "direction_init")
"""Settings of the model that a resumed run may change: they are no part of its weights' shapes and meaning."""


def _check_architecture(path: Path, state: dict[str, Any], config: Config) -> None:
    ours, theirs = config.to_dict()["model"], Config.from_dict(state["config"]).to_dict()["model"]
    for name, value in theirs.items():
        if name not in CHANGEABLE and ours.get(name) != value:
            there, here = ("not given" if setting is None else setting for setting in (value, ours.get(name)))
            raise UserError(
                f"--load {path}: a checkpoint of another architecture: {flag(name)} is {there} there and {here} here; "
                "give the same, or another --load and --save"
            )
