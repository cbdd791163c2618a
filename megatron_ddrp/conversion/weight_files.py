"""Reader of a Hugging Face folder's weights by name, for every command: tensors only, no code.

The files are those that transformers would read: one file, or the shards that an index names; safetensors first.
"""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from megatron_ddrp.errors import UserError
from megatron_ddrp.foreign import read_object, reading

SAFE_WEIGHTS, PICKLED_WEIGHTS = "model.safetensors", "pytorch_model.bin"
INDEX = ".index.json"
"""Ending of the name of an index, after the name of the file that it stands for."""
FILES = (SAFE_WEIGHTS, SAFE_WEIGHTS + INDEX, PICKLED_WEIGHTS, PICKLED_WEIGHTS + INDEX)
"""Files that hold or name a folder's weights; transformers reads the first that exists."""
NOT_TENSORS = "not a plain file of tensors: damaged, or unpickling it would run code; save it as model.safetensors"
"""Reason given for a pickle that torch refuses. Torch's own text advises to load it unsafely."""
WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
"""Parts of names that torch's wrappers add: of parallel training, compilation and recomputed activations."""


def read_weights(folder: Path, finite: bool = True) -> dict[str, Tensor]:
    """Return the tensors of a folder by name, without the names of wrappers around the model.

    Raise `UserError` if the folder has no weights, if a file is missing, damaged or unreadable without running its
    code, if a name occurs twice with different values, if a weight is quantized, or, with `finite`, if a number is not
    finite.
    """
    path = next((folder / name for name in FILES if (folder / name).is_file()), None)
    if path is None:
        raise UserError(
            f"{folder}: it holds neither {SAFE_WEIGHTS} nor {PICKLED_WEIGHTS}, nor an index of such files; save the "
            "model as one of them"
        )
    tensors: dict[str, Tensor] = {}
    for file, promised in (_shards(path) if path.name.endswith(INDEX) else {path: set()}).items():
        held = _read_file(file)
        if lacking := promised - held.keys():
            raise UserError(f"{file}: it lacks {min(lacking)}, which {path.name} names there; copy the folder again")
        for name, tensor in held.items():
            if finite and (tensor.is_complex() or not torch.isfinite(tensor.float()).all()):
                raise UserError(f"{file}: {name} contains a value that is not a finite number; copy the folder again")
            if name.endswith((".weight", ".bias")) and not tensor.is_floating_point():
                raise UserError(f"{file}: {name} is quantized, {tensor.dtype}; save the model in a floating-point type")
            plain = ".".join(part for part in name.split(".") if part not in WRAPPERS)
            if plain in tensors and not torch.equal(tensors[plain].float(), tensor.float()):
                raise UserError(f"{file}: {plain} occurs under two names, with different values; copy the folder again")
            tensors[plain] = tensor
    return _without_shared_part(tensors)


def _without_shared_part(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors without the parts with which all names begin, of a wrapper of any name or of the encoder."""
    first = {name.partition(".")[0] for name in tensors}
    if len(first) != 1 or first & tensors.keys():
        return tensors
    return _without_shared_part({name.partition(".")[2]: tensor for name, tensor in tensors.items()})


def _shards(index: Path) -> dict[Path, set[str]]:
    """Return the files that an index names → the names of the weights in each."""
    places = read_object(index).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
        raise UserError(f"{index}: it has no weight_map of names to files; copy the folder again")
    shards: dict[Path, set[str]] = {}
    for weight, name in sorted(places.items()):
        place = PurePosixPath(name)
        if place.is_absolute() or ".." in place.parts or "\\" in name or not place.parts:
            raise UserError(f"{index}: it names the file {name!r:.80}; expected a file in its own folder")
        file = index.parent / place
        if not os.path.isfile(file):  # also for a name that no file can have
            raise UserError(f"{index}: it names {name!r:.80}, which is missing; copy the folder again")
        shards.setdefault(file, set()).add(weight)
    return shards


def _read_file(path: Path) -> dict[str, Tensor]:
    loaded: Any
    is_safe = path.suffix == ".safetensors"
    with reading(path, "cannot be read: {error}" if is_safe else f"cannot be read: {NOT_TENSORS}"):
        if is_safe:
            loaded = safetensors.torch.load_file(str(path))
        else:
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(loaded, dict):
        raise UserError(f"{path} holds a {type(loaded).__name__}; expected named tensors")
    return {name: value for name, value in loaded.items() if isinstance(name, str) and isinstance(value, Tensor)}
