"""The tensors of a checkpoint, and models read from them on one device, without DeepSpeed and without running code.

A safetensors file has eight bytes with the length of a JSON header (name → type, shape, offsets), the header, and the
tensors' bytes. Shapes are known before the first tensor, so a file is streamed: one tensor is in memory at a time,
never the whole model.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_ddrp.checkpoint.folder import (
    BESIDE,
    MODEL,
    TOKENIZER,
    WEIGHTS,
    WEIGHTS_ONLY,
    choose_checkpoint,
    kind_of,
    read_state,
    tag,
    write_state,
)
from megatron_ddrp.config import Config
from megatron_ddrp.data.atomic import SUM
from megatron_ddrp.data.batches.word_counts import RareWords
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from megatron_ddrp.errors import UserError
from megatron_ddrp.foreign import reading
from megatron_ddrp.objectives.electra import NoteDictionary


class StoredTensors:
    """Tensors of a checkpoint by name, read one at a time. Raises `UserError` if a file is damaged."""

    def __init__(self, path: Path, kind: str = MODEL, files: Iterable[str] = ()) -> None:
        """Open the checkpoint's files of a `kind`, or the safetensors `files` of any other folder."""
        from safetensors import safe_open

        self.path = path
        self._files: dict[str, Any] = {}
        for file in files or [file for file in read_state(path)["files"] if kind_of(file) == kind]:
            with reading(path / file):
                stored = safe_open(str(path / file), framework="pt")
                self._files |= dict.fromkeys(stored.keys(), stored)

    @property
    def names(self) -> set[str]:
        return set(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading it."""
        return tuple(self._files[name].get_slice(name).get_shape())

    def __getitem__(self, name: str) -> Any:
        with reading(self.path):
            return self._files[name].get_tensor(name)

    def check(self, names: Iterable[str], shapes: Mapping[str, Iterable[int]]) -> None:
        """Raise `UserError` unless the tensors have exactly these names, and these shapes where `shapes` has them."""
        wrong = sorted(set(names) ^ self.names) or [n for n in shapes if tuple(shapes[n]) != self.shape(n)]
        if wrong:
            raise UserError(f"{self.path} is of another architecture: {wrong[0]} does not fit the configuration")


def load_model(folder: str | Path) -> tuple[Any, Tokenizer, Config]:
    """Load the newest whole checkpoint of a `--save` folder, or one checkpoint, DIR/iter_0001000, as `read_model` does.

    Damaged checkpoints are named on standard error. Raise `UserError` as `choose_checkpoint` does.
    """
    return read_model(choose_checkpoint(Path(folder)))


def read_model(path: Path) -> tuple[Any, Tokenizer, Config]:
    """Return (model on the CPU in fp32 and eval mode, tokenizer, configuration) of one checkpoint.

    Its attention backend becomes `auto` and compilation is off, because the run's settings suited the run's machine.
    """
    from megatron_ddrp.model import build_model

    config = read_config(path).replace(model={"attention_backend": "auto", "compile": "off"})
    model = build_model(config.model, objective=config.objective)
    load_weights(model, path)
    tokenizer = load_tokenizer(path.resolve().parent / TOKENIZER)
    tokenizer.settle_rows(config.model.num_segments)
    return model.eval(), tokenizer, config


def read_config(path: Path) -> Config:
    """Return the configuration of the run that wrote a checkpoint, with `--rope-theta` of the checkpoint's phase."""
    state = read_state(path)
    config = Config.from_dict(state["config"])
    return config.replace(model={"rope_theta": config.rope_theta_at(state["iteration"] - 1)})


def persistent_buffers(model: Any) -> dict[str, Any]:
    """Return the buffers that a checkpoint keeps, by name."""
    saved = model.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


def load_weights(model: Any, path: Path) -> None:
    """Fill a model from a checkpoint; the checkpoint must hold every tensor in the right shape."""
    stored, own = StoredTensors(path), dict(model.named_parameters()) | persistent_buffers(model)
    stored.check(own, {name: tensor.shape for name, tensor in own.items()})
    for name, tensor in own.items():
        tensor.data.copy_(stored[name])


def save_weights(weights: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Write named tensors as PATH/model.safetensors; return its size and sum."""
    return write_tensors(path / WEIGHTS, {name: Form.of(tensor) for name, tensor in weights.items()}, weights.items())


def save_weights_only(
    weights: Mapping[str, Any], config: Config, folder: Path, facts: Mapping[str, Any] = MappingProxyType({})
) -> Path:
    """Write weights that no run trained as they are, as iteration 0 of a folder; return the checkpoint's path.

    `facts` are further keys of its state, such as `HEAD_SETTINGS`.
    """
    path = folder / tag(0)
    path.mkdir()
    counts = {"iteration": 0, "consumed_samples": 0, "consumed_tokens": 0}
    files = {WEIGHTS: save_weights(weights, path)}
    write_state(path, {**counts, WEIGHTS_ONLY: True, **facts, "files": files, "config": config.to_dict()})
    return path


_TYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_TYPES |= {"int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL"}


class Form(NamedTuple):
    """Type and shape of a tensor, known before its values."""

    dtype: str
    """torch's name of the type, such as `float32`."""
    shape: tuple[int, ...]
    itemsize: int

    @classmethod
    def of(cls, tensor: Any, shape: Iterable[int] | None = None) -> Form:
        """Return the form of a tensor, with `shape` in place of its own if it is a part of a larger tensor."""
        form = tuple(tensor.shape if shape is None else shape)
        return cls(str(tensor.dtype).removeprefix("torch."), form, tensor.element_size())

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


def write_tensors(path: Path, forms: Mapping[str, Form], tensors: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Write the tensors of `forms` in its order and sync them to the disk; return `{"bytes": …, "crc32": …}`.

    Consume every tensor even if the system refuses to write, since making them may be a collective call; then raise
    that `OSError`.
    """
    remaining = iter(tensors)
    try:
        with path.open("wb") as stream:
            header = _header(forms)
            stream.write(header)
            checksum = zlib.crc32(header)
            for name, form in forms.items():
                given, tensor = next(remaining)
                assert (given, Form.of(tensor)) == (name, form), f"{given} {Form.of(tensor)} instead of {name} {form}"
                data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
                stream.write(data)
                checksum = zlib.crc32(data, checksum)
            stream.flush()
            os.fsync(stream.fileno())
    finally:
        for _ in remaining:
            pass
    num_bytes = len(header) + sum(form.num_bytes for form in forms.values())
    return {"bytes": num_bytes, SUM: f"{checksum:08x}"}


def _header(forms: Mapping[str, Form]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, form in forms.items():
        begin, end = end, end + form.num_bytes
        entries[name] = {"dtype": _TYPES[form.dtype], "shape": list(form.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the tensors
    return len(text).to_bytes(8, "little") + text


def note_tensors(notes: NoteDictionary) -> dict[str, Tensor]:
    """Return the tensors of a note dictionary that a checkpoint stores beside the model's, equal in every layout.

        notes/words, notes/vectors     numbers of the words met so far, and their notes `[met, hidden]`
        notes/hashes, notes/counts     hashes and counts of all rare words, see `RareWords`
        notes/pieces, notes/ends       the rare words themselves, as pieces

    They are never exported.
    """
    met, words = notes.met.nonzero().squeeze(-1), notes.words
    return {
        "notes/words": met + 1,
        "notes/vectors": notes.notes[met],
        "notes/hashes": torch.from_numpy(words.hashes.view(np.int64)),
        "notes/counts": torch.from_numpy(words.counts),
        "notes/pieces": torch.from_numpy(words.pieces),
        "notes/ends": torch.from_numpy(words.ends),
    }


def read_notes(path: Path) -> tuple[RareWords, Tensor, Tensor]:
    """Return (all rare words, numbers of the words met `[met]`, their notes `[met, hidden]`) of a checkpoint."""
    stored = StoredTensors(path, BESIDE)
    if "notes/words" not in stored.names:
        raise UserError(f"{path} holds no notes: its run had no --notes; give a checkpoint of a run with --notes")
    hashes, counts, pieces, ends = (stored[f"notes/{name}"].numpy() for name in ("hashes", "counts", "pieces", "ends"))
    words = RareWords(hashes.view(np.uint64), counts, pieces, ends)
    return words, stored["notes/words"], stored["notes/vectors"]


def load_notes(notes: NoteDictionary, path: Path) -> None:
    """Fill a dictionary, converting to its `--notes-dtype`. Raise `UserError` if the checkpoint has other words."""
    words, met, vectors = read_notes(path)
    if not np.array_equal(words.hashes, notes.words.hashes) or vectors.shape[1] != notes.notes.shape[1]:
        raise UserError(
            f"{path} holds notes of {len(words):,} other words: resume with the data, --split, --notes-min-count and "
            "--notes-max-count of the run that wrote it"
        )
    notes.notes[met - 1] = vectors.to(notes.notes.dtype)
    notes.met[met - 1] = True
