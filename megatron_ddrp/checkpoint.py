"""What a `--save` folder holds, and how to read a model out of it without DeepSpeed and without unpickling.

    DIR/config.json          resolved configuration          DIR/metrics.jsonl   one row a log or evaluation
    DIR/tokenizer/           the tokenizer of the run        DIR/latest          name of the newest complete checkpoint
    DIR/iter_0001000/        model.safetensors (fp32 weights, names as in the model), state.json (step, counts,
                             configuration, layout), and DeepSpeed's own files: pickles, needed to go on training only

A checkpoint is written under a temporary name and renamed when complete; `latest` is replaced last. One that was
imported is iter_0000000 with weights alone; its state.json says so (`WEIGHTS_ONLY`).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from megatron_ddrp.config import Config
from megatron_ddrp.data.tokenizer import Tokenizer, load_tokenizer
from megatron_ddrp.errors import UserError

LATEST, WEIGHTS, STATE, TOKENIZER = "latest", "model.safetensors", "state.json", "tokenizer"
WEIGHTS_ONLY = "weights_only"
"""Key of a state.json: there is no optimizer state, and training begins at iteration 0."""


def tag(iteration: int) -> str:
    """Folder name of a step's checkpoint."""
    return f"iter_{iteration:07d}"


def newest(folder: Path) -> Path | None:
    """Path of the newest complete checkpoint of a `--save` folder; None where there is none."""
    pointer = folder / LATEST
    if not pointer.is_file():
        return None
    path = folder / pointer.read_text(encoding="utf-8").strip()
    if not (path / STATE).is_file():
        raise UserError(f"{pointer} names {path.name}, missing or incomplete: write an older tag into {pointer}")
    return path


def read_state(path: Path) -> dict[str, Any]:
    """state.json of one checkpoint: iteration, consumed_samples, consumed_tokens, config, world_size."""
    try:
        return json.loads((path / STATE).read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(
            f"{path / STATE} is damaged ({error}): write an older tag into {path.parent / LATEST}"
        ) from None


def mark_latest(folder: Path, name: str) -> None:
    """Make `name` the newest checkpoint, in one step."""
    temporary = folder / (LATEST + ".tmp")
    temporary.write_text(name + "\n", encoding="utf-8")
    temporary.replace(folder / LATEST)


def refuse_folders(save: Path | None, load: Path | None) -> None:
    """Raise `UserError` where a run would be laid over another one, or where `load` is no `--save` folder at all."""
    if load and not (load / LATEST).is_file():
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
    if save and (save / LATEST).is_file() and not (load and load.resolve() == save.resolve()):
        raise UserError(f"--save {save} holds a run already: go on with it by --load {save}, or give another --save")


def prune(folder: Path, keep_last: int, newest_name: str) -> None:
    """Delete all but `keep_last` checkpoints up to the newest; 0 keeps all. Leftovers of killed saves go in any case.

    Later steps than the newest's are there after going back to an older checkpoint; they are not ours to delete.
    """
    for leftover in folder.glob("iter_*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)
    if keep_last:
        for old in sorted(path for path in folder.glob("iter_*") if path.name <= newest_name)[:-keep_last]:
            shutil.rmtree(old, ignore_errors=True)


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


def save_weights(weights: dict[str, Any], path: Path) -> None:
    """Write named CPU tensors as model.safetensors."""
    from safetensors.torch import save_file

    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, str(path / WEIGHTS), {"format": "pt"})


def save_weights_only(weights: dict[str, Any], config: Config, folder: Path) -> Path:
    """Write weights that no training of ours made as iteration 0 of a folder; returns the checkpoint's path."""
    path = folder / tag(0)
    path.mkdir()
    save_weights(weights, path)
    counts = {"iteration": 0, "consumed_samples": 0, "consumed_tokens": 0}
    state = {**counts, WEIGHTS_ONLY: True, "config": config.to_dict()}
    (path / STATE).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
    return path


def load_weights(model: Any, path: Path) -> None:
    """Fill a model from model.safetensors; every weight must be there and fit."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        weights = load_file(str(path / WEIGHTS))
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path / WEIGHTS} cannot be read: {error}") from None
    own = dict(model.named_parameters())
    wrong = sorted(own.keys() ^ weights.keys()) or [n for n in own if own[n].shape != weights[n].shape]
    if wrong:
        raise UserError(f"{path / WEIGHTS} is of another architecture: {wrong[0]} does not fit the configuration")
    for name, parameter in own.items():
        parameter.data.copy_(weights[name])
