"""Named tensors in safetensors files, written one at a time and checked by their sums; reading never runs code.

A file has eight bytes with the length of a JSON header (name → type, shape, offsets), the header, and the tensors'
bytes. Shapes are known before the first tensor, so a file is streamed: one tensor is in memory at a time, never the
whole model.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megatron_ddrp.data.sealed import SUM

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
                data = _bytes(tensor)
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


def _bytes(tensor: Any) -> Any:
    """Return a tensor's bytes, `[numel * itemsize]`, without a copy if it is contiguous and on the CPU."""
    import torch

    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
