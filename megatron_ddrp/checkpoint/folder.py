"""Checkpoints in a run's `--save` folder: their names, state.json, the choice of a whole one, and refused folders.

Every reader chooses its checkpoint here, so none of them reads a damaged one. `megatron_ddrp/checkpoint/__init__.py`
lists the files of a folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megatron_ddrp.config import Config, load_config
from megatron_ddrp.config.registry import NotRegistered
from megatron_ddrp.data.atomic import check_object, file_fault, seal_object, sync_folder, write_text
from megatron_ddrp.data.points import point
from megatron_ddrp.errors import UserError
from megatron_ddrp.foreign import parse_json

STATE = "state.json"
WEIGHTS_ONLY = "weights_only"
"""Key of an imported or merged checkpoint: it has no optimizer state, and training starts at iteration 0."""
MERGED = "merged"
"""Key of the models, with their shares, of which a checkpoint is the mean."""
SCALER_FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""Fields of fp16's dynamic loss scaler that a checkpoint keeps."""
STARTED_FROM = "started_from"
"""Key of the checkpoint that training began from, null for random weights."""
NEW_HEAD = "new_head"
"""Key that is true if the head of imported weights was drawn anew, and not trained since."""
HEAD_SETTINGS = "head_settings"
"""Key of the settings, in an imported folder, of heads that fine-tuning adds."""
ORIGIN = "origin"
"""Key of the facts about the imported folder that training began from, `conversion/origin.py`."""


def read_state(path: Path) -> dict[str, Any]:
    """Read state.json of one checkpoint: counts, config, layout, files and their sums, without the state's own sum.

    A state whose sum is right was written by `write_state`, so its keys need no other check. Raise `UserError` if the
    file cannot be read, its sum is missing or differs, or another version wrote its configuration; raise
    `NotRegistered` if it names an objective that no plug-in has registered.
    """
    file = path / STATE
    if not file.is_file():
        raise UserError(f"{STATE} is missing")
    try:
        state = parse_json(file.read_bytes(), lenient=True)
        if not isinstance(state, dict):
            raise ValueError("expected an object")
        state = check_object(state, needs_sum=True)
        Config.from_dict(state["config"])
    except OSError as error:
        raise UserError(f"{STATE} cannot be read: {error.strerror}") from None
    except NotRegistered as error:
        raise NotRegistered(f"{path}: {error}", error.exit_code) from None
    except (ValueError, UserError) as error:
        raise UserError(f"{STATE} is damaged ({error})") from None
    number = re.fullmatch(r"iter_(\d+)", path.name)
    if number and int(number[1]) != state["iteration"]:
        raise UserError(f"{STATE} is damaged (iteration is {state['iteration']} in a folder named {path.name})")
    return state


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write state.json of one checkpoint with its own sum, as `seal_object` makes it."""
    write_text(path / STATE, json.dumps(seal_object(state), indent=2) + "\n")


_OTHER_FORMS = {
    "adapter_config.json": "an adapter (LoRA, PEFT) without its model: merge_and_unload() of peft joins them",
    "*.gguf": "weights in GGUF",
    "tf_model*.h5": "weights of TensorFlow",
    "*.ckpt.*": "weights of TensorFlow",
    "flax_model*.msgpack": "weights of Flax",
    "*.onnx": "a model in ONNX",
}
"""Pattern of a file in a folder → form of a model that nobody here can read."""


def look_inside(folder: Path) -> str:
    """Return advice about a folder that holds no model itself: the folder inside that does, or the form of its files.

    Empty for other folders. The newest of several checkpoints is named, and in a cache of the hub that of `main`.
    """
    with contextlib.suppress(OSError):
        patterns = ("*/config.json", "*/*/config.json", "models--*/snapshots/*/config.json")
        settings = [path for pattern in patterns for path in folder.glob(pattern)]
        models = [p.parent for p in settings if b'"model_type"' in p.read_bytes() or any(p.parent.glob("iter_*"))]
        mains = {path.read_text().strip() for path in (*folder.glob("refs/main"), *folder.glob("*/refs/main"))}
        if models:
            best = max(models, key=lambda p: (p.name in mains, [*map(int, re.findall(r"\d+", p.name))], p))
            return f"give a folder inside it that holds a model, such as {best}"
        for pattern, form in _OTHER_FORMS.items():
            if any(folder.glob(pattern)) or any(folder.glob(f"*/{pattern}")):
                return f"it holds {form}; give a folder with the whole model as model.safetensors"
    return ""


LATEST, WEIGHTS, TOKENIZER = "latest", "model.safetensors", "tokenizer"
_NAME = re.compile(r"iter_[0-9]+")
_LEFTOVER = re.compile(r"iter_[0-9]+(\.old)?\.tmp")
MEGATRON_TRACKER = "latest_checkpointed_iteration.txt"
"""File of a Megatron-LM checkpoint folder that names the newest step; its checkpoints are called iter_N as well."""
_LONGEST_LATEST = 200
"""Number of bytes read from `latest`; a longer file holds no name."""


def tag(iteration: int) -> str:
    """Return the folder name of a step's checkpoint."""
    return f"iter_{iteration:07d}"


def iteration_of(name: str) -> int:
    """Return the step of a checkpoint from its folder name."""
    return int(name.removeprefix("iter_"))


def all_checkpoints(folder: Path) -> list[Path]:
    """Return every DIR/iter_N, highest number first, including damaged ones and those newer than `latest`."""
    named = [path for path in folder.glob("iter_*") if _NAME.fullmatch(path.name)]
    return sorted(named, key=lambda path: (iteration_of(path.name), path.name), reverse=True)


def is_checkpoint(path: Path) -> bool:
    """Return whether a path is one checkpoint, and not a `--save` folder of checkpoints."""
    return (path / STATE).is_file() or bool(_NAME.fullmatch(path.resolve().name)) and not holds_run(path)


def holds_run(folder: Path) -> bool:
    """Return whether a run has saved in a folder: whether it contains a checkpoint or `latest`, even damaged ones."""
    return bool(all_checkpoints(folder)) or os.path.lexists(folder / LATEST)


class Candidates(NamedTuple):
    """Checkpoints of a `--save` folder that a reader may choose."""

    paths: list[Path]
    """Checkpoints, newest first, including damaged ones."""
    remarks: tuple[str, ...]
    """Lines for the user about `latest`: damage, or ignored newer checkpoints."""


def candidates(folder: Path) -> Candidates:
    """Return the checkpoints up to the one that `latest` names, or all of them if `latest` is missing or damaged.

    Newer checkpoints than `latest` exist after a user has gone back to an older one by writing its name into `latest`.
    A path DIR/iter_N means that one checkpoint. Raise `UserError` if `latest` exists and no checkpoint does, or if
    `latest` is a folder or cannot be read.
    """
    if is_checkpoint(folder):
        return Candidates([folder], ())
    found, pointer = all_checkpoints(folder), folder / LATEST
    if not os.path.lexists(pointer):
        return Candidates(found, (f"{pointer} is missing: taking the newest whole checkpoint",) if found else ())
    named, wrong = _named_by_latest(pointer)
    if not wrong and folder / named not in found:
        wrong = f"names {named}, which is missing"
    if wrong and not found:
        raise UserError(f"{folder} holds no checkpoint, and latest {wrong}: copy it again, or start in another --save")
    if wrong:
        return Candidates(found, (f"{pointer} {wrong}: taking the newest whole checkpoint",))
    newest = found.index(folder / named)
    newer = ", ".join(path.name for path in reversed(found[:newest]))
    return Candidates(found[newest:], (f"{pointer} names {named}: leaving newer {newer} alone",) if newer else ())


def last_name(folder: Path) -> str:
    """Return the name of the newest checkpoint up to `latest`, for a message, or `none` without one."""
    try:
        return next((path.name for path in candidates(folder).paths), "none")
    except UserError:
        return "none"


def _named_by_latest(pointer: Path) -> tuple[str, str | None]:
    """Return the checkpoint's name in `latest`, and the fault of the file, or None."""
    if pointer.exists() and not pointer.is_file():
        raise UserError(
            f"{pointer} is not a file: remove it, or write the name of a checkpoint such as {tag(1000)} there"
        )
    try:
        with pointer.open("rb") as stream:
            raw = stream.read(_LONGEST_LATEST)
    except FileNotFoundError:
        return "", "is a broken link"
    except OSError as error:
        raise UserError(f"{pointer} cannot be read: {error.strerror}") from None
    name = raw.decode(errors="replace").strip()
    if not name:
        return "", "is blank"
    return name, None if _NAME.fullmatch(name) else f"holds {name[:20]!r}, which is not a checkpoint's name"


def mark_latest(folder: Path, name: str) -> None:
    """Make `name` the newest checkpoint, atomically."""
    write_text(folder / LATEST, f"{name}\n")


def complete(temporary: Path, state: dict[str, Any], since: int) -> Path:
    """Turn a folder DIR/iter_N.tmp with complete tensors into the newest checkpoint, DIR/iter_N.

    `since` is the step at which this process resumed or last saved. Checkpoints of the steps between the two are
    damaged, or of a run that was abandoned: they go, when the new one is in place.
    """
    write_state(temporary, state)
    path = temporary.with_suffix("")
    step = iteration_of(path.name)
    if path.exists():  # damaged, or from a run that was abandoned
        replaced = path.with_suffix(".old.tmp")
        shutil.rmtree(replaced, ignore_errors=True)
        path.rename(replaced)
        point("checkpoint.moved_away", step)
    temporary.rename(path)
    point("checkpoint.renamed", step)
    sync_folder(path.parent)  # `latest` must never name a checkpoint that a power cut takes away
    mark_latest(path.parent, path.name)
    point("checkpoint.latest", step)
    for passed in all_checkpoints(path.parent):
        if since < iteration_of(passed.name) < step:
            shutil.rmtree(passed, ignore_errors=True)
    return path


def _instead_of_checkpoint(load: Path) -> str:
    """Return advice about a folder without a checkpoint: how it is imported, or that of `look_inside`."""
    foreign = (name + ending for name in (WEIGHTS, "pytorch_model.bin") for ending in ("", ".index.json"))
    if any((load / name).is_file() for name in foreign):
        start = f"megatron-ddrp convert --from-hf {load} --output START"
        return f"it is a Hugging Face folder: import it, {start}, and give START"
    return look_inside(load)


def refuse_folders(save: Path | None, load: Path | None) -> None:
    """Raise `UserError` if a run would overwrite another one, or if `load` is no checkpoint of this project."""
    if load and load.exists() and not load.is_dir():
        home = load.parent.parent if is_checkpoint(load.parent) else load.parent
        raise UserError(f"--load {load} is a file: give the folder of a run, such as {home}, or a checkpoint in it")
    if save and load and is_checkpoint(load) and load.resolve().parent == save.resolve():
        raise UserError(
            f"--load {load} is one checkpoint of --save {save}: give its folder, --load {load.parent}; to resume from "
            f"an older one, write its name into {load.parent / LATEST}, or give another --save"
        )
    for name, folder in (("--save", save), ("--load", load)):
        is_ours = folder and any((path / STATE).is_file() for path in all_checkpoints(folder))
        if folder and not is_ours and (folder / MEGATRON_TRACKER).is_file():
            raise UserError(
                f"{name} {folder} holds checkpoints of Megatron-LM, which are not read: give a folder of its own"
            )
    starts_here = save and load and load.resolve() == save.resolve()
    if load and not candidates(load).paths and not starts_here and (advice := _instead_of_checkpoint(load)):
        raise UserError(f"--load {load} holds no checkpoint: {advice}")
    if save and holds_run(save) and not starts_here:
        raise UserError(f"--save {save} holds a run already: resume it with --load {save}, or give another --save")
    if save and not holds_run(save) and (theirs := _file_of_others(save)):
        raise UserError(f"--save {save} holds {theirs}, which no run wrote and a run would replace: give another")
    if save and starts_here and not holds_run(save) and (save / "config.json").is_file():
        began = load_config(save).checkpoint.load
        if began and Path(began).resolve() != save.resolve():
            raise UserError(f"--load {load} holds no checkpoint yet; its run began from {began}: give --load {began}")
    if load and not load.exists() and not starts_here:
        raise UserError(
            f"--load {load}: no such folder: give that of a run, leave --load out to start afresh, or give that of "
            "--save, which need not exist yet"
        )


def _file_of_others(save: Path) -> str | None:
    """Return the name of a file that a run would replace in a folder without checkpoints, unless a run wrote it."""
    found = [name for name in ("config.json", "metrics.jsonl", "exit_code") if os.path.lexists(save / name)]
    try:
        if found:
            load_config(save)
    except UserError:
        return found[0]
    return None


def prune(folder: Path, keep_last: int, newest_name: str, milestone_interval: int | None = None) -> None:
    """Delete all but `keep_last` checkpoints up to the newest (0 keeps all), and any leftovers of killed saves.

    Steps that `milestone_interval` divides stay for ever, in addition to the last. Checkpoints of later steps also
    stay: they exist after a user has gone back to an older one, and this run did not write them.
    """
    for leftover in folder.glob("iter_*.tmp"):
        if _LEFTOVER.fullmatch(leftover.name):
            shutil.rmtree(leftover, ignore_errors=True)
    if keep_last:
        limit = iteration_of(newest_name)
        own = [path for path in all_checkpoints(folder) if iteration_of(path.name) <= limit]
        for path in own[keep_last:]:
            if not (milestone_interval and iteration_of(path.name) % milestone_interval == 0):
                shutil.rmtree(path, ignore_errors=True)


MODEL, OPTIMIZER, BESIDE = "weights", "optimizer", "beside"
"""Prefixes of file names: the model, the optimizer's moments, and other training state."""


def to_standard_error(line: str) -> None:
    """Print a notice for the user of a command to standard error."""
    print(line, file=sys.stderr, flush=True)


def choose_checkpoint(
    load: Path, kinds: Collection[str] = (MODEL,), tell: Callable[[str], object] = to_standard_error
) -> Path:
    """Return the checkpoint that `--load` means: the newest whole one of a folder, or the one that it names.

    The files of `kinds`, which the caller will read, are checked against their sums. Raise `UserError` if no checkpoint
    is whole, or if the named one is not.
    """
    if is_checkpoint(load):
        if reason := fault(load, kinds):
            raise UserError(f"--load {load}: {reason}; give another checkpoint")
        return load
    for path in whole_checkpoints(load, kinds, tell):
        return path
    wrote = "expected a folder that megatron-ddrp pretrain --save wrote"
    raise UserError(f"--load {load} holds no checkpoint: {_instead_of_checkpoint(load) or wrote}")


def whole_checkpoints(
    folder: Path, kinds: Collection[str] = (MODEL,), tell: Callable[[str], object] = to_standard_error
) -> Iterator[Path]:
    """Yield the whole checkpoints of a `--save` folder, newest first; call `tell` with a line on each damaged one.

    Before a checkpoint is yielded, its files of `kinds` are checked against their sums. Raise `UserError` if there are
    checkpoints and none of them is whole.
    """
    found, remarks = candidates(folder)
    untold, reasons = list(remarks), []
    for path in found:
        reason = fault(path, kinds)
        if reason is not None:
            reasons.append(f"{path.name}: {reason}")
            untold.append(f"skipped {folder / reasons[-1]}")
            continue
        while untold:
            tell(untold.pop(0))
        yield path
    if found and len(reasons) == len(found):
        raise none_complete(folder, reasons)
    for line in untold:
        tell(line)


def newest(folder: Path | None) -> Path | None:
    """Return the newest checkpoint of a `--save` folder whose files have the right sizes, or None without one."""
    return next(whole_checkpoints(folder, (), tell=lambda _: None), None) if folder else None


def none_complete(folder: Path, reasons: list[str]) -> UserError:
    """Return the error for a folder whose checkpoints are all damaged."""
    return UserError(
        f"{folder} holds no complete checkpoint ({'; '.join(reasons)}): copy it again, or start in another --save"
    )


def fault(path: Path, kinds: Collection[str] = (), part: int = 0, parts: int = 1) -> str | None:
    """Return the reason why a checkpoint cannot be used, or None. All its files must exist in the right sizes.

    The files of `kinds` are checked against their sums: every `parts`-th of them, from number `part` on, so that ranks
    can share the reading. Raise `NotRegistered` if a plug-in is missing.
    """
    if not path.is_dir():
        return "missing or incomplete"
    try:
        written = read_state(path)["files"]
        to_read = [name for name in sorted(written) if kind_of(name) in kinds][part::parts]
        checks = [(name, False) for name in sorted(written)] + [(name, True) for name in to_read]
        return next(filter(None, (file_fault(path / name, written[name], read) for name, read in checks)), None)
    except NotRegistered:  # the checkpoint is not at fault
        raise
    except UserError as error:
        return str(error)
    except OSError as error:
        return f"{Path(error.filename or path).name} cannot be read: {error.strerror}"


def kind_of(file: str) -> str:
    """Return the kind of a checkpoint's file by its name: `MODEL`, `OPTIMIZER` or `BESIDE`."""
    return MODEL if file == WEIGHTS else file.partition("-")[0]
