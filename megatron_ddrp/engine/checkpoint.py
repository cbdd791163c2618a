"""Checkpoints of an engine: saving, resuming, and the check that a run can begin from one.

A checkpoint is complete or absent, and a run resumes from it exactly, in any layout. It holds whole fp32 weights and
the optimizer's moments by the whole model's names (`megatron_ddrp/checkpoint/`). Saving gathers one parameter at a time
from the ranks; resuming gives each rank its part. Everything else that a run needs is a pure function of the step.
"""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

from megatron_ddrp import checkpoint as files
from megatron_ddrp.checkpoint import TOKENIZER
from megatron_ddrp.checkpoint.weights import Form, write_tensors
from megatron_ddrp.config import CheckpointConfig, Config, OptimizerConfig, changed_model, changed_settings, flag
from megatron_ddrp.config.run import CHANGEABLE
from megatron_ddrp.data.atomic import make_folder
from megatron_ddrp.data.dataset.indexed_dataset import TokenizerFlags
from megatron_ddrp.data.points import point
from megatron_ddrp.data.tokenizers.tokenizer import (
    DESCRIPTION_FILE,
    SPECIAL_PIECES,
    Tokenizer,
    load_tokenizer,
    read_description,
)
from megatron_ddrp.engine import optimizer_state as state_of
from megatron_ddrp.engine.layout import Setup
from megatron_ddrp.errors import UserError, refusals_as_user_errors, shared_error
from megatron_ddrp.parallel.pipeline import gather_whole, local_buffers, local_parameters, own_part, uncut_shape
from megatron_ddrp.parallel.process_group import Ranks, agree, gather_objects

FREE_PIECE = "[unused"
"""Begin of BERT's pieces that no text gives; a user may give words of their own to them."""


def layout(setup: Setup) -> dict[str, Any]:
    """Return a checkpoint's note about the layout that wrote it; the saved tensors do not depend on the layout."""
    ranks = setup.ranks
    return {
        "ranks": ranks.world_size,
        "tensor": ranks.tensor_size,
        "pipeline": ranks.pipeline_size,
        "zero_stage": setup.config.parallel.zero_stage,
        "precision": setup.config.training.precision,
    }


def _in_words(layout: dict[str, Any]) -> str:
    """Return a layout in words, such as `4 ranks (TP 2, ZeRO 1, bf16)`."""
    sizes = [(name, layout[axis]) for name, axis in (("TP", "tensor"), ("PP", "pipeline"))]
    axes = "".join(f"{name} {size}, " for name, size in sizes if size > 1)
    count = layout["ranks"]
    return f"{count} rank{'s' * (count > 1)} ({axes}ZeRO {layout['zero_stage']}, {layout['precision']})"


def check_optimizer(path: Path, stored: OptimizerConfig, ours: OptimizerConfig) -> None:
    """Raise `UserError` if a checkpoint's optimizer state belongs to another optimizer."""
    if stored.optimizer != ours.optimizer:
        raise UserError(
            f"--load {path}: its optimizer state comes from --optimizer {stored.optimizer}, this run has "
            f"{ours.optimizer}: give the same, or export only the weights with megatron-ddrp convert and start from "
            "them"
        )


def check_architecture(path: Path, stored: Config, config: Config, step: int = 0) -> None:
    """Raise `UserError` if the weights of a checkpoint, written after `step` steps, belong to another architecture."""
    ours, theirs = config.to_dict()["model"], stored.to_dict()["model"]
    changeable = set(CHANGEABLE)
    model = config.model
    if model.encoding.any_length and not (model.adds_absolute_embedding or model.decodes_masks):
        changeable.add("seq_length")
    if _rotary_bases(stored, step) == _rotary_bases(config, step):
        changeable |= {"rope_theta", "local_rope_theta"}
    differing = [name for name in changed_model(stored, config) if name not in changeable]
    if differing:
        words = [f"{flag(name)} is {_shown(theirs[name])} there and {_shown(ours[name])} here" for name in differing]
        if differing == ["seq_length"] and ours["seq_length"] < theirs["seq_length"]:
            shorter = f"--seq-length {theirs['seq_length']} --seq-length-phases {ours['seq_length']}:1"
            raise UserError(f"--load {path}: {words[0]}, and this model depends on it: for shorter rows give {shorter}")
        raise UserError(
            f"--load {path}: a checkpoint of another architecture: {', '.join(words)}; give the same (--config "
            f"{path.parent / 'config.json'} has them all), or another --load and --save"
        )


def _rotary_bases(config: Config, step: int) -> tuple[float, float]:
    """Return θ of global and of local layers in a step: a length phase may have its own."""
    theta = config.rope_theta_at(max(0, step - 1))
    return theta, config.model.local_rope_theta or theta


def _shown(setting: Any) -> Any:
    return "not given" if setting is None else setting


def changed_tokenizer(path: Path, ours: Tokenizer) -> list[str]:
    """Return a line if a run's tokenizer is another than the one beside a checkpoint, but has its pieces.

    A folder without a tokenizer is not compared, and a vocabulary may name BERT's free pieces, [unused0] and so on.

    Raises:
        UserError: pieces or roles have other ids, so the embeddings would be those of other words.
    """
    folder = path.resolve().parent / TOKENIZER
    if not (folder / DESCRIPTION_FILE).is_file() or read_description(folder)["fingerprint"] == ours.fingerprint:
        return []
    theirs = load_tokenizer(folder)
    pairs = enumerate(zip_longest(theirs.pieces, ours.pieces, fillvalue="no piece"))
    changed = [(number, there, here) for number, (there, here) in pairs if there != here]
    moved = [one for one in changed if not one[1].startswith(FREE_PIECE)]
    roles = [role for role in SPECIAL_PIECES if getattr(theirs, f"{role}_id") != getattr(ours, f"{role}_id")]
    if moved or roles:
        vocabulary = folder if theirs.tokenizer_type == "HuggingFace" else folder / theirs.file_name
        flags = " ".join(TokenizerFlags(theirs.tokenizer_type).with_path(str(vocabulary)).words())
        what = f"the role {' and '.join(roles)} has another id"
        for number, there, here in moved[:1]:
            what = f"{len(moved):,} of its pieces differ, such as {number}, {there!r} there and {here!r} here"
        raise UserError(
            f"--load {path}: the vocabulary of this run is not the one of its embeddings: {what}; preprocess with "
            f"{flags}, or give the encoder the other vocabulary first (docs/huggingface.md, Another vocabulary)"
        )
    names = (theirs.tokenizer_type, ours.tokenizer_type)
    how = [" → ".join(names)] if names[0] != names[1] else []
    how += [f"names for {len(changed):,} of {FREE_PIECE}…]"] if changed else []
    return [f"tokenizer: other than {folder} ({', '.join(how) or 'rules'}); the same text may give other ids there"]


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
    origin: Mapping[str, Any] = field(default_factory=dict)
    """Facts about that folder for exports, the fields of `Origin` in `conversion/origin.py`."""

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
    log_interval: int | None = None
    """`--log-interval` of the run that saved it; None if only its weights are taken."""


class HeldState:
    """This rank's part of the model, by the whole model's names. Its methods are collective calls."""

    def __init__(self, engine: Any, setup: Setup) -> None:
        ranks, config = setup.ranks, setup.config
        self.engine, self.encoding, self.ranks = engine, config.model.encoding, ranks
        self.tensors: dict[str, Tensor] = {**local_parameters(engine.module), **local_buffers(engine.module)}
        own = {name: engine.own_moments.get(name, ()) for name in sorted(self.tensors)}
        by_rank = gather_objects((ranks.pipeline_rank, own))
        self.moments = dict(sorted({name: kept for _, names in by_rank for name, kept in names.items()}.items()))
        """Name in the whole model → names of its moments."""
        self.all_moments: Moments = config.optimizer.chosen.moments
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
    setup: Setup,
    since: int,
    beside: Mapping[str, Tensor] = MappingProxyType({}),
) -> Path:
    """Write DIR/iter_N and point `latest` at it; a collective call. `beside` is stored unchanged, equal on all ranks.

    `since` is the step at which this process resumed or last saved: checkpoints of the steps between go.
    Raise `UserError` on every rank if the system refuses, as on a full disk; earlier checkpoints stay unchanged.
    """
    config, ranks, temporary = setup.config, setup.ranks, folder / f"{files.tag(progress.iteration)}.tmp"
    try:
        agree(lambda: _make_empty(temporary) if ranks.rank == 0 else None)
        state_of.create_moments(engine)
        state = {
            **asdict(progress),
            "optimizer_step": state_of.get_step(engine),
            "loss_scaler": state_of.get_loss_scaler(engine),
            "layout": layout(setup),
            "files": _write_files(temporary, HeldState(engine, setup), beside, ranks),
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


def load_checkpoint(engine: Any, folder: Path, setup: Setup) -> Resumed | None:
    """Resume from the newest whole checkpoint of a folder; return None if it holds none. A collective call."""
    config = setup.config
    path, remarks = _newest_whole(folder, setup.ranks)
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

    held = HeldState(engine, setup)
    state, theirs, stored = agree(read)
    held.fill(stored[WEIGHT], WEIGHT)
    if state.get(files.WEIGHTS_ONLY):
        state_of.refresh_weights(engine)
        kept = {key: state[key] for key in (files.HEAD_SETTINGS, files.ORIGIN) if key in state}
        progress = Progress(started_from=_name(path), **kept)
        return Resumed(progress, path, remarks, weights_only=True)
    state_of.create_moments(engine)
    held.fill(stored[held.all_moments], held.all_moments)
    state_of.refresh_weights(engine)
    state_of.set_step(engine, state["optimizer_step"])
    state_of.set_loss_scaler(engine, state["loss_scaler"])
    changes = changed_settings(state["config"], config)
    if (before := state["layout"]) != (now := layout(setup)):
        changes.insert(0, f"checkpoint of {_in_words(before)} → {_in_words(now)}")
    progress, told = resumed_progress(path, state, theirs, config), (*remarks, *changes)
    return Resumed(progress, path, told, log_interval=theirs.logging.log_interval)


def check_stored(path: Path, config: Config) -> tuple[dict[str, Any], Config]:
    """Return a checkpoint's state and configuration. Raises `UserError` unless a run of `config` can begin there."""
    state = files.read_state(path)
    theirs = Config.from_dict(state["config"])
    check_architecture(path, theirs, config, state["iteration"])
    if not state.get(files.WEIGHTS_ONLY):
        check_optimizer(path, theirs.optimizer, config.optimizer)
    return state, theirs


def check_start(load: Path | None, config: Config, tokenizer: Tokenizer) -> None:
    """Raise `UserError` if `load` holds a checkpoint from which a run of `config` with this tokenizer cannot begin."""
    if path := files.newest(load):
        check_stored(path, config.with_vocabulary(tokenizer.vocab_size))
        changed_tokenizer(path, tokenizer)


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
