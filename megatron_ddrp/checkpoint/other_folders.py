"""Folders that are given in place of a model's: their parents, and models in forms that nobody here reads."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

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
