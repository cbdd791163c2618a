"""The weights of a Hugging Face folder: read by name, renamed, and copied into a model of ours; tensors only, no code.

Every family ties the output matrix to the word embedding, as our models do.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from megatron_ddrp import checkpoint
from megatron_ddrp.checkpoint.folder import look_inside
from megatron_ddrp.config import ModelConfig
from megatron_ddrp.errors import UserError
from megatron_ddrp.foreign import misfit, read_object, reading
from megatron_ddrp.model import on_meta_device

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

    The files are those that transformers would read: one file, or the shards that an index names; safetensors first.
    Raise `UserError` if the folder has no weights, if a file is missing, damaged or unreadable without running its
    code, if a name occurs twice with different values, if a weight is quantized, or, with `finite`, if a number is not
    finite.
    """
    path = next((folder / name for name in FILES if (folder / name).is_file()), None)
    if path is None:
        raise UserError(
            f"{folder}: it holds neither {SAFE_WEIGHTS} nor {PICKLED_WEIGHTS}, nor an index of such files; "
            + (look_inside(folder) or "save the model as one of them")
        )
    tensors: dict[str, Tensor] = {}
    for file, promised in (shards_of(path) if path.name.endswith(INDEX) else {path: set()}).items():
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


def shards_of(index: Path) -> dict[Path, set[str]]:
    """Return the files that an index names → the names of the weights in each."""
    places = read_object(index).get("weight_map")
    if misfit(places, Mapping[str, str]) or not places:
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
    tensors = {name: value for name, value in loaded.items() if isinstance(name, str) and isinstance(value, Tensor)}
    for kind in {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}:
        with reading(path, f"cannot be read: torch stores {kind} but computes nothing with it; save it in float32"):
            torch.zeros(kind.itemsize, dtype=torch.uint8).view(kind).float()
    return tensors


TOKEN_EMBEDDING, SEGMENT_EMBEDDING = "embeddings.token.weight", "embeddings.segment.weight"
EMBEDDING_DIFFERENCE = "embeddings.difference.weight"
"""Name of E_Δ of `objectives/electra.py`, which starts at 0."""
OUTPUT_BIAS, OUTPUT_MATRIX = "head.decoder.bias", "head.decoder.weight"
BY_PIECE = (TOKEN_EMBEDDING, EMBEDDING_DIFFERENCE, OUTPUT_BIAS)
"""Ends of the names of weights with one row per piece of the vocabulary."""
UNREAD = re.compile(r"(position_ids|token_type_ids|position_embeddings\.weight|inv_freq)$")
"""Names of an encoder's weights that transformers does not read: constants, and positions of DeBERTa's mask decoder."""
DIFFERENCE = "difference of the embeddings"
HEAD = r"head\.(?!own\.|final_norm\.)"
"""Pattern of the names of the head's own weights."""
DRAWN = {
    r"head\.own\.": "modules of the objective",
    HEAD: "head",
    r"generator\.": "generator",
    r"embeddings\.difference\.": DIFFERENCE,
}
"""Pattern of weights that a folder may lack as a whole, because they can be drawn anew → their name in messages."""


@dataclass(frozen=True)
class Weights:
    """Tensors of a folder under our names, and an account of the others."""

    ours: dict[str, Tensor]
    """Tensors in fp32, under our names."""
    left_out: list[str] = field(default_factory=list)
    """Names in the folder that have no counterpart here."""
    encoder: list[str] = field(default_factory=list)
    """Names in the folder of the encoder's weights."""
    initialised: list[str] = field(default_factory=list)
    """Parts of our model that the folder lacks, with their initial values; known after `fill`."""

    @property
    def has_head(self) -> bool:
        return any(re.match(HEAD, name) for name in self.ours)


def rename(
    tensors: Mapping[str, Tensor], our_name: Callable[[str], str | None], wanted: Collection[str], source: Path
) -> Weights:
    """Return a folder's tensors under our names; all but the `wanted` are left out.

    A folder may store the matrix that is word embedding and output matrix under either name.

    Raise `UserError` for a tensor that occurs twice with different values, and for an untied output matrix.
    """
    weights = Weights({})
    for name, tensor in tensors.items():
        ours = our_name(name)
        if ours is None or (ours not in wanted and ours != OUTPUT_MATRIX):
            weights.left_out.append(name)
            continue
        if not ours.startswith("head."):
            weights.encoder.append(name)
        if not torch.equal(weights.ours.setdefault(ours, tensor.float()), tensor.float()):
            raise UserError(f"{source}: {name} occurs under two names, with different values")
    matrix = weights.ours.pop(OUTPUT_MATRIX, None)
    if matrix is not None and not torch.equal(matrix, weights.ours.setdefault(TOKEN_EMBEDDING, matrix)):
        raise UserError(f"{source}: its output matrix differs from its word embedding; here the two are always tied")
    return weights


def refuse_homeless(encoder: Iterable[str], unused: Iterable[str], prefix: str, source: Path) -> None:
    """Raise `UserError` if an unused weight belongs to a part of the encoder, such as a layer too many.

    `encoder` are names of weights that the encoder of config.json has, with or without `prefix`.
    """
    parts = {name.removeprefix(prefix).partition(".")[0] for name in encoder}
    of_parts = (name for name in unused if name.removeprefix(prefix).partition(".")[0] in parts)
    homeless = [name for name in of_parts if not UNREAD.search(name)]
    if homeless:
        raise UserError(
            f"{source}: the encoder that config.json describes has no place for the weight {min(homeless)}, nor for "
            f"{len(homeless) - 1} more: they do not match; copy the folder again, or correct config.json"
        )


def refuse_sizes(config: ModelConfig, tensors: Mapping[str, Tensor], source: Path) -> None:
    """Raise `UserError`, before a model is built, if a configuration needs far more weights than a folder has."""
    held, needed = sum(tensor.numel() for tensor in tensors.values()), 0
    if config.num_layers <= len(tensors):
        may_lack = ("head.", TOKEN_EMBEDDING, SEGMENT_EMBEDDING)
        shapes = on_meta_device(config).named_parameters()
        needed = sum(p.numel() for name, p in shapes if not name.startswith(may_lack))
    if config.num_layers > len(tensors) or needed > 2 * held:  # `fill` reports smaller differences by tensor
        raise UserError(
            f"{source}: config.json says {config.num_layers} layers x {config.hidden_size}, and the weights are "
            f"{len(tensors)} tensors of {held:,} numbers: they do not match; copy the folder again"
        )


def fill(model: nn.Module, weights: Weights, vocab_size: int, source: Path) -> None:
    """Copy the weights into a freshly initialised model; its vocabulary's padding stays unchanged.

    Raise `UserError` for a weight that is missing or whose shape differs from the configuration's.
    """
    parameters = dict(model.named_parameters()) | checkpoint.persistent_buffers(model)
    _complete(parameters, weights, source)
    for name, parameter in parameters.items():
        if name not in weights.ours:
            continue
        value, target = weights.ours[name], parameter.data
        if name.endswith(BY_PIECE):
            value, target = value[:vocab_size], target[:vocab_size]
        if value.shape != target.shape:
            raise UserError(
                f"{source}: the weight for {name} is {list(value.shape)}, but config.json requires {list(target.shape)}"
            )
        target.copy_(value)


def _complete(parameters: Mapping[str, Tensor], weights: Weights, source: Path) -> None:
    """Record the parts that a folder lacks and that are drawn anew; raise `UserError` for any other missing weight."""
    missing = {name for name in parameters if name not in weights.ours}
    kind = "masked-LM " if OUTPUT_BIAS in parameters else "replaced-token "
    for pattern, part in DRAWN.items():
        whole = {name for name in parameters if re.match(pattern, name)}
        if whole and whole <= missing:
            missing -= whole
            begins = "0" if part == DIFFERENCE else "drawn anew"
            weights.initialised.append(f"{kind * (part == 'head')}{part} ({begins}; the folder has none)")
    if missing:
        raise UserError(
            f"{source}: the weight for {min(missing)} is missing, and {len(missing) - 1} more; the folder is incomplete"
        )
