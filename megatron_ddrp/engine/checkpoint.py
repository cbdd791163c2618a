"""Save and resume checkpoints: complete or absent, exact, and from any layout to any other.

A checkpoint holds whole fp32 weights and the optimizer's moments by the whole model's names
(`megatron_ddrp/checkpoint/`). Saving gathers one parameter at a time from the ranks; resuming gives each rank its part.
Everything else that a run needs is a pure function of the step.
"""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

from megatron_ddrp import checkpoint as files
from megatron_ddrp.checkpoint.weights import Form, write_tensors
from megatron_ddrp.config import CheckpointConfig, Config, changed_settings
from megatron_ddrp.config.registry import OPTIMIZERS
from megatron_ddrp.data.atomic import make_folder
from megatron_ddrp.data.points import point
from megatron_ddrp.engine import optimizer_state as state_of
from megatron_ddrp.engine.compatibility import changed_layout, check_architecture, check_optimizer, layout
from megatron_ddrp.errors import UserError, refusals_as_user_errors, shared_error
from megatron_ddrp.parallel.agreement import agree, gather_objects
from megatron_ddrp.parallel.process_group import Ranks
from megatron_ddrp.parallel.sharding import gather_whole, local_buffers, local_parameters, own_part, uncut_shape

Moments = tuple[str | None, ...]
"""Names of the optimizer's moments of a parameter; None stands for the weight itself."""
WEIGHT: Moments = (None,)


@dataclass(frozen=True)
class Progress:
    """Steps and data that a run has processed, over all ranks."""

    iteration: int = 0
    """Optimizer steps, including skipped ones."""
    consumed_samples: int = 0
    consumed_tokens: int = 0
    """Tokens other than padding."""
    since_logged: Mapping[str, float] = field(default_factory=dict)
    """Sums and counts of the objective over the steps since the last row of metrics.jsonl, by name."""
    started_from: str | None = None
    """Checkpoint of another folder that training began from, `start/iter_0000000`; None for random weights."""
    datasets: Mapping[str, str] = field(default_factory=dict)
    """Prefix of each dataset → its content, as `Corpus.contents` names it."""
    head_settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of heads that fine-tuning adds, of the folder that training began from, for exports."""

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Progress:
        """Return the progress in a checkpoint's state, whose keys are the names of the fields."""
        return cls(**{each.name: state[each.name] for each in fields(cls) if each.name in state})


@dataclass(frozen=True)
class Resumed:
    """Checkpoint that a run resumes from."""

    progress: Progress
    path: Path
    remarks: tuple[str, ...]
    """Lines for the user: skipped checkpoints, a damaged `latest`, another layout, changed settings."""
    weights_only: bool = False


class HeldState:
    """This rank's part of the model, by the whole model's names. Its methods are collective calls."""

    def __init__(self, engine: Any, config: Config, ranks: Ranks) -> None:
        self.engine, self.encoding, self.ranks = engine, config.model.position_encoding, ranks
        self.tensors: dict[str, Tensor] = {**local_parameters(engine.module), **local_buffers(engine.module)}
        own = {name: engine.own_moments.get(name, ()) for name in sorted(self.tensors)}
        by_rank = gather_objects((ranks.pipeline_rank, own))
        self.moments = dict(sorted({name: kept for _, names in by_rank for name, kept in names.items()}.items()))
        """Name in the whole model → names of its moments."""
        self.all_moments: Moments = OPTIMIZERS.find(config.optimizer.optimizer).moments
        """Names of all moments, in the order of checkpoints."""
        earlier = {name for stage, names in by_rank if stage < ranks.pipeline_rank for name in names}
        self.written = [name for name in self.tensors if name not in earlier]
        """Names that this pipeline stage writes: a tied weight belongs to the first stage that holds it."""

    def forms(self, moments: Moments) -> dict[str, Form]:
        """Return names in the checkpoint → whole shapes of the tensors that this stage writes."""
        forms = {}
        for key, name, _ in self._entries(self.written, moments):
            tensor = self.tensors[name]
            shape = uncut_shape(name, state_of.whole_shape(tensor), self.encoding, self.ranks)
            forms[key] = Form("float32", shape, 4) if tensor.requires_grad else Form.of(tensor, shape)
        return forms

    def whole(self, moments: Moments) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of `forms`, whole."""
        for key, name, moment in self._entries(self.written, moments):
            held = state_of.read_whole(self.engine, self.tensors[name], moment)
            yield key, gather_whole(name, held.to(self.ranks.device), self.encoding, self.ranks)

    def check(self, stored: files.StoredTensors, moments: Moments) -> None:
        """Raise `UserError` unless a checkpoint holds the whole model in the right shapes."""
        expected = {key for key, *_ in self._entries(self.moments, moments)}
        stored.check(expected, {key: form.shape for key, form in self.forms(moments).items()})

    def fill(self, stored: files.StoredTensors, moments: Moments) -> None:
        """Fill all tensors of this rank with its part of a checkpoint."""
        for key, name, moment in self._entries(self.tensors, moments):
            tensor = self.tensors[name]
            part = own_part(name, stored[key], self.encoding, self.ranks).to(tensor.device)
            state_of.write_whole(self.engine, tensor, part, moment)

    def _entries(self, names: Iterable[str], moments: Moments) -> Iterator[tuple[str, str, str | None]]:
        """Yield (name in the checkpoint, name in the model, moment) of every stored tensor."""
        for moment in moments:
            for name in names:
                if moment is None:
                    yield name, name, None
                elif moment in self.moments[name]:
                    yield f"{moment}/{name}", name, moment


def save_checkpoint(
    engine: Any,
    folder: Path,
    progress: Progress,
    config: Config,
    ranks: Ranks,
    since: int,
    beside: Mapping[str, Tensor] = MappingProxyType({}),
) -> Path:
    """Write DIR/iter_N and point `latest` at it; a collective call. `beside` is stored unchanged, equal on all ranks.

    `since` is the step at which this process resumed or last saved: checkpoints of the steps between go.
    Raise `UserError` on every rank if the system refuses, as on a full disk; earlier checkpoints stay unchanged.
    """
    temporary = folder / f"{files.tag(progress.iteration)}.tmp"
    try:
        agree(lambda: _make_empty(temporary) if ranks.rank == 0 else None)
        state_of.create_moments(engine)
        state = {
            **asdict(progress),
            "optimizer_step": state_of.get_step(engine),
            "loss_scaler": state_of.get_loss_scaler(engine),
            "layout": layout(config.parallel.zero_stage, config.training.precision, ranks),
            "files": _write_files(temporary, HeldState(engine, config, ranks), beside, ranks),
            "config": config.to_dict(),
        }
        agree(lambda: _complete(temporary, state, since, config.checkpoint) if ranks.rank == 0 else None)
    except UserError:
        if ranks.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return temporary.with_suffix("")


def _make_empty(folder: Path) -> None:
    with refusals_as_user_errors(folder):
        shutil.rmtree(folder, ignore_errors=True)
        make_folder(folder)


def _write_files(folder: Path, held: HeldState, beside: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Any]:
    """Write this pipeline stage's files; return the sizes and sums of all stages' files by name, on every rank."""
    own_files: dict[str, Any] = {}

    def write(kind: str, forms: dict[str, Form], tensors: Iterable[tuple[str, Tensor]]) -> None:
        if ranks.data_rank or ranks.tensor_rank:
            for _ in tensors:  # gathering them is a collective call
                pass
            return
        name = f"{kind}-{ranks.pipeline_rank:02d}-of-{ranks.pipeline_size:02d}.safetensors"
        with refusals_as_user_errors(folder):
            own_files[name] = write_tensors(folder / name, forms, tensors)

    for kind, moments in ((files.MODEL, WEIGHT), (files.OPTIMIZER, held.all_moments)):
        agree(partial(write, kind, held.forms(moments), held.whole(moments)))
        point("checkpoint.tensors", files.iteration_of(folder.stem))
    if beside:
        forms = {name: Form.of(tensor) for name, tensor in beside.items()}
        agree(lambda: write(files.BESIDE, forms, beside.items()) if ranks.pipeline_rank == 0 else None)
    return {name: facts for part in gather_objects(own_files) for name, facts in part.items()}


def _complete(temporary: Path, state: dict[str, Any], since: int, settings: CheckpointConfig) -> None:
    with refusals_as_user_errors(temporary):
        files.complete(temporary, state, since)
    files.prune(temporary.parent, settings.keep_last, temporary.stem, settings.milestone_interval)


def load_checkpoint(engine: Any, folder: Path, config: Config, ranks: Ranks) -> Resumed | None:
    """Resume from the newest whole checkpoint of a folder; return None if it holds none. A collective call."""
    path, remarks = _newest_whole(folder, ranks)
    if path is None:
        return None

    def read() -> tuple[dict[str, Any], Config, dict[Moments, files.StoredTensors]]:
        state, theirs = check_stored(path, config)
        stored = {WEIGHT: files.StoredTensors(path)}
        if not state.get(files.WEIGHTS_ONLY):
            stored[held.all_moments] = files.StoredTensors(path, files.OPTIMIZER)
        for moments, tensors in stored.items():
            held.check(tensors, moments)
        return state, theirs, stored

    held = HeldState(engine, config, ranks)
    state, theirs, stored = agree(read)
    held.fill(stored[WEIGHT], WEIGHT)
    if state.get(files.WEIGHTS_ONLY):
        state_of.refresh_weights(engine)
        progress = Progress(started_from=_name(path), head_settings=state.get(files.HEAD_SETTINGS, {}))
        return Resumed(progress, path, remarks, weights_only=True)
    state_of.create_moments(engine)
    held.fill(stored[held.all_moments], held.all_moments)
    state_of.refresh_weights(engine)
    state_of.set_step(engine, state["optimizer_step"])
    state_of.set_loss_scaler(engine, state["loss_scaler"])
    own_layout = layout(config.parallel.zero_stage, config.training.precision, ranks)
    changes = (*changed_layout(state["layout"], own_layout), *changed_settings(state["config"], config))
    return Resumed(resumed_progress(path, state, theirs, config), path, (*remarks, *changes))


def check_stored(path: Path, config: Config) -> tuple[dict[str, Any], Config]:
    """Return a checkpoint's state and configuration. Raises `UserError` unless a run of `config` can begin there."""
    state = files.read_state(path)
    theirs = Config.from_dict(state["config"])
    check_architecture(path, theirs, config, state["iteration"])
    if not state.get(files.WEIGHTS_ONLY):
        check_optimizer(path, theirs.optimizer, config.optimizer)
    return state, theirs


def resumed_progress(path: Path, state: Mapping[str, Any], theirs: Config, config: Config) -> Progress:
    """Return the progress of a run that resumes from a checkpoint, which has the configuration `theirs`.

    A branch of another run names its source. A row of metrics.jsonl never mixes two objectives, so sums since the last
    row are dropped if the objective has changed.
    """
    progress = Progress.from_state(state)
    if theirs.objective != config.objective:
        progress = replace(progress, since_logged={})
    if path.parent.resolve() != Path(config.checkpoint.save or path.parent).resolve():
        progress = replace(progress, started_from=_name(path))
    return progress


def _name(checkpoint: Path) -> str:
    """Return a checkpoint's name with its folder's, without the path above."""
    return f"{checkpoint.parent.resolve().name}/{checkpoint.name}"


def _newest_whole(folder: Path, ranks: Ranks) -> tuple[Path | None, tuple[str, ...]]:
    """Return the newest checkpoint whose files match their sums, and lines about the checkpoints before it.

    All ranks use rank 0's listing, because ranks may see the folder differently. Each rank reads some of the files.
    """
    kinds = (files.MODEL, files.OPTIMIZER, files.BESIDE)
    found, remarks = gather_objects(agree(lambda: files.candidates(folder)))[0]
    reasons: list[str] = []
    for path in found:
        own = agree(partial(files.fault, path, kinds, ranks.rank, ranks.world_size))
        faults = gather_objects((socket.gethostname(), own))
        reason = next((fault for _, fault in faults if fault), None)
        if reason is None:
            return path, (*remarks, *(f"skipped {folder / r}" for r in reasons))
        hosts = {host for host, fault in faults if fault == reason}
        where = f" on host {', '.join(sorted(hosts))}" if hosts != {host for host, _ in faults} else ""
        reasons.append(f"{path.name}: {' '.join(reason.split())}{where}")
    if found:
        raise shared_error(str(files.none_complete(folder, reasons)))
    return None, ()
