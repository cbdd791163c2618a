"""What a `--save` folder holds, and how to read it: on one device, without DeepSpeed, running nothing that is in it.

    DIR/config.json          resolved configuration          DIR/metrics.jsonl   one row a log or evaluation
    DIR/tokenizer/           the tokenizer of the run        DIR/latest          name of the newest checkpoint
    DIR/lock                 held while a run writes here    DIR/exit_code       0 or 75, if the last run did not fail
    DIR/iter_0001000/
        state.json                          step, counts, optimizer step, loss scale, configuration, the layout that
                                            wrote it, and of each file its size and CRC-32
        weights-00-of-01.safetensors        fp32 weights, whole, by the names of the whole model
        optimizer-00-of-01.safetensors      Adam's moments, `exp_avg/NAME` and `exp_avg_sq/NAME`
        beside-00-of-01.safetensors         what training keeps beside the model, such as the notes on rare words

Pipelines write one pair of files a stage; their union is the model. No trace of ranks, ZeRO or tensor parallelism is
left, so every layout reads what any other wrote. A checkpoint is written under a temporary name and renamed when
complete; `latest` is replaced last. One that was imported is iter_0000000 with weights alone (`WEIGHTS_ONLY`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_ddrp.config import Config
from megatron_ddrp.data.tokenizer import Tokenizer, load_tokenizer
from megatron_ddrp.errors import UserError
from megatron_ddrp.tensor_files import Form, damage, sync_folder, write_tensors

LATEST, WEIGHTS, STATE, TOKENIZER = "latest", "model.safetensors", "state.json", "tokenizer"
MODEL, OPTIMIZER, BESIDE = "weights", "optimizer", "beside"
"""How the names of files begin: the model, Adam's moments, and what a run keeps beside the model."""
WEIGHTS_ONLY = "weights_only"
"""Key of a state.json: there is no optimizer state, and training begins at iteration 0."""


def tag(iteration: int) -> str:
    """Folder name of a step's checkpoint."""
    return f"iter_{iteration:07d}"


def checkpoints(folder: Path) -> list[Path]:
    """Checkpoints of a `--save` folder, newest first, damaged ones included; none newer than `latest` names.

    Newer ones are there after going back to an older checkpoint by writing its name into `latest`.
    """
    pointer = folder / LATEST
    newest_name = pointer.read_text(encoding="utf-8").strip() if pointer.is_file() else None
    found = {path.name for path in folder.glob("iter_*") if re.fullmatch(r"iter_\d+", path.name)}
    names = {name for name in found if newest_name is None or name <= newest_name}
    return [folder / name for name in sorted(names | ({newest_name} if newest_name else set()), reverse=True)]


def newest(folder: Path) -> Path | None:
    """Path of the newest checkpoint of a `--save` folder whose files are all there; None where there is none."""
    found = checkpoints(folder)
    for path in found:
        if fault(path) is None:
            return path
    if found:
        raise none_complete(folder, [f"{path.name}: {fault(path)}" for path in found])
    return None


def none_complete(folder: Path, reasons: list[str]) -> UserError:
    """The error of a folder all of whose checkpoints are damaged."""
    return UserError(
        f"{folder} holds no complete checkpoint ({'; '.join(reasons)}): copy it again, or start in another --save"
    )


def fault(path: Path, files: Iterable[str] | None = None) -> str | None:
    """Why a checkpoint cannot be used; None where all is there. The sums of `files` are computed: that reads them."""
    if not path.is_dir():
        return "missing or incomplete"
    try:
        state = read_state(path)
    except OSError as error:
        return f"{STATE}: {error.strerror}"
    except UserError as error:
        return str(error)
    written = state.get("files")
    if written is None:
        return None if (path / WEIGHTS).is_file() else f"{WEIGHTS} is missing"
    for name, facts in written.items():
        if not (path / name).is_file() or (path / name).stat().st_size != facts["bytes"]:
            return damage(path / name, facts)
    return next(filter(None, (damage(path / name, written[name]) for name in files or ())), None)


def read_state(path: Path) -> dict[str, Any]:
    """state.json of one checkpoint: iteration, consumed_samples, consumed_tokens, config, layout, files."""
    try:
        return json.loads((path / STATE).read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path / STATE} is damaged ({error}); give another checkpoint") from None


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Write state.json, on disk at return."""
    with (path / STATE).open("w", encoding="utf-8") as stream:
        stream.write(json.dumps(state, indent=2) + "\n")
        stream.flush()
        os.fsync(stream.fileno())


def mark_latest(folder: Path, name: str) -> None:
    """Make `name` the newest checkpoint, in one step."""
    temporary = folder / (LATEST + ".tmp")
    with temporary.open("w", encoding="utf-8") as stream:
        stream.write(name + "\n")
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(folder / LATEST)
    sync_folder(folder)


def complete(temporary: Path, state: dict[str, Any]) -> Path:
    """Turn a folder DIR/iter_N.tmp whose tensors are written into the newest checkpoint, DIR/iter_N."""
    folder, path = temporary.parent, temporary.with_suffix("")
    write_state(temporary, state)
    sync_folder(temporary)
    if path.exists():  # damaged, or of a course that was given up
        replaced = path.with_suffix(".old.tmp")
        shutil.rmtree(replaced, ignore_errors=True)
        path.rename(replaced)
    temporary.rename(path)
    mark_latest(folder, path.name)
    return path


def refuse_folders(save: Path | None, load: Path | None) -> None:
    """Raise `UserError` where a run would be laid over another one, or where `load` is no `--save` folder at all."""
    if load and not checkpoints(load):
        if (load / STATE).is_file():
            raise UserError(
                f"--load {load} is one checkpoint: give its folder, --load {load.parent}; to go on from an older one, "
                f"write its name into {load.parent / LATEST}"
            )
        if any((load / name).is_file() for name in (WEIGHTS, "pytorch_model.bin")):
            raise UserError(
                f"--load {load} is a Hugging Face folder: import it, python tools/convert_checkpoint.py "
                f"--from-hf {load} --output START, and give --load START"
            )
    if save and checkpoints(save) and not (load and load.resolve() == save.resolve()):
        raise UserError(f"--save {save} holds a run already: go on with it by --load {save}, or give another --save")


def prune(folder: Path, keep_last: int, newest_name: str, milestone_interval: int | None = None) -> None:
    """Delete all but `keep_last` checkpoints up to the newest; 0 keeps all. Leftovers of killed saves go in any case.

    Steps that `milestone_interval` divides stay for ever, beside the last. Later steps than the newest's are there
    after going back to an older checkpoint; they are not ours to delete.
    """
    for leftover in folder.glob("iter_*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)
    if keep_last:
        old = sorted(path for path in folder.glob("iter_*") if path.name <= newest_name)[:-keep_last]
        for path in old:
            number = path.name.removeprefix("iter_")
            if not (milestone_interval and number.isdigit() and int(number) % milestone_interval == 0):
                shutil.rmtree(path, ignore_errors=True)


class StoredTensors:
    """The tensors of a checkpoint by name, read one at a time. Raises `UserError` where a file is damaged."""

    def __init__(self, path: Path, kind: str = MODEL) -> None:
        from safetensors import SafetensorError, safe_open

        self.path = path
        self._files: dict[str, Any] = {}
        for file in read_state(path).get("files", [WEIGHTS]):
            if file != WEIGHTS and not file.startswith(f"{kind}-") or file == WEIGHTS and kind != MODEL:
                continue
            try:
                stored = safe_open(str(path / file), framework="pt")
                self._files |= dict.fromkeys(stored.keys(), stored)
            except (OSError, SafetensorError) as error:
                raise UserError(f"{path / file} cannot be read: {error}") from None

    @property
    def names(self) -> set[str]:
        return set(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, which is not read."""
        return tuple(self._files[name].get_slice(name).get_shape())

    def __getitem__(self, name: str) -> Any:
        return self._files[name].get_tensor(name)

    def check(self, names: Iterable[str], shapes: Mapping[str, Iterable[int]]) -> None:
        """Raise `UserError` unless these are the tensors, by names, and have these shapes as far as given."""
        wrong = sorted(set(names) ^ self.names) or [n for n in shapes if tuple(shapes[n]) != self.shape(n)]
        if wrong:
            raise UserError(f"{self.path} is of another architecture: {wrong[0]} does not fit the configuration")


def load_model(folder: str | Path) -> tuple[Any, Tokenizer, Config]:
    """(model on the CPU in fp32 and eval mode, tokenizer, configuration) of a `--save` folder's newest checkpoint.

    `folder` may also name one checkpoint, DIR/iter_0001000.
    """
    from megatron_ddrp.model import build_model

    folder = Path(folder)
    path = folder if (folder / STATE).is_file() else newest(folder)
    if path is None:
        raise UserError(f"{folder} holds no checkpoint: expected a folder that pretrain_bert.py --save wrote")
    config = Config.from_dict(read_state(path)["config"])
    model = build_model(config.model, objective=config.objective)
    load_weights(model, path)
    return model.eval(), load_tokenizer(path.parent / TOKENIZER), config


def persistent_buffers(model: Any) -> dict[str, Any]:
    """Buffers that a checkpoint keeps, by name."""
    saved = model.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


def load_weights(model: Any, path: Path) -> None:
    """Fill a model from a checkpoint; every tensor must be there and fit."""
    stored, own = StoredTensors(path), dict(model.named_parameters()) | persistent_buffers(model)
    stored.check(own, {name: tensor.shape for name, tensor in own.items()})
    for name, tensor in own.items():
        tensor.data.copy_(stored[name])


def save_weights(weights: dict[str, Any], path: Path) -> dict[str, Any]:
    """Write named tensors as PATH/model.safetensors; returns its size and sum."""
    return write_tensors(path / WEIGHTS, {name: Form.of(tensor) for name, tensor in weights.items()}, weights.items())


def save_weights_only(weights: dict[str, Any], config: Config, folder: Path) -> Path:
    """Write weights that no training of ours made as iteration 0 of a folder; returns the checkpoint's path."""
    path = folder / tag(0)
    path.mkdir()
    counts = {"iteration": 0, "consumed_samples": 0, "consumed_tokens": 0}
    files = {WEIGHTS: save_weights(weights, path)}
    write_state(path, {**counts, WEIGHTS_ONLY: True, "files": files, "config": config.to_dict()})
    return path
